"""Whose CPU time it was: of each service, and of programs that are not ours. On a shared machine figures tell of them.

Linux only. CPU time does not grow while a process waits for its turn, so it says what something costs even there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
BENCH, OTHERS = "bench", "others"
_IDLE = (3, 4)  # fields of /proc/stat that are no work
_STEAL_AND_LATER = 7  # another machine's work, and what is counted twice
_SESSION, _TIMES = 3, slice(11, 15)  # fields of /proc/PID/stat, from the state on; own and reaped children's time


class Meter:
    """`leaders` are the sessions that are ours, by name (several may share one); this process is `bench`."""

    def __init__(self, leaders: Mapping[int, str]) -> None:
        self._names = dict(leaders)

    def read(self) -> dict[str, float]:
        """CPU seconds until now by name, and of `others`: only differences mean something."""
        spent: dict[str, float] = {}
        for pid in os.listdir("/proc"):
            if pid.isdigit() and (found := _process(int(pid))) is not None:
                name = BENCH if int(pid) == os.getpid() else self._names.get(found[0], "")
                if name:
                    spent[name] = spent.get(name, 0.0) + found[1]
        spent[OTHERS] = read_machine(Path("/proc/stat").read_text()) - sum(spent.values())
        return spent


def _process(pid: int) -> tuple[int, float] | None:
    """Session and CPU seconds of a process; None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return read_process(text)


def read_process(text: str) -> tuple[int, float]:
    """Of a line of /proc/PID/stat; the name in it may hold anything."""
    fields = text.rpartition(")")[2].split()
    return int(fields[_SESSION]), sum(int(ticks) for ticks in fields[_TIMES]) / TICKS


def read_machine(text: str) -> float:
    """CPU seconds all programs used since the machine started, of /proc/stat."""
    ticks = [int(field) for field in text.splitlines()[0].split()[1:]]
    return sum(spent for index, spent in enumerate(ticks[:_STEAL_AND_LATER]) if index not in _IDLE) / TICKS
