"""What a session has: the version it is served by and the replica it is cached at, shared by all routers of a group.

A session is what a client names so, of one run: it can carry no version from one run to another. A turn reads once and
writes, without waiting, only what the cache server does not have. Where that is away, or has forgotten, goes what this
router itself knows of its latest sessions; what the cache server says counts more. Nothing here keeps a version alive:
it leaves with the window, and the session goes on with the current one.
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


class _Own(Struct, gc=False):
    """What this router knows by itself, until when, and what the cache server was last seen to hold (None: nothing)."""

    kept: Kept = NONE
    until: float = 0.0
    held: Kept | None = None


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
        self._own: OrderedDict[str, _Own] = OrderedDict()  # those used last at the end

    async def read(self, session: str) -> Kept:
        """What it has; its time begins anew."""
        try:
            told = await self._pipe.call("GETEX", self._keys.session(session), "PX", self._keep_ms)
        except ControlError:
            told = None
        own = self._of(session)
        own.held = None
        if told is not None:
            version, _, replica = told.partition(" ")
            own.held = Kept(version, replica)
            return own.held
        return own.kept if time.monotonic() < own.until else NONE

    def keep(self, session: str, now: Kept) -> None:
        """From this turn on it has `now`; a turn that is sent to several replicas says so for each."""
        own = self._of(session)
        own.kept, own.until = now, time.monotonic() + self._keep_s
        if now != own.held:
            self._pipe.tell("SET", self._keys.session(session), f"{now.version} {now.replica}", "PX", self._keep_ms)
            own.held = now  # where that is refused, the next turn will see

    def _of(self, session: str) -> _Own:
        own = self._own.setdefault(session, _Own())
        self._own.move_to_end(session)
        if len(self._own) > OWN:
            self._own.popitem(last=False)
        return own

    @property
    def _keep_ms(self) -> int:
        return max(int(self._keep_s * 1000), 1)
