"""What replicas said, kept between the looks of one reader, so that each look reads only those who spoke since.

Every word of a replica is dated in the index of replicas, in the same script. A word is read again unless its date is
the one it was last read under, and lay wholly in the past then: the server dates by the millisecond. Whatever changes
without a date (a key that expires, an operator's hand) is seen with the next heartbeat, which is why nothing here is
older than one. Does not talk to Redis.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from adaptersync_core.keys import REPLICA_TTL_S
from adaptersync_core.records import Ack, ReplicaReport, SeenReplica, from_hash, heartbeat_ms, read_acks

UNSETTLED = -1.0  # no date of the index: read again in any case


class Said(Struct, frozen=True, kw_only=True):
    """A replica's records as they stood under a date of the index, in milliseconds."""

    dated: float
    heartbeat_ms: int
    report: ReplicaReport | None
    acks: dict[str, Ack]


class Sightings:
    """Starts empty: the first look reads everybody."""

    def __init__(self) -> None:
        self._said: dict[str, Said] = {}

    def due(self, dates: Mapping[str, float]) -> list[str]:
        """Whose records must be read, given the index as it stands; who left it is forgotten."""
        self._said = {name: said for name, said in self._said.items() if name in dates}
        return [name for name, date in dates.items() if (said := self._said.get(name)) is None or said.dated != date]

    def note(self, name: str, date: float, now_ms: float, record: dict[str, str], acks: dict[str, str]) -> None:
        """Take in the records of one that was due; `now_ms` is the server's time when the index was read."""
        self._said[name] = Said(
            dated=date if date < now_ms else UNSETTLED,
            heartbeat_ms=heartbeat_ms(name, record),
            report=from_hash(name, record, ReplicaReport) if record else None,
            acks=read_acks(acks),
        )

    def replicas(self, now: float) -> dict[str, SeenReplica]:
        """By name, with their ages; one whose record has expired since is not seen any more."""
        return {
            name: SeenReplica(report=said.report, age_s=age_s)
            for name, said in self._said.items()
            if said.report is not None and (age_s := now - said.heartbeat_ms / 1000) <= REPLICA_TTL_S
        }

    def acks(self) -> dict[str, dict[str, Ack]]:
        return {name: said.acks for name, said in self._said.items()}
