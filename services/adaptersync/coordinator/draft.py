"""A decision in the making: the present table with changes, and the events and records that tell of them."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from adaptersync_core.events import AnyEvent, ReplicaState, VersionRetiring
from adaptersync_core.records import Decision, Fleet, Need, VersionRecord, Want
from adaptersync_core.table import Fate, LiveState, LiveVersion, Member, MemberState


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

    def enter(self, name: str, state: LiveState) -> None:
        """A live version enters a state in which it is, or may be, served."""
        self._change(name, state)
        self.record(name, state)

    def retire(self, name: str, reason: str, *, fate: Fate = "retired") -> None:
        """Nothing new goes to the version; it stays loaded until what is in flight has ended."""
        self._change(name, "retiring", fate=fate)
        self.record(name, "retiring" if fate == "retired" else fate, reason)
        entry = self.runs[self.versions[name].run]
        if entry.current == name:
            self.runs[self.versions[name].run] = replace(entry, current=None)
        self.events.append(VersionRetiring(version=name, generation=self.generation, reason=reason))

    def give_up(self, name: str, reason: str, *, fate: Fate, want: Want = "") -> None:
        """A version that was never served: whoever loaded it unloads it, and then it is gone.

        One that some router may serve all the same is left loaded until none does.
        """
        self._change(name, "retiring", fate=fate, drained=not self.versions[name].exposed)
        self.record(name, fate, reason, want)

    def forget(self, name: str) -> None:
        """Nobody holds the version any more; its record keeps its fate."""
        if self.versions.pop(name).fate == "retired":
            self.record(name, "retired", "unloaded everywhere")

    def record(self, name: str, state: str, reason: str = "", want: Want = "") -> None:
        self._records[name] = VersionRecord(
            state=state, reason=reason, want=want, generation=self.generation, at=self.now
        )

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
        """The replica must be alive in that life of its engine when this is committed, and hold the versions."""
        self.needs += [Need(replica=replica, version=one, engine_epoch=engine_epoch) for one in versions or [""]]

    def _change(self, name: str, state: LiveState, **changes: Any) -> None:
        self.versions[name] = replace(
            self.versions[name], state=state, since=self.now, changed_in=self.generation, **changes
        )

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
