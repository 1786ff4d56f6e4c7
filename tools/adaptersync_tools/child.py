"""`python -m adaptersync_tools.child GRACE_S NICE COMMAND ...`: run a command whose whole family ends with us.

A keeper stands between a supervisor and one command. Its standard input is a pipe that only the supervisor holds open:
when the supervisor is gone, however it went, the pipe ends and the keeper stops the command. On that, and on SIGTERM or
SIGINT, the command gets SIGTERM and, after the grace, SIGKILL. The keeper is also the reaper of everything the command
started (vLLM's engine processes, a work horse in a group of its own): none of them outlives it. The keeper's exit
status is the command's. The command, and what stays in its session, gives way to other processes by `NICE`, as nice(1)
counts. Imports nothing but the standard library, since there is one keeper a process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

REAP_S = 5.0  # how long killed orphans may take to be gone
PAUSE_S = 0.11  # ten times a second somebody without CAP_SYS_ADMIN may say how nice a session is, on a whole machine
ATTEMPTS = 30  # some three seconds, in which nothing else is done
_POLL_S = 0.02
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(arguments: list[str]) -> int:
    if len(arguments) < 3:
        print("usage: python -m adaptersync_tools.child GRACE_S NICE COMMAND ...", file=sys.stderr)
        return 64
    grace_s, nice, *command = arguments
    give_way(int(nice))
    return keep(command, grace_s=float(grace_s))


def give_way(nice: int) -> None:
    """Let other processes go first, those of other sessions included. What is refused is said; the command runs anyway.

    Linux may share its cores between sessions first (autogroup in sched(7)): then what a process says of itself counts
    within its own alone. Where it does not, what is said of the session has no effect.
    """
    if not nice:
        return
    try:
        os.nice(nice)
        group = Path("/proc/self/autogroup")
        if os.getsid(0) == os.getpid() and group.exists():  # a session that is not ours is not ours to speak for
            _say(group, nice)
    except OSError as error:
        print(f"others do not go first: {error}", file=sys.stderr, flush=True)


def _say(group: Path, nice: int) -> None:
    for attempt in range(ATTEMPTS):
        try:
            group.write_text(str(nice))
        except OSError as error:
            if error.errno != errno.EAGAIN or attempt == ATTEMPTS - 1:
                raise
            time.sleep(PAUSE_S)
        else:
            return


def keep(command: list[str], *, grace_s: float) -> int:
    """Run `command` to its end, or to ours."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    bell_in, bell_out = os.pipe()
    os.set_blocking(bell_out, False)
    signal.set_wakeup_fd(bell_out)
    for number in (*_STOP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)  # the wake-up pipe says which
    process = subprocess.Popen(  # noqa: S603 (the supervisor chose it)
        command, stdin=subprocess.DEVNULL, preexec_fn=_become_child
    )
    try:
        if _wait(process, bell_in):
            process.terminate()
            _poll_until(process, grace_s)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        _end_orphans()
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _become_child() -> None:
    """Between fork and exec: safe here, because a keeper has one thread."""
    signal.set_wakeup_fd(-1)
    for number in (*_STOP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # should the keeper itself be killed


def _wait(process: subprocess.Popen[bytes], bell: int) -> bool:
    """Until the command ended (False) or shall be stopped (True)."""
    lifeline = sys.stdin.fileno()
    while process.poll() is None:
        readable, _, _ = select.select([bell, lifeline], [], [])
        if bell in readable and any(number in _STOP for number in os.read(bell, 256)):
            return True
        if lifeline in readable and not os.read(lifeline, 256):
            return True
    return False


def _poll_until(process: subprocess.Popen[bytes], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _end_orphans() -> None:
    """Kill and reap what the command left behind, generation after generation."""
    deadline = time.monotonic() + REAP_S
    while time.monotonic() < deadline:
        for child in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            return
        time.sleep(_POLL_S)


def _children() -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:  # not Linux, or a kernel without the list: the command's own shutdown must do
        return []


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
