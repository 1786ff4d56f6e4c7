"""`adaptersync acl` and `api-key`: secrets go into files of their owner's, hashes into those that are read."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from adaptersync_core.api_keys import ApiKeys, parse
from adaptersync_core.config import Config, TrainerSection
from adaptersync_tools.cli import main
from adaptersync_tools.doctor import Verdict, directories


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def acl(tmp_path: Path, *more: str) -> int:
    return main(["acl", "--out", str(tmp_path / "users.acl"), "--passwords", str(tmp_path / "secret"), *more])


def users(tmp_path: Path) -> dict[str, str]:
    """Hash of the password by user."""
    lines = (tmp_path / "users.acl").read_text().splitlines()
    return {line.split()[1]: next(word[1:] for word in line.split() if word.startswith("#")) for line in lines[1:]}


def test_passwords_are_private_and_the_file_has_their_hashes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert acl(tmp_path, "agent:replica-0", "router:router-0") == 0
    said = capsys.readouterr()
    assert set(users(tmp_path)) == {"admin", "default:agent:replica-0", "default:router:router-0"}
    files = sorted((tmp_path / "secret").iterdir())
    assert [file.name for file in files] == ["admin.password", "agent-replica-0.password", "router-router-0.password"]
    assert {mode(file) for file in (*files, tmp_path / "users.acl")} == {0o600}
    assert mode(tmp_path / "secret") == 0o700
    for file in files:
        password = file.read_text().strip()
        assert len(password) >= 32
        assert password not in said.out + said.err + (tmp_path / "users.acl").read_text()
        assert hashlib.sha256(password.encode()).hexdigest() in users(tmp_path).values()


def test_one_more_changes_no_other_and_a_given_password_counts(tmp_path: Path) -> None:
    acl(tmp_path, "agent:replica-0")
    before = users(tmp_path)
    given = tmp_path / "secret" / "agent-replica-1.password"
    given.write_text("a-given-one\n")
    given.chmod(0o600)
    assert acl(tmp_path, "agent:replica-0", "agent:replica-1") == 0
    after = users(tmp_path)
    assert after.pop("default:agent:replica-1") == hashlib.sha256(b"a-given-one").hexdigest()
    assert after == before


def test_a_password_that_others_may_read_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    acl(tmp_path, "agent:replica-0")
    (tmp_path / "secret" / "agent-replica-0.password").chmod(0o640)
    before = (tmp_path / "users.acl").read_bytes()
    assert acl(tmp_path, "agent:replica-0") == 78
    assert "chmod 600" in capsys.readouterr().err
    assert (tmp_path / "users.acl").read_bytes() == before


def test_without_names_there_is_one_of_each_as_the_settings_call_it(tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text('[group]\nname = "g"\n[agent]\nname = "a"\n[trainer]\nrun = "r"\n')
    assert acl(tmp_path, "--config", str(settings)) == 0
    assert {"g:agent:a", "g:trainer:r", "g:reader:reader-0"} < set(users(tmp_path))
    assert acl(tmp_path, "boss:a") == 64


def test_keys_are_told_once_and_replaced_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "keys", tmp_path / "one.key"

    def api_key(*arguments: str) -> int:
        return main(["api-key", *arguments, "--file", str(file)])

    assert api_key("one", "--scope", "rollout", "--out", str(out)) == 0
    assert api_key("two", "--scope", "publish", "--scope", "admin") == 0
    said = capsys.readouterr()
    one, two = out.read_text().strip(), said.out.splitlines()[-1]
    assert one not in said.out + said.err + file.read_text()
    assert mode(out) == mode(file) == 0o600
    keys = ApiKeys(file)
    for key, scopes in ((one, {"rollout"}), (two, {"publish", "admin"})):
        known = keys.who(f"Bearer {key}".encode())
        assert known is not None
        assert known.scopes == scopes

    file.chmod(0o640)  # for the group of the routers: it stays theirs
    assert api_key("one", "--scope", "rollout", "--out", str(out)) == 0
    assert mode(file) == 0o640
    assert ApiKeys(file).who(f"Bearer {one}".encode()) is None
    assert ApiKeys(file).who(f"Bearer {out.read_text().strip()}".encode()) is not None
    assert api_key("one", "--revoke") == 0
    assert [key.name for key in parse(file.read_text())] == ["two"]
    assert api_key("one", "--revoke") == 64
    assert api_key("three") == 78


def test_doctor_finds_a_secret_that_others_may_read(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("as-key")
    config = Config(trainer=TrainerSection(router_key_file=str(file)))
    for mode, found in ((0o644, 1), (0o640, 0), (0o600, 0)):
        file.chmod(mode)
        verdict = Verdict()
        directories._secrets(verdict, config)
        assert len(verdict.findings) == found
        assert all("trainer.router_key_file" in finding.what for finding in verdict.findings)
