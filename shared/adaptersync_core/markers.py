"""Marker names: how a mount is asked whether it shows a version yet without being blinded by the question.

Many network mounts remember a name that they did not find, for half a minute and with all that is under it. So a path
must not be looked at before it is there, and only a look can tell. The publisher therefore leaves many names for the
one answer, tiny files in the root of the store (a directory that every mount has), written after the version is in its
place. An agent looks at each name once; the first that it finds says that the version may be looked at, too. It is a
hint: bytes are believed for what they are, and a version whose names are used up or gone is looked for directly.

They are written in the order in which they are looked at. Where bytes go by the fast lane they may come after the
announcement: a name that is looked at too early is spent, the next is not, and the pauses soon exceed the writing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from adaptersync_core.manifest import Manifest

COUNT = 88  # names of one version: with the pauses of an agent they last a little over a minute
FIRST_PAUSE_S = 0.05  # between two looks; doubles up to
PAUSE_S = 0.75  # which is the longest, unless a longer wait is to be covered
QUICK_LOOKS = 4  # before the pause has grown to its longest
GLANCE_S = 0.2  # how often to see whether the wait has become needless
REMEMBERED = 256  # versions of which is known how many names were tried
TRUSTED_S = 120.0  # how old a version may be, by its manifest, for its markers to be looked for
KEPT_S = 240.0  # how much older than the newest a marker may be before it is removed: some are looked for a minute long
AT_ONCE = 32  # files written or removed at a time: on an object store each is a request of its own
_PREFIX = ".visible-"

log = logging.getLogger(__name__)


def names(manifest: Manifest) -> list[str]:
    """What to look at in the root of the store, in this order; nothing for a version that has no markers any more."""
    if time.time() - manifest.created_at > TRUSTED_S:
        return []
    return _names(manifest)


class Lookout:
    """Looks at the markers on one mount, each name once: `shows` is a look, and what it misses the mount may remember.

    Whoever shares the mount misses the same names, but not later than this one, so it costs him a look or two.
    """

    def __init__(self, shows: Callable[[str], bool]) -> None:
        self._shows = shows
        self._tried: dict[str, int] = {}  # names, by version; the versions looked for last

    async def wait(self, manifest: Manifest, *, until: float, otherwise: Callable[[], bool] = lambda: False) -> None:
        """Wait until the mount shows a marker of the version: before, its own path must not be touched.

        Returns all the same when no name is left or it is `until`, on the monotonic clock: then a look at the path has
        nothing to lose. And when the version has come by another way: `otherwise` says so, and costs little.
        """
        left = names(manifest)[self._tried.get(manifest.adapter_id, 0) :]
        pause = FIRST_PAUSE_S
        longest = max(PAUSE_S, (until - time.monotonic()) / max(1, len(left) - QUICK_LOOKS))
        for name in left:
            self._tried[manifest.adapter_id] = self._tried.pop(manifest.adapter_id, 0) + 1
            if len(self._tried) > REMEMBERED:
                self._tried.pop(next(iter(self._tried)))
            if await asyncio.to_thread(self._shows, name):
                return
            ends = time.monotonic() + pause
            if ends > until:
                return
            while (rest := ends - time.monotonic()) > 0:
                if otherwise():
                    return
                await asyncio.sleep(min(rest, GLANCE_S))
            pause = min(pause * 2, longest)


def leave(root: Path, manifest: Manifest) -> bool:
    """Write a version's markers; whether any is there now. Nothing is flushed: they are for a minute.

    Those that are there stay as they are, and one that cannot be written is no reason not to publish.
    """
    content = f"{manifest.adapter_id}\n".encode()
    names = _names(manifest)
    failed: list[OSError] = []

    def write(name: str) -> None:
        try:
            with contextlib.suppress(FileExistsError):
                _write(f"{root}/{name}", content)
        except OSError as error:
            failed.append(error)

    _each(write, names)
    if failed:
        log.warning("%d of %d markers of %s: %s", len(failed), len(names), manifest.adapter_id, failed[0])
    return len(failed) < len(names)


def tidy(root: Path) -> float:
    """Remove the markers of older versions, of whatever run; returns the newest one's time, by the clock of the disk.

    Ages are differences of the disk's own times, so that no other host's clock matters. A version's markers are of one
    age, which is asked once: to ask each may be a request, too. Those of another user are his to remove, where the root
    is as /tmp is.
    """
    left: dict[str, list[str]] = {}
    written: dict[str, float] = {}
    with os.scandir(root) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX):
                version = entry.name.rpartition("-")[0]
                left.setdefault(version, []).append(entry.name)
                if version not in written:
                    with contextlib.suppress(FileNotFoundError):
                        written[version] = entry.stat().st_mtime
    newest = max(written.values(), default=time.time())
    old = [name for version, at in written.items() if newest - at > KEPT_S for name in left[version]]

    def remove(name: str) -> None:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            os.unlink(f"{root}/{name}")

    _each(remove, old)
    return newest


def _names(manifest: Manifest) -> list[str]:
    return [f"{_PREFIX}{manifest.adapter_id}-{number:03d}" for number in range(min(manifest.markers, COUNT))]


def _write(path: str, content: bytes) -> None:
    """Make a file that everybody may read.

    By the system's calls and with paths as text, unlike elsewhere: `pathlib` and buffers, made for 88 names a version,
    leave 3 MB behind in 800 versions (CPython 3.11), and take a quarter more time.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.fchmod(file, 0o644)
        os.write(file, content)
    finally:
        os.close(file)


def _each(work: Callable[[str], None], over: list[str]) -> None:
    """In this order, by several threads. A future for each thread, not for each of thousands of names: megabytes."""
    left = iter(over)

    def some(_: int) -> None:
        for name in left:
            work(name)

    if over:
        with ThreadPoolExecutor(AT_ONCE) as threads:
            list(threads.map(some, range(min(len(over), AT_ONCE))))
