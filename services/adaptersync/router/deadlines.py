"""Until when answers under way must have ended: one timer for all, since one for each costs more than it ever does."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Late(Protocol):
    def expire(self) -> None: ...


class Deadlines:
    """Whoever is not dropped by then expires, once. Times are those of the loop's clock."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due: dict[Late, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, late: Late, at: float) -> None:
        self._due[late] = at
        if self._timer is None or at < self._timer.when():
            self._arm(at)

    def drop(self, late: Late) -> None:
        """It is no longer waited for; nothing happens when it is not known."""
        self._due.pop(late, None)

    def _arm(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._look)

    def _look(self) -> None:
        """The timer was set for whoever was first then; those since are mostly later, and as a rule it is gone."""
        self._timer = None
        now = self._loop.time()
        for late in [late for late, at in self._due.items() if at <= now]:
            del self._due[late]
            late.expire()
        if self._due:
            self._arm(min(self._due.values()))
