"""The command line's manners: one line an error, a status that says what kind, help that teaches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import orjson
import pytest

from adaptersync_core.address import where
from adaptersync_core.config import RedisSection
from adaptersync_core.errors import ControlUnavailable
from adaptersync_tools.cli import adaptersync, main
from adaptersync_tools.cli.common import run_command
from adaptersync_tools.servers import HOST
from adaptersync_tools.up import free_ports


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    monkeypatch.setenv("ADAPTERSYNC_REDIS__CONTROL_URL", f"redis://{HOST}:{port}/0")
    monkeypatch.delenv("ADAPTERSYNC_CONFIG", raising=False)


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("adaptersync: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["frobnicate"], 2, "No such command 'frobnicate'"),
        (["publish"], 2, "Missing argument 'DIRECTORY'; see adaptersync publish --help"),
        (["events", "--since", "yesterday"], 2, "30s, 10min, 2h or 1d"),
        (["verify", "latest"], 64, "not an adapter id (name=latest)"),
        (["rollback", "my-run", "--reason", ""], 2, "say why, in some words"),
        (["end", "my-run", "--reason", " "], 2, "say why, in some words"),
        (["publish", "/", "--run", "base"], 64, "choose another run name"),
        (["relay", "--run", "r2-v7-0a27f46bd8f3"], 64, "choose another run name"),
        (["up"], 78, "no model to serve; give --model DIRECTORY, or --simulated"),
        (["status"], 69, "Redis cannot be reached"),
        (["versions", "--json"], 69, "Redis cannot be reached"),
        (["rollback", "my-run", "--reason", "bad"], 69, "Redis cannot be reached"),
    ],
)
@pytest.mark.usefixtures("no_server")
def test_an_error_is_one_line(arguments: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == status
    assert says in error_line(capsys)


def test_a_wrong_setting_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ADAPTERSYNC_ROUTER__PORT", "many")
    assert main(["config"]) == 78
    assert "router.port" in error_line(capsys)


def test_keys_are_explained_to_whoever_got_one_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "adaptersync.toml"
    file.write_text('[redis]\ncontroll_url = "redis://there"\n')
    assert main(["config", "--config", str(file)]) == 78
    assert "did you mean redis.control_url?" in error_line(capsys)
    assert main(["config", "--explain", "--config", str(file)]) == 78
    out, error = capsys.readouterr()
    assert "redis.control_url" in out
    assert "controll_url" in error


@pytest.mark.parametrize("arguments", [["config"], ["config", "--json"], ["--help"]])
def test_output_without_room_is_an_error_in_one_line(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            [sys.executable, "-m", "adaptersync_tools.cli", *arguments],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=30, check=False,
        )  # fmt: skip
    assert run.returncode == 74
    assert run.stderr == "adaptersync: error: output cannot be written: No space left on device\n"


def test_config_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--json", "--explain"]) == 0
    keys = orjson.loads(capsys.readouterr().out)
    assert {"name", "default", "value", "meaning", "variable"} == keys[0].keys()


def test_explained_settings_are_a_plain_table_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--explain"]) == 0
    out = capsys.readouterr().out
    assert "router.hold_s" in out
    assert "\x1b" not in out


@pytest.mark.parametrize("name", list(adaptersync.commands))
def test_help_teaches(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert "Example" in out
    assert f"adaptersync {name}" in out


def test_what_is_read_has_json() -> None:
    for name in ("status", "versions", "events", "config", "verify", "publish", "phases", "bottleneck"):
        assert "as_json" in {parameter.name for parameter in adaptersync.commands[name].params}


@pytest.mark.parametrize("arguments", [[], ["--explain"], ["--json"], ["--json", "--explain"]])
def test_settings_are_shown_without_a_secret(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {
        "REDIS__CONTROL_URL": "redis://user:s3cret@there:6379/0",
        "REDIS__CACHE_URL": "redis://there:6380/0?password=s3cret&password_file=/etc/p",
        "ROUTER__GATE_TOKEN": "s3cret",
        "TELEMETRY__TRACES_URL": "https://s3cret@collector/v1/traces",
        "ENGINE__ARGUMENTS": "--api-key s3cret --port=1",
    }.items():
        monkeypatch.setenv(f"ADAPTERSYNC_{name}", value)
    assert main(["config", *arguments]) == 0
    shown = "".join(capsys.readouterr().out.split())
    assert "redis://user:***@there:6379/0" in shown
    assert "password=***&password_file=/etc/p" in shown
    assert "s3cret" not in shown


def test_the_relay_says_what_it_does_where_nothing_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["relay", "--help"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "[default: relay.port, else 8070]" in told
    assert "[default: relay.router_url, else http://127.0.0.1:8080]" in told
    assert "name the trainer's output_dir. [default: relay.allowed_root, else the working directory]" in told


BUILT_IN = where(RedisSection().control_url)


@pytest.mark.parametrize(
    ("server", "named", "hint"),
    [(BUILT_IN, "", True), (BUILT_IN, "fleet.toml", False), ("redis://there:1/0", "", False)],
)
def test_a_server_that_nobody_named_is_said_to_be_built_in(
    server: str, named: str, hint: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ADAPTERSYNC_CONFIG", named)

    @click.command()
    def away() -> None:
        raise ControlUnavailable("Redis cannot be reached", next_step="check the server", redis=server)

    assert run_command(away, [], "adaptersync") == 69
    assert ("ADAPTERSYNC_CONFIG is not set, and this is the built-in address" in error_line(capsys)) == hint


@pytest.mark.usefixtures("no_server")
def test_doctor_says_that_it_looked_by_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = tmp_path / "fleet.toml"
    named.touch()
    found = []
    for options in ([], ["--config", str(named)]):
        assert main(["doctor", "--role", "worker", "--json", *options]) == 1
        found.append([each["what"] for each in orjson.loads(capsys.readouterr().out)["findings"]])
    assert [what for what in found[0] if what not in found[1]] == [
        "no settings file is named, so this was a look at the built-in defaults and the environment"
    ]
