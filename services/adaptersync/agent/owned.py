"""One replica's share of the ownership tables in the cache server, kept equal to what its engine has cached.

Of a replica with several ranks each has a share of its own. Changes are written in batches soon after the engine told
of them. Beside that, now and then, the whole share is compared with the truth, in small parts: this mends whatever was
lost with a server or a call, takes back what an older life of the engine or of the agent left, and what was believed
too early. For a router that sends a prompt notes at once that it will be cached there, so that the rest of its group
follows; where it never comes to that (the request failed, or its blocks were evicted before anybody looked), nothing
would ever take that note back. Such a note is given the time from one comparison to the next to come true. While an
engine starts nothing is sent to it, so in the first comparison of its life there is no such note, and whatever is not
true goes at once.

Routers never offer a replica that left, so it does no harm that nobody takes away what is left of one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterable

from adaptersync.agent.cached import Cache
from adaptersync_core.bus import Bell
from adaptersync_core.errors import ControlError
from adaptersync_core.keys import OWNERSHIP_TTL_S, Keys
from adaptersync_core.redis import RedisClient
from adaptersync_core.scripts import Script

GATHER_S = 0.05  # changes that are written together
CHUNK = 128  # blocks in one call: a third of a millisecond, for which the choices of routers wait
COMPARE_S = 60.0  # between two comparisons: longer than a request waits for its turn in an engine, as a rule
PART_S = 0.02  # between two parts of one: the cache server has other things to do
RETRY_S = 1.0  # after the cache server failed
WAITING = 200_000  # changes kept for a server that is away; beyond that the next comparison finds them
SUSPECTS = 200_000  # blocks that are remembered from one comparison to the next

log = logging.getLogger(__name__)


class Owned:
    """`lag_s` is the time from the engine's step to the table, at the last write."""

    def __init__(self, client: RedisClient, keys: Keys, cache: Cache, *, replica: str, limit: int) -> None:
        self._client = client
        self._keys = keys
        self._cache = cache
        self._replica = replica
        self._limit = limit
        self._cached, self._owned = Script("cached"), Script("owned")
        self._versions: frozenset[str] = frozenset()
        self._gone: set[str] = set()
        self._suspects: set[tuple[str, bytes]] = set()
        self._bell, self._compare_bell = Bell(), Bell()
        self._true = False
        self._began = False
        self.lag_s = 0.0

    def serve(self, versions: Iterable[str]) -> None:
        """The versions that may be asked for now, the base model aside. What is known of others goes with them."""
        now = frozenset(versions)
        # the routers free the key, too; but whoever wrote to it last has to, and that may be us
        self._gone = (self._gone | (self._versions - now)) - now
        for version in now - self._versions:
            self._changed(version, self._cache.held.get(version, ()))
        self._versions = now
        if self._gone or self._cache.changed:
            self._bell.ring()

    def changed(self) -> None:
        """The cache has changed."""
        self._bell.ring()

    def begin(self) -> None:
        """The cache is now what the engine has, in a life of which nothing was compared yet."""
        self._true, self._began = True, True
        self._suspects.clear()
        self._compare_bell.ring()

    def end(self) -> None:
        """The cache is not known any more; what it says is not to be believed until `begin`."""
        self._true = False

    async def write(self) -> None:
        """Write changes soon after they come; runs until cancelled."""
        away = False
        while True:
            await self._bell.wait(COMPARE_S)
            await asyncio.sleep(GATHER_S)
            try:
                await self.flush()
                away = False
            except ControlError as error:
                if not away:
                    log.warning("ownership is not written: %s", error)
                away = True
                await asyncio.sleep(RETRY_S)
                self._bell.ring()

    async def compare(self) -> None:
        """Compare the table with the cache, now and then; runs until cancelled."""
        while True:
            await self._compare_bell.wait(COMPARE_S)
            if not self._true:
                continue
            at_once, self._began = self._began, False
            try:
                for version in (self._cache.base_model, *self._versions):
                    await self._compare(version, at_once=at_once)
                self.changed()
            except ControlError as error:
                log.debug("ownership is not compared, the next time may do: %s", error)
                self._began = at_once or self._began

    async def flush(self) -> None:
        for version in list(self._gone):
            await self._client.command("UNLINK", self._keys.owned(version))
            self._gone.discard(version)
        changed, self._cache.changed = self._cache.changed, {}
        since, self._cache.changed_at = self._cache.changed_at, math.inf
        try:
            while changed:
                version, digests = next(iter(changed.items()))
                if not self._serves(version):
                    del changed[version]
                    continue
                part = [digest for _, digest in zip(range(CHUNK), digests, strict=False)]
                await self._tell(version, part)
                digests.difference_update(part)
                if not digests:
                    del changed[version]
        except BaseException:
            self._keep(changed, since)
            raise
        if since < math.inf:
            self.lag_s = max(0.0, time.time() - since)

    async def _tell(self, version: str, digests: list[bytes]) -> int:
        stored = [digest.hex() for digest in digests if self._cache.holds(version, digest)]
        gone = [digest.hex() for digest in digests if not self._cache.holds(version, digest)]
        counts = (self._limit, OWNERSHIP_TTL_S, len(stored))
        arguments: tuple[str | int, ...] = (self._replica, *counts, *stored, *gone)
        return int(await self._client.script(self._cached, (self._keys.owned(version),), arguments))

    def _keep(self, changed: dict[str, set[bytes]], since: float) -> None:
        """For the next time, as far as there is room."""
        for version, digests in changed.items():
            self._changed(version, digests)
        if sum(len(digests) for digests in self._cache.changed.values()) > WAITING:
            self._cache.changed = {}
        self._cache.changed_at = min(since, self._cache.changed_at)

    async def _compare(self, version: str, *, at_once: bool) -> None:
        key, cursor, kept = self._keys.owned(version), "0", 0
        held = set(self._cache.held.get(version, ()))
        before = {digest for name, digest in self._suspects if name == version}
        found: set[bytes] = set()
        while True:
            cursor, kept, *hashes = await self._client.script(self._owned, (key,), (self._replica, cursor, CHUNK))
            found.update(map(bytes.fromhex, hashes))
            if cursor == "0":
                break
            await asyncio.sleep(PART_S)
        if not self._true:
            return  # meanwhile nobody knows
        untrue = {digest for digest in found if not self._cache.holds(version, digest)}
        self._changed(version, untrue if at_once else untrue & before)
        if kept < self._limit:  # else there is no room, and for one that comes another goes
            self._changed(version, {digest for digest in held - found if self._cache.holds(version, digest)})
        self._suspects = {(name, digest) for name, digest in self._suspects if name != version and self._serves(name)}
        if not at_once and len(self._suspects) + len(untrue) <= SUSPECTS:
            self._suspects.update((version, digest) for digest in untrue)

    def _changed(self, version: str, digests: Iterable[bytes]) -> None:
        if digests := set(digests):
            self._cache.changed.setdefault(version, set()).update(digests)

    def _serves(self, version: str) -> bool:
        return version == self._cache.base_model or version in self._versions
