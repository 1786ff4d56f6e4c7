"""What is for places that we do not have: containers, Slurm, Hugging Face Jobs. Held to what can be known here."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from adaptersync_core.config import Config, load_config, names, variable
from adaptersync_tools.instance import ReplicaSlot
from support.documents import typed
from support.source import REPOSITORY

DEPLOY = REPOSITORY / "deploy"
SCRIPTS = sorted(
    path.relative_to(DEPLOY)
    for folder in ("containers", "hfjobs", "slurm")
    for path in (DEPLOY / folder).iterdir()
    if path.suffix in ("", ".sh", ".sbatch", ".env") and path.name != "Dockerfile"
)
SBATCH = sorted(path.relative_to(DEPLOY) for path in (DEPLOY / "slurm").glob("*.sbatch"))
# of `man sbatch`: what we use, and what may stand there
SBATCH_OPTIONS = {
    "job-name": r"[\w-]+",
    "array": r"\d+(-\d+)?",
    "nodes": r"\d+",
    "ntasks": r"\d+",
    "cpus-per-task": r"\d+",
    "gpus": r"\d+",
    "mem": r"\d+[KMGT]?",
    "time": r"(\d+-)?\d\d:\d\d:\d\d",
    "signal": r"(B:)?[A-Z0-9]+@\d+",
    "output": r"[\w-]*(%[xjAa]-?)+\.log",
}
SECRET = "hunter-2"


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_a_script_is_shell(script: Path) -> None:
    checked = subprocess.run(["bash", "-n", DEPLOY / script], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    text = (DEPLOY / script).read_text()
    assert text.startswith(("#!/usr/bin/env bash\n", "# shellcheck shell=bash"))
    assert os.access(DEPLOY / script, os.X_OK) == text.startswith("#!")
    if shutil.which("shellcheck"):
        checked = subprocess.run(
            ["shellcheck", "-x", "-P", "SCRIPTDIR", f"deploy/{script}"], cwd=REPOSITORY, capture_output=True, text=True
        )
        assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("script", SBATCH, ids=str)
def test_options_of_sbatch_are_such(script: Path) -> None:
    """sbatch looks for them up to the first command, and takes what is after that for a comment."""
    lines = (DEPLOY / script).read_text().splitlines()
    head = lines[: next(at for at, line in enumerate(lines) if line and not line.startswith("#"))]
    given = [line for line in lines if line.startswith("#SBATCH")]
    assert given == [line for line in head if line.startswith("#SBATCH")]
    for line in given:
        option = re.fullmatch(r"#SBATCH --([a-z-]+)=(\S+)", line)
        assert option is not None, line
        assert re.fullmatch(SBATCH_OPTIONS[option[1]], option[2]), line
    assert {"--job-name", "--time", "--mem", "--output"} <= {line.split()[1].partition("=")[0] for line in given}


def interpolated(value: object, environment: dict[str, str]) -> Any:
    """As compose does it: ${NAME:-default}, ${NAME:?complaint}."""
    if isinstance(value, dict):
        return {name: interpolated(item, environment) for name, item in value.items()}
    if isinstance(value, list):
        return [interpolated(item, environment) for item in value]
    if not isinstance(value, str):
        return value

    def fill(found: re.Match[str]) -> str:
        name, kind, rest = found.groups()
        assert kind == ":-" or name in environment, f"{name}: {rest}"
        return environment.get(name) or rest

    return re.sub(r"\$\{(\w+)(:[-?])([^}]*)\}", fill, value)


def composed(*files: str, **environment: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for file in files:
        part = interpolated(yaml.safe_load((DEPLOY / file).read_text()), environment)
        services = part.pop("services")
        assert not found or services.keys() <= found["services"].keys(), "it changes services that are there"
        found.setdefault("services", services)
        found |= part
    return found


# of the compose specification, what a service of ours has
SERVICE_KEYS = {
    "image", "build", "command", "environment", "restart", "init", "cap_drop", "security_opt", "depends_on",
    "healthcheck", "volumes", "ports", "network_mode", "profiles", "working_dir", "stop_grace_period", "shm_size",
    "ipc",
}  # fmt: skip


def test_compose_says_what_is_there() -> None:
    fleet = composed("compose.yaml", MODEL="/srv/models/base")
    services = fleet["services"]
    assert set(services) == {
        "redis-control", "redis-cache", "coordinator", "router", "worker", "replica-0", "agent-0", "trainer"
    }  # fmt: skip
    for name, service in services.items():
        assert service.keys() <= SERVICE_KEYS, name
        for other, terms in (service.get("depends_on") or {}).items():
            assert other in services
            assert terms["condition"] in ("service_started", "service_healthy")
            assert terms["condition"] == "service_started" or "healthcheck" in services[other]
        for volume in service.get("volumes", ()):
            source, place, *mode = volume.split(":")
            assert source in fleet["volumes"] or source.startswith(("/", ".")), volume
            assert place.startswith("/")
            assert mode in ([], ["ro"])
        if "build" in service:
            assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
            assert (DEPLOY / service["build"]["context"]).resolve() == REPOSITORY
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service.get("ports", ()))
    gpu = composed("compose.yaml", "compose.gpu.yaml", MODEL="/m")["services"]
    assert {"replica-0", "trainer"} <= gpu.keys()


def test_containers_run_what_there_is_with_settings_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    services = composed("compose.yaml", MODEL="/srv/models/base")["services"]
    ran = set()
    for name, service in services.items():
        command = service["command"]
        if command[0] == "adaptersync":
            ran.add(command[1])
            typed(command, monkeypatch)
        if "build" in service:
            settings = {key: value for key, value in service["environment"].items()}
            assert settings.keys() <= {variable(each) for each in names()}, name
            load_config(environment=settings)
    assert ran == {"coordinator", "router", "worker", "replica", "agent"}


def places(service: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    """Where a service has which volume, and whether it may write there."""
    found = (volume.split(":") for volume in service.get("volumes", ()))
    return {place: (source, not mode) for source, place, *mode in found}


def test_a_container_has_what_its_part_needs_and_no_more() -> None:
    services = composed("compose.yaml", MODEL="/srv/models/base")["services"]
    config = load_config(environment=services["agent-0"]["environment"])
    at = ReplicaSlot.of(config, 0, hostname="host")
    agent, replica = places(services["agent-0"]), places(services["replica-0"])
    store, stage, run = config.store.path, config.agent.stage_path, config.engine.run_path
    assert agent == {store: ("store", False), stage: ("staged-0", True), run: ("run-0", True)}
    assert replica == {"/model": ("/srv/models/base", False), stage: ("staged-0", False), run: ("run-0", False)}
    assert services["agent-0"]["network_mode"] == "service:replica-0"
    assert f"http://replica-0:{at.port}" in services["agent-0"]["command"]
    assert config.engine.model == "/model"
    for name in ("coordinator", "worker", "trainer"):
        assert places(services[name])[store] == ("store", True)
    assert store not in places(services["router"])
    assert places(services["router"])[config.router.spool_path] == ("spool", True)


def test_the_image_is_made_of_what_there_is() -> None:
    text = (DEPLOY / "containers" / "Dockerfile").read_text()
    for sources in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        assert all((REPOSITORY / source).exists() for source in sources.split())
    extras = re.search(r"^ARG EXTRAS=(\S+)$", text, re.MULTILINE)
    assert extras is not None
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert set(extras[1].split(",")) <= project["optional-dependencies"].keys()
    config = Config()
    for path in (config.store.path, config.agent.stage_path, config.router.spool_path, config.engine.run_path):
        assert path in text


@pytest.fixture
def launch(tmp_path: Path) -> Any:
    """deploy/hfjobs/launch --dry-run, on the real command line of huggingface_hub, without a network."""
    (tmp_path / "bin").mkdir()
    hf = tmp_path / "bin" / "hf"
    hf.write_text(f'#!/bin/sh\necho "$*" >{tmp_path}/arguments\nexec {sys.executable} -m huggingface_hub.cli.hf "$@"\n')
    hf.chmod(0o755)
    passwords = tmp_path / "passwords"
    passwords.mkdir()
    for user in ("coordinator-coordinator-0", "router-router-0", "worker-worker-0", "agent-replica-3", "trainer-r"):
        (passwords / f"{user}.password").write_text(f"{SECRET}\n")
    settings = (DEPLOY / "hfjobs" / "fleet.env").read_text()
    addresses = {name: f"rediss://ops:{SECRET}@redis.example:6380/0" for name in ("REDIS_URL", "REDIS_CACHE_URL")}
    given = {"PASSWORDS": str(passwords), "ROUTER_URL": "https://j--8080.hf.jobs", **addresses}
    for name, value in given.items():
        settings, found = re.subn(rf"^{name}=\S*", f"{name}={value}", settings, flags=re.MULTILINE)
        assert found == 1
    (tmp_path / "my.env").write_text(settings)
    environment = {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "FLEET_ENV": str(tmp_path / "my.env"),
        "HF_TOKEN": f"hf_{SECRET}",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    }

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        ran = subprocess.run(
            [DEPLOY / "hfjobs" / "launch", *arguments], capture_output=True, text=True, env=environment, timeout=60
        )
        given = (tmp_path / "arguments").read_text() if (tmp_path / "arguments").exists() else ""
        assert SECRET not in ran.stdout + ran.stderr + given
        return ran

    return run


@pytest.mark.trl  # huggingface_hub comes with it
@pytest.mark.parametrize(
    ("part", "command", "said"),
    [
        ("control", "/opt/adaptersync/job control", ["hf://buckets/ORG/fleet:/store", "8080", "PASSWORD_ROUTER=***"]),
        (
            "replica 3",
            "/opt/adaptersync/job replica replica-3",
            ["hf://buckets/ORG/fleet:/store:ro", "hf://ORG/base:/model", "8000", "PASSWORD_AGENT=***"],
        ),
        (
            "trainer r python train.py --lr 1",
            "/opt/adaptersync/job trainer r python train.py --lr 1",
            ["HF_TOKEN=***", "ADAPTERSYNC_TRAINER__ROUTER_URL=https://j--8080.hf.jobs"],
        ),
        ("doctor coordinator coordinator-0", "/opt/adaptersync/job doctor coordinator coordinator-0", []),
    ],
)
def test_a_job_is_one_that_hugging_face_takes(launch: Any, part: str, command: str, said: list[str]) -> None:
    ran = launch("--dry-run", *part.split())
    assert ran.returncode == 0, ran.stderr
    summary = re.sub(r" +", " ", ran.stdout)
    assert f"command {command}\n" in summary
    assert "(dry run) Job not submitted." in summary
    addresses = [f"ADAPTERSYNC_REDIS__{server}_URL=***" for server in ("CONTROL", "CACHE")]
    for part in (*said, *addresses, "timeout 12h"):
        assert part in summary
    given = set(re.findall(r"ADAPTERSYNC_\w+(?==)", summary))
    assert given <= {variable(name) for name in names()}


@pytest.mark.trl
def test_launch_says_what_it_lacks(launch: Any) -> None:
    assert launch("--dry-run", "replica", "4").returncode != 0  # there is no password for it
    unknown = launch("engine")
    assert (unknown.returncode, unknown.stderr[:6]) == (64, "usage:")


CALL = re.compile(
    r"^[^#\n]*?\badaptersync ((?:replica|agent|coordinator|router|worker|doctor|acl|api-key)\b[^#\n]*)", re.MULTILINE
)


def test_every_command_of_ours_in_a_script_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for script in SCRIPTS:
        for call in CALL.findall((DEPLOY / script).read_text().replace("\\\n", " ")):
            # what is given on is left out; a variable may be a number, and so may a name or a role
            words = [word for word in shlex.split(call) if "@" not in word]
            words = ["0" if word.startswith("$") else word for word in words]
            found.add(words[0])
            if words[0] == "doctor":
                words[-1] = "coordinator"
            typed(["adaptersync", *words], monkeypatch)
    assert found == {"replica", "agent", "coordinator", "router", "worker", "doctor", "acl", "api-key"}
