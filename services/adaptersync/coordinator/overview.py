"""All that is shown of a fleet at one moment, as one document: status, who holds what, what happened lately. Pure.

What `status` says has the same names and values here; the rest is beside it.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import Struct

from adaptersync.coordinator import views
from adaptersync.coordinator.recent import Happened, Promotion, Recent, added_up, imbalance
from adaptersync_core.entries import moment
from adaptersync_core.records import Ack, Fleet, Traffic

TOLD = 100  # events in the document; a stream of them goes on from there
WAYS = 12  # promotions


class Column(Struct, frozen=True, kw_only=True):
    """A live version; `since_s` how long it is in that state."""

    version: str
    run: str
    seq: int
    state: str
    since_s: float


class Cell(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a replica has of a version: `held` (accepted in this life of its engine), `refused`, `awaited`, `loaded`
    (listed, and not to be), or nothing. `verdict` is its proof's."""

    state: str = ""
    verdict: str = ""
    reason: str = ""


class Line(Struct, frozen=True, kw_only=True):
    """One event for a person."""

    id: str
    at: float
    type: str
    subject: str
    text: str
    bad: bool

    def clock(self) -> str:
        """The time of day here."""
        return moment(self.at).astimezone().strftime("%H:%M:%S")


class Overview(views.StatusView, frozen=True, kw_only=True):
    """`at` is the control server's clock, `told_by` the coordinator that says this, empty when none does.

    `matrix` has a list of cells for each replica, in the order of `versions`. `traffic` is of all routers since each
    began, `series` of the time since somebody watches: one list a figure.
    """

    at: float
    told_by: str
    versions: list[Column]
    matrix: dict[str, list[Cell]]
    traffic: Traffic
    imbalance: float | None
    promotions: list[Promotion]
    events: list[Line]
    series: dict[str, list[float | None]]


def overview(status: views.StatusView, fleet: Fleet, recent: Recent, *, told_by: str = "") -> Overview:
    """All of it, with the whole series."""
    table = fleet.table
    order = sorted(table.versions, key=lambda name: (table.versions[name].run, -table.versions[name].seq))
    traffic = added_up(router.report.traffic for router in fleet.routers.values())
    return Overview(
        **{name: getattr(status, name) for name in views.StatusView.__struct_fields__},
        at=fleet.now,
        told_by=told_by,
        versions=[
            Column(
                version=name,
                run=(entry := table.versions[name]).run,
                seq=entry.seq,
                state=entry.state,
                since_s=max(0.0, fleet.now - entry.since),
            )
            for name in order
        ],
        matrix={each.replica: list(_cells(fleet, each.replica, order)) for each in status.replicas},
        traffic=traffic,
        imbalance=imbalance(traffic.at, table.ready()),
        promotions=recent.promotions()[:WAYS],
        events=[line(each) for each in list(recent.events)[-TOLD:]],
        series=recent.series(),
    )


def line(event: Happened) -> Line:
    subject, text = views.tell(event.fields)
    return Line(id=event.id, at=event.at, type=event.type, subject=subject, text=text, bad=event.bad)


def encode(document: Struct) -> bytes:
    return msgspec.json.encode(document)


def _cells(fleet: Fleet, replica: str, order: list[str]) -> Iterator[Cell]:
    seen = fleet.replicas.get(replica)
    life = seen.report.engine_epoch if seen else ""
    loaded = seen.report.loaded if seen else ()
    wanted = set(fleet.table.wanted()) if replica in fleet.table.members else set()
    acks = fleet.acks.get(replica, {})
    for name in order:
        ack: Ack | None = acks.get(name)
        if ack is None or not life or ack.engine_epoch != life:
            yield Cell(state="awaited" if name in wanted else "loaded" if name in loaded else "")
        elif not ack.accepted:
            yield Cell(state="refused", verdict=ack.proof.verdict, reason=ack.reason)
        elif name in wanted:
            yield Cell(state="held", verdict=ack.proof.verdict)
        else:
            yield Cell(state="loaded" if name in loaded else "")
