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
    if group.strip():  # this kernel has them
        assert group.strip().endswith(f"nice {nice}")


@pytest.mark.parametrize(
    ("refused", "times", "said", "told"),
    [
        (errno.EAGAIN, 2, 3, ""),  # others spoke a moment before
        (errno.EAGAIN, child.ATTEMPTS, child.ATTEMPTS, "others do not go first: [Errno 11]"),
        (errno.EROFS, 1, 1, "others do not go first: [Errno 30]"),
    ],
)
def test_a_command_runs_whether_others_go_first_or_not(
    refused: int, times: int, said: int, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attempts: list[str] = []

    def write(path: Path, text: str) -> None:
        attempts.append(text)
        if len(attempts) <= times:
            raise OSError(refused, os.strerror(refused), str(path))

    monkeypatch.setattr(child, "PAUSE_S", 0.0)
    monkeypatch.setattr(os, "nice", lambda _: 0)
    monkeypatch.setattr(os, "getsid", lambda _: os.getpid())
    monkeypatch.setattr(Path, "exists", lambda _: True)
    monkeypatch.setattr(Path, "write_text", write)
    child.give_way(7)
    assert attempts == ["7"] * said
    assert capsys.readouterr().err.startswith(told)


def test_it_speaks_for_no_session_but_its_own() -> None:
    keeper = [*KEEPER[:-1], "7", sys.executable, "-c", SAY_NICENESS]
    session = ["sh", "-c", '"$@"; true', "sh", *keeper]  # whose first process is the shell
    with subprocess.Popen(session, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        _, _, group = process.stdout.read().decode().partition(" ")
        assert process.wait(20) == 0
    assert not group.strip() or group.strip().endswith("nice 0")
