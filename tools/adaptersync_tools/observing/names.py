"""Every metric of every service, under the name that Prometheus knows it by."""

from __future__ import annotations

from adaptersync.agent import metrics as agent
from adaptersync.coordinator import metrics as coordinator
from adaptersync.jobs import metrics as worker
from adaptersync.router import metrics as router
from adaptersync_core.metrics import PREFIX, Metric

CONSTANT = {"agent": ("replica",), "coordinator": ("coordinator",), "worker": (), "router": ()}


def router_figures() -> tuple[Metric, ...]:
    """The router keeps its own table; here it is like the others."""
    return (
        *(Metric(name=name, kind="counter", text=text, labels=by) for name, (text, by) in router.COUNTERS.items()),
        *(
            Metric(name=name, kind="histogram", text=text, labels=by, bounds=bounds)
            for name, (text, by, bounds) in router.HISTOGRAMS.items()
        ),
        *(Metric(name=name, kind="gauge", text=text, labels=by) for name, (text, by, _) in router.GAUGES.items()),
        Metric(name="imbalance", kind="gauge", text=router.IMBALANCE),
    )


TABLES: dict[str, tuple[Metric, ...]] = {
    "router": router_figures(),
    "coordinator": coordinator.TABLE,
    "agent": agent.TABLE,
    "worker": worker.TABLE,
}


def metric(service: str, figure: Metric) -> str:
    """Without the endings that a histogram's series have."""
    return f"{PREFIX}{service}_{figure.name}{'_total' if figure.kind == 'counter' else ''}"


def labels(service: str, figure: Metric) -> tuple[str, ...]:
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
