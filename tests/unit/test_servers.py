"""Our own Redis and Valkey servers: configured as their role demands, and never left behind."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from adaptersync_tools.servers import (
    BINARY_VARIABLE,
    RedisServer,
    Role,
    ServerError,
    find_binary,
    generate_password,
)
from support.redis_servers import KINDS, server_binary
from support.wait import wait_until_sync

pytestmark = pytest.mark.foreign_keys("tests of the server itself")


def settings(url: str, *names: str) -> list[str]:
    with redis.Redis.from_url(url, decode_responses=True) as client:
        return [client.config_get(name)[name] for name in names]


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie that nobody reaped does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("kind", KINDS)
def test_control_loses_nothing_when_killed(kind: str, tmp_path: Path) -> None:
    server = RedisServer(Role.CONTROL, tmp_path, binary=server_binary(kind))
    with server:
        assert settings(server.url, "appendonly", "appendfsync", "maxmemory-policy") == [
            "yes",
            "always",
            "noeviction",
        ]
        with redis.Redis.from_url(server.url) as client:
            for n in range(100):
                client.xadd("s", {"n": n})
        server.kill()
        server.start()
        with redis.Redis.from_url(server.url) as client:
            assert client.xlen("s") == 100


@pytest.mark.parametrize("kind", KINDS)
def test_cache_evicts_only_what_expires(kind: str, tmp_path: Path) -> None:
    with RedisServer(Role.CACHE, tmp_path, binary=server_binary(kind), maxmemory_mb=8) as server:
        assert settings(server.url, "appendonly", "save") == ["no", ""]
        with redis.Redis.from_url(server.url) as client:
            client.hset("in-flight", "r1", 1)
            for n in range(40):
                client.set(f"blob{n}", b"x" * 1_000_000, ex=600)
            assert client.hget("in-flight", "r1") == b"1"
            assert client.exists("blob39") == 1
            assert client.info("stats")["evicted_keys"] > 30
    assert {path.name for path in tmp_path.iterdir()} == {"server.conf", "server.log", "lock"}


@pytest.mark.parametrize("kind", KINDS)
def test_password_is_required_and_not_on_the_command_line(kind: str, tmp_path: Path) -> None:
    password = generate_password()
    with RedisServer(Role.CONTROL, tmp_path, binary=server_binary(kind), password=password) as server:
        assert settings(server.url, "port") == [str(server.port)]
        with (
            redis.Redis(port=server.port, retry=Retry(NoBackoff(), 0)) as anonymous,
            pytest.raises(redis.AuthenticationError),
        ):
            anonymous.ping()
        assert password.encode() not in Path(f"/proc/{server.pid}/cmdline").read_bytes()
        assert stat.S_IMODE((tmp_path / "server.conf").stat().st_mode) == 0o600


def test_config_file_that_others_could_read_is_closed(tmp_path: Path) -> None:
    (tmp_path / "server.conf").touch(0o644)
    with RedisServer(Role.CACHE, tmp_path, password="secret"):
        assert stat.S_IMODE((tmp_path / "server.conf").stat().st_mode) == 0o600


def test_directory_with_spaces_and_quotes(tmp_path: Path) -> None:
    with RedisServer(Role.CONTROL, tmp_path / 'my "own" \\ data') as server:
        assert settings(server.url, "dir") == [str(tmp_path / 'my "own" \\ data')]


def test_stop_is_gentle_then_forceful(tmp_path: Path) -> None:
    with RedisServer(Role.CONTROL, tmp_path, stop_within_s=0.2) as server:
        pid = server.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
    assert not alive(pid)
    server.stop()


def test_two_servers_never_share_a_directory(tmp_path: Path) -> None:
    with (
        RedisServer(Role.CONTROL, tmp_path),
        pytest.raises(ServerError, match="another server uses"),
        RedisServer(Role.CONTROL, tmp_path, ready_within_s=0.1),
    ):
        pass


def test_taken_port_is_reported_not_used(tmp_path: Path) -> None:
    with RedisServer(Role.CONTROL, tmp_path / "one") as first:
        second = RedisServer(Role.CONTROL, tmp_path / "two", port=first.port)
        with pytest.raises(ServerError, match="in use"):
            second.start()
        assert second.pid is None


def test_program_that_is_no_server(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="it said nothing"):
        RedisServer(Role.CONTROL, tmp_path, binary="true").start()
    with pytest.raises(ServerError, match="did not serve within"):
        RedisServer(Role.CONTROL, tmp_path, binary=_script(tmp_path, "sleep 60"), ready_within_s=0.3).start()


def test_binary_chosen_must_exist() -> None:
    with pytest.raises(ServerError, match="no-such-server"):
        find_binary("no-such-server")
    with pytest.raises(ServerError, match=BINARY_VARIABLE):
        find_binary(environment={BINARY_VARIABLE: "/no/such/file"})
    assert find_binary(environment={BINARY_VARIABLE: sys.executable}) == Path(sys.executable)
    assert find_binary(environment={}) == Path(server_binary("valkey9"))


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_server_ends_with_its_owner(sign: signal.Signals, tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import pathlib, sys, time; from adaptersync_tools.servers import *\n"
            "server = RedisServer(Role.CONTROL, pathlib.Path(sys.argv[1])); server.start()\n"
            "print(server.pid, flush=True); time.sleep(60)",
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
    )
    with owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert alive(pid)
        owner.send_signal(sign)
    wait_until_sync(lambda: not alive(pid))


def _script(directory: Path, body: str) -> str:
    script = directory / "script"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o700)
    return str(script)
