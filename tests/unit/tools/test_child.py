"""A keeper and its command: whatever way the supervisor goes, nothing is left."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from adaptersync_tools import child
from support.wait import wait_until_sync

KEEPER = [sys.executable, "-m", "adaptersync_tools.child", "0.3", "0"]
# ignores SIGTERM, and has a child in a session of its own that does so too
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
open(sys.argv[1], "w").write(f"{os.getpid()} {child.pid} ")
time.sleep(60)
"""

SAY_NICENESS = """
import os, pathlib
group = pathlib.Path("/proc/self/autogroup")
print(os.nice(0), group.read_text() if group.exists() else "")
"""


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """A keeper of the stubborn family, and the family's process ids."""
    noted = tmp_path / "pids"
    keeper = subprocess.Popen([*KEEPER, sys.executable, "-c", STUBBORN, str(noted)], stdin=subprocess.PIPE)
    wait_until_sync(lambda: noted.exists() and noted.read_text().count(" ") == 2, timeout_s=20)
    yield keeper, [int(pid) for pid in noted.read_text().split()]
    keeper.kill()
    keeper.wait()
    if keeper.stdin:
        keeper.stdin.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_end_of_the_lifeline_ends_the_family(kept: tuple[subprocess.Popen[bytes], list[int]]) -> None:
    keeper, family = kept
    assert all(map(alive, family))
    assert keeper.stdin is not None
    keeper.stdin.close()
    keeper.wait(10)
    assert not any(map(alive, family))


def test_sigterm_ends_the_family(kept: tuple[subprocess.Popen[bytes], list[int]]) -> None:
    keeper, family = kept
    keeper.terminate()
    assert keeper.wait(10) == 128 + signal.SIGKILL  # the command had to be killed
    assert not any(map(alive, family))


def test_a_killed_keeper_takes_its_command_with_it(kept: tuple[subprocess.Popen[bytes], list[int]]) -> None:
    keeper, (command, orphan) = kept
    keeper.kill()
    wait_until_sync(lambda: not alive(command), what="the command is gone")
    os.kill(orphan, signal.SIGKILL)  # beyond what a dead keeper can do


def test_exit_status_is_the_commands() -> None:
    with subprocess.Popen([*KEEPER, "sh", "-c", "exit 3"], stdin=subprocess.PIPE) as keeper:
        assert keeper.wait(20) == 3


def test_orphans_of_a_command_that_ended_are_ended(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    script = f"sleep 60 & echo $! > {noted}"
    with subprocess.Popen([*KEEPER, "sh", "-c", script], stdin=subprocess.PIPE) as keeper:
        assert keeper.wait(20) == 0
    assert not alive(int(noted.read_text()))


@pytest.mark.parametrize("nice", [0, 7])
def test_it_gives_way_to_other_sessions_too(nice: int) -> None:
    """What a process says of itself counts within its session alone, where the kernel groups by session."""
    keeper = [*KEEPER[:-1], str(nice), sys.executable, "-c", SAY_NICENESS]
    with subprocess.Popen(keeper, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        own, _, group = process.stdout.read().decode().partition(" ")
        assert process.wait(20) == 0
    assert int(own) == min(os.nice(0) + nice, 19)
    if group.strip():  # the kernel does
        assert group.strip().endswith(f"nice {nice}")


def test_it_waits_for_its_turn_to_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is not root may set a session's niceness ten times a second, all on the machine together."""
    said: list[str] = []
    refusals = 2

    def write(path: Path, text: str) -> None:
        said.append(text)
        if len(said) <= refusals:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(path))

    monkeypatch.setattr(child, "PAUSE_S", 0.0)
    monkeypatch.setattr(os, "nice", lambda _: 0)
    monkeypatch.setattr(Path, "exists", lambda _: True)
    monkeypatch.setattr(Path, "read_text", lambda _: "/autogroup-1 nice 0\n")
    monkeypatch.setattr(Path, "write_text", write)
    child.give_way(7)
    assert said == ["7"] * 3
    said.clear()
    refusals = child.ATTEMPTS
    with pytest.raises(BlockingIOError):
        child.give_way(7)
    assert len(said) == child.ATTEMPTS
