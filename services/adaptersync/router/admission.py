"""From an asked name to a target: asks the records when the table does not know, and holds what is on its way.

A held request waits for the table to change, never by polling, in bounded number and for a bounded time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from adaptersync.router.fates import FateCache
from adaptersync.router.resolve import RETRY_S, Ask, Fate, Hold, Target, resolve
from adaptersync.router.table import TableView
from adaptersync_core.errors import ControlError, Unroutable
from adaptersync_core.table import Table

# in which what Redis lost is put back, also where nobody leads at first: twice `coordinator.lease_s` as it comes
DOUBT_S = 10.0


class Admission:
    """`held` is how many requests wait at this moment, for a table or for a record.

    What may never be served takes half of their room at most, and is waited for no longer than `DOUBT_S`.
    """

    def __init__(
        self, view: TableView, fates: FateCache, *, base_model: str, hold_s: float, held_requests: int
    ) -> None:
        self._view = view
        self._fates = fates
        self.base_model = base_model
        self._hold_s = hold_s
        self._held_requests = held_requests
        self._table = Table()
        self._known: dict[str, Target] = {}  # by name, under that table: a few names for each of its versions
        self._doubted = 0
        self.held = 0

    async def admit(self, name: str, *, since: float, gate: bool = False) -> Target:
        """The target for `name`, which may be sent at once: nothing happens between the decision and the return.

        `since`: when it was asked for. `gate`: the caller may have a version that waits at the gate, by its own name.
        """
        table = self._view.serving()
        if table is not self._table:
            self._table = table
            self._known.clear()
        target = self._known.get(name)
        if target is None:
            target = await self._resolve(name, since, gate=gate)
            if not gate and self._view.table is self._table:
                self._known[name] = target
        return target

    async def _resolve(self, name: str, since: float, *, gate: bool) -> Target:
        while True:
            table = self._view.serving()
            known = self._fates.get(name, table.generation)
            answer = resolve(table, name, base_model=self.base_model, fate=known, gate=gate)
            if isinstance(answer, Ask):
                fate = await self._ask(name, answer, table.generation)
                answer = resolve(self._view.serving(), name, base_model=self.base_model, fate=fate, gate=gate)
            if isinstance(answer, Target):
                return answer
            if isinstance(answer, Hold):
                if answer.otherwise is None:
                    await self.wait(name, answer.reason, since)
                else:
                    await self._doubt(name, answer.reason, since, answer.otherwise)

    async def _ask(self, name: str, ask: Ask, generation: int) -> Fate:
        try:
            with self._holding(name, "model is not in the table"):
                return await self._fates.read(name, ask.wanted, generation)
        except ControlError as error:
            if ask.otherwise is not None:
                return ask.otherwise
            raise Unroutable(
                f"model is not in the table, and its record cannot be read: {error.reason}",
                status=503,
                retry_after_s=RETRY_S,
                model=name,
            ) from error

    async def wait(self, name: str, reason: str, since: float) -> None:
        """Until another table has come, or a replica has a version again; Unroutable `hold_s` after `since`."""
        late = Unroutable(
            f"{reason}, and did not become so in time",
            status=503,
            retry_after_s=RETRY_S,
            model=name,
            held_s=self._hold_s,
        )
        await self._wait(name, reason, self._hold_s - (time.monotonic() - since), late)

    async def _doubt(self, name: str, reason: str, since: float, otherwise: Unroutable) -> None:
        """Wait for another table as long as it may be served; then `otherwise`."""
        if 2 * self._doubted >= self._held_requests:
            raise otherwise
        self._doubted += 1
        try:
            await self._wait(name, reason, min(DOUBT_S, self._hold_s) - (time.monotonic() - since), otherwise)
        finally:
            self._doubted -= 1

    async def _wait(self, name: str, reason: str, left_s: float, late: Unroutable) -> None:
        if left_s <= 0:
            raise late
        with self._holding(name, reason):
            await self._view.change(left_s)

    @contextlib.contextmanager
    def _holding(self, name: str, reason: str) -> Iterator[None]:
        if self.held >= self._held_requests:
            raise Unroutable(
                f"{reason}, and no more requests can be held", status=503, retry_after_s=RETRY_S, model=name
            )
        self.held += 1
        try:
            yield
        finally:
            self.held -= 1
