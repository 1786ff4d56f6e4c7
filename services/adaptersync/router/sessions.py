"""What a session has: the version it is served by and the replica it is cached at, shared by all routers of a group.

A session is what a client names so, of one run: it can carry no version from one run to another. A turn reads once and
writes, without waiting, only what has changed. Where the cache server is away, or has forgotten, goes what this router
itself knows of its latest sessions; what the cache server says counts more. Nothing here keeps a version alive: it
leaves with the window, and the session goes on with the current one.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from hashlib import blake2b

from msgspec import Struct

from adaptersync.router.resolve import Wanted
from adaptersync_core.errors import ControlError
from adaptersync_core.keys import Keys
from adaptersync_core.pipe import Pipe
from adaptersync_core.table import Table

OWN = 4096  # sessions that a router remembers by itself
NAME_BYTES = 8  # of a session's name, whatever a client calls it: two of a run meet once in four billion


class Kept(Struct, frozen=True, gc=False):
    """Empty where nothing is kept."""

    version: str = ""
    replica: str = ""


NONE = Kept()


def session_name(said: bytes, run: str) -> str:
    """What stands for a client's session in `run`, in keys and in ledger rows."""
    return blake2b(b"%b\0%b" % (run.encode(), said), digest_size=NAME_BYTES).hexdigest()


def still(kept: Kept, wanted: Wanted, table: Table) -> str:
    """The version that the session goes on with, when its run is asked for; nothing when that has been left behind.

    Whoever asks for a version by name or number gets that one.
    """
    version = table.versions.get(kept.version)
    if wanted.adapter_id or wanted.seq or version is None or version.run != wanted.run:
        return ""
    return kept.version if table.routable(kept.version) else ""


class Sessions:
    """Each is kept for `keep_s` after its last turn."""

    def __init__(self, pipe: Pipe, keys: Keys, *, keep_s: float) -> None:
        self._pipe = pipe
        self._keys = keys
        self._keep_s = keep_s
        self._own: OrderedDict[str, tuple[Kept, float]] = OrderedDict()  # those used last at the end; until when

    async def read(self, session: str) -> Kept:
        """What it has; its time begins anew."""
        try:
            told = await self._pipe.call("GETEX", self._keys.session(session), "PX", self._keep_ms)
        except ControlError:
            told = None
        if told is not None:
            version, _, replica = told.partition(" ")
            return Kept(version, replica)
        kept, until = self._own.get(session, (NONE, 0.0))
        return kept if time.monotonic() < until else NONE

    def keep(self, session: str, before: Kept, now: Kept) -> None:
        """It had `before`, as it was read, and from this turn on it has `now`."""
        self._own[session] = now, time.monotonic() + self._keep_s
        self._own.move_to_end(session)
        if len(self._own) > OWN:
            self._own.popitem(last=False)
        if now != before:
            self._pipe.tell("SET", self._keys.session(session), f"{now.version} {now.replica}", "PX", self._keep_ms)

    @property
    def _keep_ms(self) -> int:
        return max(int(self._keep_s * 1000), 1)
