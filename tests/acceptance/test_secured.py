"""A whole fleet in which nobody may do more than it needs: everything works, nobody was refused, no secret got out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis

from adaptersync_core.access import RedisUser
from adaptersync_core.config import Config, load_config
from adaptersync_core.rollouts import FIELD
from adaptersync_tools.demo.synthetic import write_adapter
from adaptersync_tools.secrets import Passwords
from adaptersync_tools.servers import BINARY_VARIABLE
from support.processes import family
from support.redis_servers import KINDS, server_binary
from support.wait import wait_until_sync

pytestmark = pytest.mark.timeout(150)

CLI = [sys.executable, "-m", "adaptersync_tools.cli"]
READY_S = 60.0
GONE_S = 40.0
RUN = "my-run"
SENTINEL = "Bearer client-secret-5f2c"  # what a client without a key of ours sends


class Fleet:
    """`adaptersync up --simulated --secured`, and its parts as the users they are."""

    def __init__(self, directory: Path, kind: str) -> None:
        self.directory = directory
        self.log = directory / "up.log"
        self.config_path = directory / "adaptersync.toml"
        self.secrets = directory / "secrets"
        self.passwords = Passwords(self.secrets, "default")
        environment = {
            **os.environ,
            "UP_IN": str(directory),
            BINARY_VARIABLE: server_binary(kind),
            "ADAPTERSYNC_GROUP__POLICY": "expected",  # of all policies the one that touches all keys
        }
        command = [*CLI, "up", "--simulated", "--replicas", "2", "--router-port", "0", "--secured", RUN]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "--state-dir", str(directory)], stderr=output, stdout=output, env=environment
            )

    def is_up(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return "stop        Ctrl-C" in self.log.read_text()

    @property
    def config(self) -> Config:
        return load_config(self.config_path, environment={})

    def url(self, of: str) -> str:
        url = re.search(rf"{of} +(http://\S+)", self.log.read_text())
        assert url is not None
        return url[1]

    def run(self, *arguments: str, user: str = "operator:operator-0") -> subprocess.CompletedProcess[str]:
        role, _, name = user.partition(":")
        who = self.passwords.settings(RedisUser(role, name))  # type: ignore[arg-type]
        environment = {**os.environ, "ADAPTERSYNC_CONFIG": str(self.config_path), **who}
        return subprocess.run([*CLI, *arguments], capture_output=True, text=True, timeout=60, env=environment)

    def json(self, *arguments: str, user: str = "operator:operator-0") -> Any:
        run = self.run(*arguments, "--json", user=user)
        assert run.returncode == 0, run.stderr + run.stdout
        return orjson.loads(run.stdout)

    def get(self, path: str, key: str, body: object = None, *, of: str = "router", **headers: str) -> tuple[int, bytes]:
        shown = {"authorization": key} if key else {}
        request = urllib.request.Request(  # noqa: S310 (our own loopback)
            self.url(of) + path,
            data=None if body is None else orjson.dumps(body),
            headers={"content-type": "application/json", **shown, **headers},
        )
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:  # noqa: S310
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def complete(self, key: str, **more: str) -> int:
        return self.get("/v1/completions", key, {"model": RUN, "prompt": "1+1=" * 30, "max_tokens": 4}, **more)[0]

    def key(self, name: str) -> str:
        return f"Bearer {(self.secrets / f'{name}.key').read_text().strip()}"

    def admin(self, url: str) -> redis.Redis:
        server = url.partition("?")[0].rpartition("@")[2]
        password = self.passwords.path().read_text().strip()
        return redis.Redis.from_url(f"redis://{server}", username="admin", password=password, decode_responses=True)

    def refused(self) -> list[str]:
        """Who was refused what since the servers were started; not what a client tells of itself."""
        found = []
        for url in (self.config.redis.control_url, self.config.redis.cache_url):
            with self.admin(url) as client:
                for entry in client.execute_command("ACL", "LOG", 128):
                    fields = entry if isinstance(entry, dict) else dict(zip(entry[::2], entry[1::2], strict=True))
                    if fields["object"] != "client|setinfo":
                        found.append(f"{fields['username']}: {fields['reason']} {fields['object']}")
        return found

    def all_secrets(self) -> set[bytes]:
        files = [*self.secrets.glob("*.password"), *self.secrets.glob("*.key"), *self.directory.glob("*.token")]
        return {file.read_bytes().strip() for file in files} - {b""}

    def told(self) -> Iterator[tuple[str, bytes]]:
        """Everything that anybody could read of this fleet, but for the files that are there to hold secrets."""
        for path in self.directory.rglob("*"):
            if path.is_file() and path.parent != self.secrets and path.suffix != ".token":
                yield str(path), path.read_bytes()
        yield from ((f"hashes in {path}", path.read_bytes()) for path in self.secrets.iterdir() if _is_hashes(path))
        for process in family(self.directory):
            for what in ("cmdline", "environ"):
                yield f"{what} of process {process}", Path("/proc", process.split()[0], what).read_bytes()
        for url in (self.config.redis.control_url, self.config.redis.cache_url):
            with self.admin(url) as client:
                for key in client.scan_iter(count=1000):
                    yield f"key {key}", client.dump(key) or b""
                    if client.type(key) == "stream":
                        yield f"entries of {key}", repr(client.xrange(key)).encode()


def _is_hashes(path: Path) -> bool:
    return path.suffix == ".acl" or path.name == "api-keys"


@pytest.fixture(params=KINDS)
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    running = Fleet(tmp_path, request.param)
    try:
        wait_until_sync(running.is_up, timeout_s=READY_S, what="the fleet is up")
        yield running
    finally:
        running.process.terminate()
        running.process.wait()
        wait_until_sync(lambda: not family(tmp_path), timeout_s=GONE_S)


def test_a_secured_fleet_does_everything_and_tells_no_secret(fleet: Fleet, tmp_path: Path) -> None:
    said: dict[str, bytes] = {}
    trainer, admin = fleet.key("trainer"), fleet.key("admin")
    for number in (1, 2):
        adapter = write_adapter(tmp_path / f"adapter-{number}", base="base", seed=number)
        published = fleet.json("publish", str(adapter), "--run", RUN, user=f"trainer:{RUN}")
        assert published["state"] == "current"
    version = published["version"]

    # requests: with a key, in a session, with an explanation; and not without
    assert [fleet.complete(trainer, **{"x-session-id": "s", "x-adaptersync-explain": "1"}) for _ in range(3)] == [
        200
    ] * 3
    assert fleet.complete("") == fleet.complete(SENTINEL) == fleet.complete(trainer + "x") == 401
    assert fleet.get("/v1/load_lora_adapter", trainer, {})[0] == 403
    assert fleet.get("/v1/load_lora_adapter", admin, {})[0] == 501
    assert fleet.get("/v1/models", "")[0] == fleet.get("/metrics", "")[0] == 401
    assert fleet.get("/health", "")[0] == 200
    for path in ("/health", "/metrics", "/v1/models"):
        status, said[path] = fleet.get(path, admin)
        assert status == 200

    # what an operator does, and what a reader sees
    assert fleet.json("verify", version)["ok"]
    wait_until_sync(
        lambda: fleet.run("status", user="reader:reader-0").returncode == 0, timeout_s=READY_S, what="healthy"
    )
    for command in (
        ("status", "--json"), ("versions", RUN, "--json"), ("events", "--json"), ("config", "--explain"),
        ("bottleneck", RUN), ("phases", RUN), ("jobs",),
    ):  # fmt: skip
        run = fleet.run(*command, user="reader:reader-0")
        assert run.returncode == 0, (command, run.stderr)
        said[" ".join(command)] = (run.stdout + run.stderr).encode()
        assert "refused" not in run.stderr, run.stderr
    undone = fleet.run("rollback", RUN, "--reason", "reward fell")
    assert undone.returncode == 0, undone.stderr
    assert fleet.complete(trainer) == 200

    # the coordinator's page: who looks needs no key, who asks does
    status, said["page"] = fleet.get("/api/fleet", "", of="page")
    assert (status, orjson.loads(said["page"])["problems"]) == (200, [])
    asked = {"kind": "rollback", "run": RUN, "reason": "too late", "current": version}
    assert fleet.get("/api/requests", "", asked, of="page")[0] == 401
    assert fleet.get("/api/requests", trainer, asked, of="page")[0] == 403
    assert fleet.get("/api/requests", admin, asked, of="page")[0] == 202
    wait_until_sync(lambda: "request.refused" in fleet.run("events").stdout, timeout_s=READY_S, what="an answer")
    assert fleet.refused() == []

    # what they may not: each is refused, in one line, and nothing came of it
    another = write_adapter(tmp_path / "another", base="base", seed=3)
    tried: tuple[tuple[tuple[str, ...], str], ...] = (
        (("publish", str(another), "--run", "other-run"), f"trainer:{RUN}"),
        (("publish", str(another), "--run", RUN), "reader:reader-0"),
        (("rollback", RUN, "--reason", "x"), "reader:reader-0"),
        (("rollback", RUN, "--reason", "x"), "agent:replica-0"),
        (("verify", version), "router:router-0"),
    )
    for args, user in tried:
        run = fleet.run(*args, user=user)
        assert run.returncode not in (0, 70), (args, user)
        assert len(run.stderr.strip().splitlines()) == 1, run.stderr
        said[f"{user} {args}"] = run.stderr.encode()
    assert {line.partition(": ")[0] for line in fleet.refused()} == {
        f"default:{user}" for user in (f"trainer:{RUN}", "reader:reader-0", "agent:replica-0", "router:router-0")
    }
    assert {each["version"] for each in fleet.json("versions")} == {
        row["version"] for row in fleet.json("versions", RUN)
    }

    # nobody told a secret: neither files, logs, keys of Redis, processes nor commands
    secrets = fleet.all_secrets() | {SENTINEL.removeprefix("Bearer ").encode()}
    assert len(secrets) >= 11
    found = [
        f"{where}: {secret[:6]!r}..."
        for where, text in [*fleet.told(), *said.items()]
        for secret in secrets
        if secret in text
    ]
    assert found == []
    with fleet.admin(fleet.config.redis.control_url) as client:
        rows = [fields[FIELD] for _, fields in client.xrange("adaptersync:{default}:rollouts")]
    assert rows, "the ledger was not read"
    assert not [row for row in rows if "authorization" in row.lower()]
    assert all(path.stat().st_mode & 0o077 == 0 for path in fleet.secrets.iterdir())
    assert fleet.secrets.stat().st_mode & 0o077 == 0
