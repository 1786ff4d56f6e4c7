"""What the control records say of names that the table does not know, remembered so that a retry storm asks once.

A final fate is kept for good, within a bounded number; "unknown" and "on its way" only for a moment and only under the
table they were read beside.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict

from adaptersync.router.resolve import FINAL, Fate, Wanted
from adaptersync_core.registry import Registry

KEPT = 4096  # names
PENDING_S = 1.0  # how long an answer that may still change is believed


class FateCache:
    """A bounded cache in front of the registry; equal questions asked at once are one read."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._known: OrderedDict[str, tuple[Fate, int, float]] = OrderedDict()
        self._asking: dict[str, asyncio.Task[Fate]] = {}

    def get(self, name: str, generation: int) -> Fate | None:
        found = self._known.get(name)
        if found is None:
            return None
        fate, beside, until = found
        if fate.state not in FINAL and (beside != generation or time.monotonic() > until):
            return None
        self._known.move_to_end(name)
        return fate

    async def read(self, name: str, wanted: Wanted, generation: int) -> Fate:
        """Ask the records; ControlError when they cannot be read."""
        task = self._asking.get(name)
        if task is None:
            task = self._asking[name] = asyncio.create_task(self._read(wanted), name=f"fate of {name}")
            task.add_done_callback(lambda done: self._asked(name, generation, done))
        # one caller that goes away must not take the answer from the others
        return await asyncio.shield(task)

    def _asked(self, name: str, generation: int, task: asyncio.Task[Fate]) -> None:
        self._asking.pop(name, None)
        if task.cancelled() or task.exception() is not None:
            return
        self._known[name] = (task.result(), generation, time.monotonic() + PENDING_S)
        self._known.move_to_end(name)
        if len(self._known) > KEPT:
            self._known.popitem(last=False)

    async def _read(self, wanted: Wanted) -> Fate:
        adapter_id = wanted.adapter_id
        if wanted.seq:
            adapter_id = await self._registry.find_seq(wanted.run, wanted.seq) or ""
        if adapter_id:
            record = await self._registry.version(adapter_id)
            if record is None:
                return Fate()
            return Fate(state=record.state, adapter_id=adapter_id, reason=record.reason)
        known = not wanted.seq and wanted.run in await self._registry.runs()
        return Fate(state="expected") if known else Fate()
