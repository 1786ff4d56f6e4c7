"""A decision in the making: the present table with changes, and the events and records that tell of them."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from adaptersync_core.events import AnyEvent, ReplicaState, VersionRetiring
from adaptersync_core.registry import Decision, Fleet, Need, VersionRecord
from adaptersync_core.table import LiveState, LiveVersion, Member, MemberState


class Draft:
    """Changes are made in the next generation; nothing is written until the decision is committed."""

    def __init__(self, fleet: Fleet) -> None:
        self._table = fleet.table
        self.now = fleet.now
        self.generation = fleet.table.generation + 1
        self.runs = dict(fleet.table.runs)
        self.versions = dict(fleet.table.versions)
        self.members = dict(fleet.table.members)
        self.events: list[AnyEvent] = []
        self.needs: list[Need] = []
        self.answered: list[str] = []
        self._records: dict[str, VersionRecord] = {}

    def enter(self, name: str, state: LiveState, *, record: str = "", reason: str = "", **changes: Any) -> None:
        """A live version enters a state; `record` says what its own record shall call it where that differs."""
        live = replace(self.versions[name], state=state, since=self.now, changed_in=self.generation, **changes)
        self.versions[name] = live
        self.record(name, record or state, reason)

    def retire(self, name: str, reason: str, *, voided: bool = False) -> None:
        """Nothing new goes to the version; it stays loaded until what is in flight has ended."""
        self.enter(name, "retiring", record="voided" if voided else "retiring", reason=reason, voided=voided)
        self.events.append(VersionRetiring(version=name, generation=self.generation, reason=reason))

    def leave(self, name: str, state: str, reason: str) -> None:
        """A version is gone from the fleet's table; its record keeps its fate."""
        del self.versions[name]
        self.record(name, state, reason)

    def record(self, name: str, state: str, reason: str = "") -> None:
        self._records[name] = VersionRecord(state=state, reason=reason, generation=self.generation, at=self.now)

    def take_up(self, name: str, version: LiveVersion) -> None:
        self.versions[name] = version
        self.record(name, version.state)

    def member(self, name: str, state: MemberState, reason: str, member: Member) -> None:
        """A replica enters a state, for a reason."""
        self.members[name] = replace(member, state=state, reason=reason, since=self.now)
        self._tell(name, state, reason, member.engine_epoch)

    def gone(self, name: str, reason: str) -> None:
        """A replica is no longer counted as one of the fleet."""
        member = self.members.pop(name)
        self._tell(name, "gone", reason, member.engine_epoch)

    def need_acks(self, replica: str, engine_epoch: str, versions: list[str]) -> None:
        self.needs += [Need(replica=replica, version=version, engine_epoch=engine_epoch) for version in versions]

    def decision(self, min_ready: int) -> Decision:
        table = replace(
            self._table,
            generation=self.generation,
            written_at=self.now,
            min_ready=min_ready,
            runs=self.runs,
            versions=self.versions,
            members=self.members,
        )
        return Decision(
            table=table,
            needs=tuple(self.needs),
            records=self._records,
            events=tuple(self.events),
            answered=tuple(self.answered),
        )

    def _tell(self, name: str, state: str, reason: str, engine_epoch: str) -> None:
        self.events.append(
            ReplicaState(
                replica=name, state=state, generation=self.generation, reason=reason, engine_epoch=engine_epoch
            )
        )
