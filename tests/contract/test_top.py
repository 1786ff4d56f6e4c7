"""`adaptersync top` on a real terminal and for programs."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import orjson
import pytest

from adaptersync_core.keys import Keys
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from adaptersync_tools.servers import RedisServer, Role
from support.page import V2, fill
from support.redis_servers import server_binary
from support.tables import TableWriter
from support.wait import wait_until_sync

TOP = [sys.executable, "-m", "adaptersync_tools.cli", "top"]


@pytest.fixture
def redis_kind() -> str:
    return "redis7"


@pytest.fixture
def server(tmp_path: Path, redis_kind: str) -> Iterator[RedisServer]:
    with RedisServer(Role.CONTROL, tmp_path / "control", binary=server_binary(redis_kind)) as server:
        yield server


@pytest.fixture
async def registry(server: RedisServer) -> AsyncIterator[Registry]:
    client = RedisClient(server.url, name="test")
    registry = Registry(client, Keys("default"))
    await fill(registry, TableWriter(client, registry.keys))
    yield registry
    await client.close()


def environment(server: RedisServer) -> dict[str, str]:
    return {**os.environ, "ADAPTERSYNC_REDIS__CONTROL_URL": server.url, "TERM": "xterm"}


class Terminal:
    """A program on a terminal of its own; `said` is all that it wrote."""

    def __init__(self, environment: dict[str, str], *, columns: int, lines: int) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self._theirs = theirs
        os.set_blocking(self._ours, False)
        self.process = subprocess.Popen(TOP, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        self.said = ""

    def read(self) -> str:
        with contextlib.suppress(BlockingIOError, OSError):
            while chunk := os.read(self._ours, 65536):
                self.said += chunk.decode(errors="replace")
        return self.said

    def press(self, key: bytes) -> None:
        os.write(self._ours, key)

    def ended(self) -> bool:
        self.read()
        return self.process.poll() is not None

    def modes(self) -> list[object]:
        return termios.tcgetattr(self._theirs)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


@pytest.mark.parametrize("columns", [80, 150])
@pytest.mark.parametrize("interrupted", [False, True], ids=["q", "Ctrl-C"])
def test_it_watches_until_a_key_and_leaves_the_terminal_as_it_was(
    server: RedisServer, registry: Registry, columns: int, interrupted: bool
) -> None:
    terminal = Terminal(environment(server), columns=columns, lines=24)
    try:
        wait_until_sync(lambda: terminal.read().count("generation 1") >= 2, timeout_s=30, what="two looks")
        for word in ("replica-0", "replica-1", "ejected", "coordinator-0 leads", "Events"):
            assert word in terminal.said
        assert "\x1b[?1049h" in terminal.said  # a screen of its own
        if interrupted:
            terminal.process.send_signal(signal.SIGINT)  # as the terminal does where it is the controlling one
        else:
            terminal.press(b"q")
        wait_until_sync(terminal.ended, timeout_s=10)
        assert terminal.process.returncode == (130 if interrupted else 0), terminal.said[-2000:]
        assert terminal.said.rindex("\x1b[?1049l") > terminal.said.rindex("\x1b[?1049h")
        assert terminal.modes() == terminal.before
    finally:
        terminal.close()


def test_a_server_that_goes_away_is_said_and_what_was_seen_stays(server: RedisServer, registry: Registry) -> None:
    terminal = Terminal(environment(server), columns=120, lines=30)
    try:
        wait_until_sync(lambda: "generation 1" in terminal.read(), timeout_s=30)
        server.kill()
        wait_until_sync(lambda: "this is what was seen last" in terminal.read(), timeout_s=20)
        after = terminal.said[terminal.said.index("this is what was seen last") :]
        wait_until_sync(lambda: "replica-0" in terminal.read()[-len(after) :], timeout_s=10)
        terminal.press(b"q")
        wait_until_sync(terminal.ended, timeout_s=15)
        assert terminal.process.returncode == 0
        assert "events cannot be followed" not in terminal.said  # nor any other line of a log
    finally:
        terminal.close()


def test_programs_get_the_document_and_pipes_the_screen(server: RedisServer, registry: Registry) -> None:
    run = subprocess.run([*TOP, "--json"], capture_output=True, text=True, timeout=30, env=environment(server))
    assert run.returncode == 0, run.stderr
    told = orjson.loads(run.stdout)
    assert told["versions"][0]["version"] == V2
    assert [rate is not None for rate in told["series"]["requests_s"]] == [False, True]  # rates need two looks
    assert told["events"][-1]["subject"]
    run = subprocess.run(TOP, capture_output=True, text=True, timeout=30, env=environment(server))
    assert run.returncode == 0, run.stderr
    assert "replica-1" in run.stdout
    assert "\x1b" not in run.stdout


def test_without_a_server_it_is_one_line(server: RedisServer) -> None:
    server.stop()
    for option in ("--once", "--json"):
        run = subprocess.run([*TOP, option], capture_output=True, text=True, timeout=30, env=environment(server))
        assert run.returncode == 69
        assert run.stderr.count("\n") == 1


async def test_an_event_of_any_id_is_shown(server: RedisServer, registry: Registry) -> None:
    """Who may write one may give it an id beyond the calendar, and values that no service writes."""
    fields = ("type", "forged", "staged_s", "long", "size", "large")
    await registry.client.command("XADD", registry.keys.events, "999999999999999-0", *fields)
    commands = ([*TOP, "--once"], [*TOP[:-1], "events"], [*TOP[:-1], "events", "--since", "1h", "--json"])
    for command in commands:
        run = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=60,
            env={**environment(server), "TZ": "Pacific/Kiritimati"},  # the first to have another year
        )  # fmt: skip
        assert (run.returncode, run.stderr) == (0, "")
        assert "forged" in run.stdout
