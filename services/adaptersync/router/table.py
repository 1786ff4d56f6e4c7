"""The last table this router could read, how old it is, and waiting for the next one.

Woken by events, it reads again on a timer as well. While Redis is away the last table goes on being served, up to the
age at which the coordinator no longer waits for this router; past it nothing can be vouched for. That age counts from
the last report as well as from the last read: whom the coordinator does not hear of, it does not wait for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from adaptersync_core.bus import Bell
from adaptersync_core.errors import ControlError, Unroutable
from adaptersync_core.ranks import rank_names
from adaptersync_core.registry import Registry
from adaptersync_core.table import Table

REREAD_S = 1.0  # how often to look when no event wakes it
BLOCK_SIZE = 16  # for members that do not say theirs

log = logging.getLogger(__name__)


class TableView:
    """The router's view of the fleet. `reachable` says whether the last read succeeded; None before it.

    `ready` are replicas; `ranked` has the names of the ranks of those, of all in the table, that have several.
    """

    def __init__(self, registry: Registry, *, max_age_s: float) -> None:
        self._registry = registry
        self._max_age_s = max_age_s
        self._read_at: float | None = None
        self._reported_at: float | None = None
        self._changed = asyncio.Event()
        self.table = Table()
        self.ready: list[str] = []
        self.ranked: dict[str, tuple[str, ...]] = {}
        self._ready_ranks: list[str] = []
        self.block_size = BLOCK_SIZE
        self.reachable: bool | None = None

    def age_s(self) -> float:
        """Seconds since the table was last read, or last reported to be served; infinite before the first time."""
        if self._read_at is None or self._reported_at is None:
            return float("inf")
        return time.monotonic() - min(self._read_at, self._reported_at)

    def reported(self, at: float) -> None:
        """The coordinator has been told, at `at` or later, what is served here."""
        self._reported_at = at

    def serving(self) -> Table:
        """The table to serve from; Unroutable 503 when there is none, or none young enough."""
        if self._read_at is None:
            raise Unroutable("router has no table yet", status=503, retry_after_s=1.0, next_step="is a coordinator up?")
        if self._reported_at is None:
            raise Unroutable("router has not reported yet", status=503, retry_after_s=1.0)
        age_s = self.age_s()
        if age_s > self._max_age_s:
            raise Unroutable(
                "router's table is too old to vouch for any version",
                status=503,
                retry_after_s=1.0,
                next_step="check the control server",
                age_s=round(age_s, 1),
            )
        return self.table

    def ranks(self, replicas: Sequence[str]) -> Sequence[str]:
        """Among whom is chosen where these may be asked: each rank stands for itself."""
        if not self.ranked:
            return replicas
        return self._ready_ranks if replicas is self.ready else self._ranks(replicas)

    def _ranks(self, replicas: Sequence[str]) -> list[str]:
        return [rank for name in replicas for rank in self.ranked.get(name, (name,))]

    async def change(self, timeout_s: float) -> bool:
        """Wait for another table, or news of this one; False when `timeout_s` passed."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def follow(self, bell: Bell) -> None:
        """Read whenever the bell rings and on a timer; runs until cancelled."""
        while True:
            await self.read()
            await bell.wait(REREAD_S)

    async def read(self) -> None:
        """One read. A table that is absent or older is a control server that lost it: the last one known stays."""
        try:
            table = await self._registry.table()
        except ControlError as error:
            if self.reachable is not False:
                serving = "no request is served yet" if self._read_at is None else "serving the last one"
                log.warning("table cannot be read, %s: %s", serving, error)
            self.reachable = False
            return
        self.reachable = True
        if table.generation < max(self.table.generation, 1):  # what was decided since holds; it will be restored
            return
        self._read_at = time.monotonic()
        if (table.incarnation, table.generation) == (self.table.incarnation, self.table.generation):
            return
        self._adopt(table)

    def _adopt(self, table: Table) -> None:
        self.table = table
        self.ready = table.ready()
        self.ranked = {name: rank_names(name, each.ranks) for name, each in table.members.items() if each.ranks > 1}
        self._ready_ranks = self._ranks(self.ready)
        sizes = [table.members[name].block_size for name in self.ready if table.members[name].block_size > 0]
        self.block_size = min(sizes, default=BLOCK_SIZE)
        self.nudge()

    def nudge(self) -> None:
        """Wake whoever waits for a change: there is a new table, or news of what it says."""
        self._changed.set()
        self._changed = asyncio.Event()
