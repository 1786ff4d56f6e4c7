"""What the processes of a fleet take, by /proc: a keeper, its command, and whatever that has started."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from adaptersync_tools.supervisor import Service

KEEPER = "keeper"
PAGE = os.sysconf("SC_PAGE_SIZE")


class Process(Struct, frozen=True, kw_only=True):
    """`role` is empty for the command of the service itself. `rss` is bytes, `files` are open descriptors."""

    service: str
    role: str
    pid: int
    rss: int
    files: int
    threads: int


def processes(services: Mapping[str, Service]) -> Iterator[Process]:
    """Everything that runs below a supervisor; what ends meanwhile is left out."""
    for name, service in list(services.items()):
        keeper = service.pid
        if keeper is None:
            continue
        yield from _measured(name, KEEPER, keeper)
        for command in _children(keeper):
            yield from _measured(name, "", command)
            for child in _below(command):
                yield from _measured(name, "child", child)


def _measured(service: str, role: str, pid: int) -> Iterator[Process]:
    place = Path(f"/proc/{pid}")
    try:
        rss = int((place / "statm").read_text().split()[1]) * PAGE
        files, threads = (len(os.listdir(place / name)) for name in ("fd", "task"))
    except (OSError, IndexError):
        return
    if rss:  # one that ended and was not waited for yet has none
        yield Process(service=service, role=role, pid=pid, rss=rss, files=files, threads=threads)


def _below(pid: int) -> Iterator[int]:
    for child in _children(pid):
        yield child
        yield from _below(child)


def _children(pid: int) -> list[int]:
    """By whichever thread they were started."""
    found = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += [int(child) for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split()]
    except OSError:
        pass
    return found
