"""The coordinator's figures for Prometheus. One that does not lead says so, and no more."""

from __future__ import annotations

from adaptersync.coordinator.promotion import unconsidered
from adaptersync_core.config import Config
from adaptersync_core.events import Event, VersionPromoted
from adaptersync_core.metrics import SPENT, Metric, Metrics
from adaptersync_core.records import Fleet
from adaptersync_core.table import MemberState
from adaptersync_core.unarchived import late_s

STATES: tuple[MemberState, ...] = ("joining", "ready", "draining", "ejected")
EVENTS = (
    *(
        "version.staging",
        "version.ready",
        "version.held",
        "version.promoted",
        "version.superseded",
        "version.rolled_back",
    ),
    *("version.voided", "version.retiring", "version.retired", "replica.state", "request.refused"),
)

TABLE = (
    Metric(name="leading", kind="gauge", text="1 for the coordinator that leads"),
    Metric(name="looked_seconds", kind="age", text="Since it last did its round, leading or not"),
    Metric(name="decided", kind="counter", text="Decisions by the events they made", labels=("event",), words=EVENTS),
    Metric(
        name="promotion_seconds", kind="histogram", text="From publication to promotion, of promoted versions",
        bounds=SPENT,
    ),
    Metric(name="generation", kind="gauge", text="Generation of the table"),
    Metric(name="min_ready", kind="gauge", text="Fewest ready replicas on which anything is promoted"),
    Metric(name="members", kind="gauge", text="Replicas by their state", labels=("state",)),
    Metric(name="replica", kind="gauge", text="1 for the state each replica is in", labels=("replica", "state")),
    Metric(name="heard_seconds", kind="age", text="Since a replica's agent was last heard of", labels=("replica",)),
    Metric(name="versions", kind="gauge", text="Versions in the fleet, by their state", labels=("run", "state")),
    Metric(
        name="undecided_seconds", kind="age", labels=("run",),
        text="Since the publication of a run's oldest version that is neither promoted nor given up, nor at the gate",
    ),
    Metric(name="gated_seconds", kind="age", text="Since a version waits for an operator", labels=("run",)),
    Metric(
        name="unarchived_seconds", kind="age",
        text="Since the oldest entry of the ledger or the events that is not in the store's archive; 0: none."
        " Where the coordinator may not see that, since it found out. Not told where jobs.ledger_s is 0",
    ),
    Metric(
        name="archive_late_seconds", kind="gauge",
        text="From what age on that is a problem: jobs.ledger_s and a quarter of an hour",
    ),
)  # fmt: skip
OF_THE_FLEET = (
    *("generation", "min_ready", "members", "replica", "heard_seconds", "versions", "undecided_seconds"),
    *("gated_seconds", "unarchived_seconds", "archive_late_seconds"),
)


def tell(figures: Metrics, fleet: Fleet, config: Config, *, unarchived_s: float | None = None) -> None:
    """All that is to be seen of the fleet by who leads it; `unarchived_s` is None where nothing is to be archived."""
    figures.forget(*OF_THE_FLEET)
    table = fleet.table
    figures.set("generation", table.generation)
    figures.set("min_ready", config.coordinator.min_ready)
    if unarchived_s is not None:
        figures.since("unarchived_seconds", unarchived_s)
        figures.set("archive_late_seconds", late_s(config))
    states = [member.state for member in table.members.values()]
    for state in STATES:
        figures.set("members", states.count(state), state)
    for name, member in table.members.items():
        figures.set("replica", 1, name, member.state)
        if name in fleet.replicas:
            figures.since("heard_seconds", fleet.replicas[name].age_s, name)
    live = [(entry.run, entry.state) for entry in table.versions.values()]
    for run, version_state in set(live):
        figures.set("versions", live.count((run, version_state)), run, version_state)
    for run in table.runs:
        began = [manifest.created_at for manifest in unconsidered(fleet, run)]
        candidate = table.candidate(run)
        if candidate is not None:
            entry = table.versions[candidate]
            if config.coordinator.gate and entry.waits_at_gate:
                if entry.held or not config.coordinator.gate_function:
                    figures.since("gated_seconds", fleet.now - entry.since, run)
                began = []  # what comes behind it waits for the same, too
            else:
                began.append(entry.published_at)
        if began:
            figures.since("undecided_seconds", fleet.now - min(began), run)


def decided(figures: Metrics, events: tuple[Event, ...]) -> None:
    for event in events:
        figures.count("decided", str(type(event).__struct_config__.tag))
        if isinstance(event, VersionPromoted):
            figures.observe("promotion_seconds", event.waited_s)
