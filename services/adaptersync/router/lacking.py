"""Versions that replicas did not know when they were asked for them, until their agents have confirmed them. Pure.

A replica that lost a version is not asked for it until its agent has said, after the control server was told here, that
the engine lists it and that it was accepted in this life of the engine. An agent that finds a version gone takes its
word back before it brings it in again, so that word is one of after. Another life begins with a clean slate, since it
is ready only with everything.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from adaptersync_core.records import Holding
from adaptersync_core.table import Table

TOLD = 64  # pairs that a report names; that there are more is a fleet that holds nothing


class _Lack(Struct):
    """`told_ms`: when the control server was told, by its clock; 0 before."""

    engine_epoch: str
    told_ms: int = 0


class Lacking:
    """Bounded by replicas times live versions."""

    def __init__(self) -> None:
        self.pairs: dict[tuple[str, str], _Lack] = {}  # by replica and version

    def found(self, replica: str, version: str, engine_epoch: str) -> None:
        """It did not know it."""
        self.pairs[replica, version] = _Lack(engine_epoch)

    def lacks(self, replica: str, version: str) -> bool:
        return (replica, version) in self.pairs

    def any(self, replicas: Iterable[str], version: str) -> bool:
        return any((replica, version) in self.pairs for replica in replicas)

    def report(self) -> dict[str, list[str]]:
        """Versions by replica."""
        said: dict[str, list[str]] = {}
        for replica, version in self._named():
            said.setdefault(replica, []).append(version)
        return said

    def untold(self) -> list[_Lack]:
        """Those that the next report is the first to name; one that is found again meanwhile is another."""
        return [lack for pair in self._named() if not (lack := self.pairs[pair]).told_ms]

    def told(self, lacks: Iterable[_Lack], at_ms: int) -> None:
        for lack in lacks:
            lack.told_ms = at_ms

    def confirm(self, replica: str, holding: Holding) -> bool:
        """What its agent says; whether that brings anything back."""
        back = [
            (name, version)
            for (name, version), lack in self.pairs.items()
            if name == replica and 0 < lack.told_ms < holding.heard_ms and version in holding.versions
        ]
        for pair in back:
            del self.pairs[pair]
        return bool(back)

    def _named(self) -> list[tuple[str, str]]:
        """Those in a report; when some are back, others follow."""
        return sorted(self.pairs)[:TOLD]

    def renew(self, table: Table) -> bool:
        """Whether a new table brings something back."""
        before = len(self.pairs)
        for (replica, version), lack in [*self.pairs.items()]:
            member = table.members.get(replica)
            if member is None or member.engine_epoch != lack.engine_epoch or version not in table.versions:
                del self.pairs[replica, version]
        return len(self.pairs) < before
