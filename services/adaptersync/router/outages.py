"""Replicas this router leaves out for a moment, from its own experience. Knows no network; the caller gives the time.

The table says who should serve, and who of them is silent; this says who just did not. It is a guess with a short life:
the coordinator's word replaces it at the next table.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

UNREACHABLE_S = 1.0  # a replica that could not be reached is tried again after this
MISSING_S = 5.0  # a replica without a version it should hold is asked for it again after this


class Outages:
    """Bounded by replicas times live versions: `renew` forgets what a new table makes pointless."""

    def __init__(self) -> None:
        self._unreachable: dict[str, float] = {}
        self._missing: dict[tuple[str, str], float] = {}
        self._silent: frozenset[str] = frozenset()

    def unreachable(self, replica: str, now: float) -> None:
        self._unreachable[replica] = now + UNREACHABLE_S

    def missing(self, replica: str, version: str, now: float) -> None:
        self._missing[replica, version] = now + MISSING_S

    def reached(self, replica: str) -> None:
        if self._unreachable:
            self._unreachable.pop(replica, None)

    def renew(self, silent: frozenset[str]) -> None:
        """A new table has come; it calls these replicas silent."""
        self._silent = silent
        self._unreachable.clear()
        self._missing.clear()

    def candidates(self, ready: Sequence[str], version: str, tried: Collection[str], now: float) -> Sequence[str]:
        """Who may be asked for `version`: the unreachable, and then the silent, only when nobody else is left.

        Those without the version never.
        """
        if not (self._missing or self._unreachable or self._silent or tried):
            return ready
        holders = [
            name for name in ready if name not in tried and not now < self._missing.get((name, version), float("-inf"))
        ]
        heard = [name for name in holders if name not in self._silent] or holders
        return [name for name in heard if not self.out(name, now)] or heard

    def left_out(self, replica: str, version: str, now: float) -> str:
        """Why one that is ready was not asked."""
        if now < self._missing.get((replica, version), float("-inf")):
            return "missing version"
        return "silent" if replica in self._silent else "unreachable" if self.out(replica, now) else ""

    def out(self, replica: str, now: float) -> bool:
        return now < self._unreachable.get(replica, float("-inf"))
