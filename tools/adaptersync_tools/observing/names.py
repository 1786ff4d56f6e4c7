"""Every metric of every service, under the name that Prometheus knows it by."""

from __future__ import annotations

from adaptersync.agent import figures as agent
from adaptersync.coordinator import figures as coordinator
from adaptersync.jobs import figures as worker
from adaptersync.router import metrics as router
from adaptersync_core.figures import PREFIX, Figure

CONSTANT = {"agent": ("replica",), "coordinator": ("coordinator",), "worker": (), "router": ()}


def router_figures() -> tuple[Figure, ...]:
    """The router keeps its own table; here it is like the others."""
    return (
        *(Figure(name=name, kind="counter", text=text, labels=by) for name, (text, by) in router.COUNTERS.items()),
        *(
            Figure(name=name, kind="histogram", text=text, labels=by, bounds=bounds)
            for name, (text, by, bounds) in router.HISTOGRAMS.items()
        ),
        *(Figure(name=name, kind="gauge", text=text, labels=by) for name, (text, by, _) in router.GAUGES.items()),
        Figure(name="imbalance", kind="gauge", text=router.IMBALANCE),
    )


TABLES: dict[str, tuple[Figure, ...]] = {
    "router": router_figures(),
    "coordinator": coordinator.TABLE,
    "agent": agent.TABLE,
    "worker": worker.TABLE,
}


def metric(service: str, figure: Figure) -> str:
    """Without the endings that a histogram's series have."""
    return f"{PREFIX}{service}_{figure.name}{'_total' if figure.kind == 'counter' else ''}"


def labels(service: str, figure: Figure) -> tuple[str, ...]:
    return (*CONSTANT[service], *figure.labels)


def series() -> dict[str, tuple[str, ...]]:
    """Every name that a query may use, with its labels."""
    found: dict[str, tuple[str, ...]] = {}
    for service, table in TABLES.items():
        for figure in table:
            name, by = metric(service, figure), labels(service, figure)
            if figure.kind == "histogram":
                found |= {f"{name}_bucket": (*by, "le"), f"{name}_sum": by, f"{name}_count": by}
            else:
                found[name] = by
    return found
