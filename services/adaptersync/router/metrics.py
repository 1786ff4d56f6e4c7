"""The router's figures for Prometheus. Labels are bounded: replicas of the table, and words of our own.

The hot path adds to plain numbers. Whoever is asked for them adds up what all workers of this router have counted, who
leave their numbers in memory that they share (`workers`): a client library that locks, and files, would cost each
request more than its choice of a replica does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Struct
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "adaptersync_router_"
_FINE = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25, 1.0)
_COARSE = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

# name: what it says, labels; for gauges also how those of several workers become one
COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "requests": ("Requests by how they ended", ("outcome", "status")),
    "routed": ("Choices of a replica", ("routing", "replica")),
    "prompts": ("Prompts by how they were read, and why not by tokens", ("read", "reason")),
    "retries": ("Requests sent to another replica", ("reason",)),
    "missing_version": ("Replicas that lacked a version they should hold", ("replica",)),
    "cached_tokens": ("Prompt tokens that replicas report as cached", ()),
    "prompt_tokens": ("Prompt tokens that replicas report", ()),
}
HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "hold_seconds": ("Wait for a version to become current", _COARSE),
    "route_seconds": ("Choice of a replica", _FINE),
    "first_byte_seconds": ("From sending to a replica to its first byte", _COARSE),
    "total_seconds": ("From request to last byte", _COARSE),
}
GAUGES: Mapping[str, tuple[str, tuple[str, ...], Callable[[Iterable[float]], float]]] = {
    "inflight": ("Sequences of this router at a replica", ("replica",), sum),
    "held": ("Requests held for a version", (), sum),
    "connections": ("Connections of clients", (), sum),
    "table_generation": ("Generation of the table served", (), min),
    "table_age_seconds": ("Time since the table was last read", (), max),
    "ledger_waiting": ("Ledger rows not yet written", (), sum),
    "ledger_written": ("Ledger rows written since the start", (), sum),
    "ledger_lost": ("Requests served without a ledger row since the start", (), sum),
    "ledger_untold": ("Refusals without a ledger row since the start", (), sum),
    "ledger_spool_bytes": ("Bytes of the spool that rows take", (), sum),
    "cache_reachable": ("1 when prefix ownership can be asked for", (), min),
}


class Histogram(Struct):
    """`counts` by bucket, the last for what is above all bounds."""

    counts: list[int]
    sum: float = 0.0


class Figures(Struct):
    """All that one worker has counted, by name and then by labels."""

    counters: dict[str, dict[tuple[str, ...], float]]
    histograms: dict[str, Histogram]
    gauges: dict[str, dict[tuple[str, ...], float]]

    @classmethod
    def none(cls) -> Figures:
        return cls(
            counters={name: {} if labels else {(): 0.0} for name, (_, labels) in COUNTERS.items()},
            histograms={name: Histogram([0] * (len(bounds) + 1)) for name, (_, bounds) in HISTOGRAMS.items()},
            gauges={name: {} for name in GAUGES},
        )


class Metrics:
    """Counts of this worker. One that follows another in its place goes on from `before`, so that no sum goes down."""

    def __init__(self, before: bytes = b"") -> None:
        self.figures = _decode(before) if before else Figures.none()
        self.figures.gauges = {name: {} for name in GAUGES}

    def count(self, name: str, *labels: str, by: float = 1.0) -> None:
        counts = self.figures.counters[name]
        counts[labels] = counts.get(labels, 0.0) + by

    def observe(self, name: str, value: float) -> None:
        histogram = self.figures.histograms[name]
        histogram.counts[bisect_left(HISTOGRAMS[name][1], value)] += 1
        histogram.sum += value

    def gauge(self, name: str, value: float, *labels: str) -> None:
        self.figures.gauges[name][labels] = float(value)  # what others read is strict

    def keep_replicas(self, replicas: Collection[str]) -> None:
        """Drop the series of replicas that are gone."""
        places = {name: labels.index("replica") for name, (_, labels) in COUNTERS.items() if "replica" in labels}
        for name, place in places.items():
            counts = self.figures.counters[name]
            for labels in [labels for labels in counts if labels[place] not in replicas]:
                del counts[labels]
        self.figures.gauges["inflight"].clear()

    def encode(self) -> bytes:
        """For other workers, and for who follows this one."""
        return msgspec.msgpack.encode(self.figures)

    def text(self, others: Iterable[bytes] = ()) -> bytes:
        """What Prometheus reads, of this worker and those whose numbers are given."""
        registry = CollectorRegistry()
        registry.register(_Sum([self.figures, *(_decode(other) for other in others)]))
        return generate_latest(registry)


def _decode(encoded: bytes) -> Figures:
    return msgspec.msgpack.decode(encoded, type=Figures)


class _Sum(Collector):
    def __init__(self, all_figures: list[Figures]) -> None:
        self._all = all_figures

    def collect(self) -> Iterator[Metric]:
        for name, (text, labels) in COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=labels)
            for values, counts in self._by_labels("counters", name):
                counter.add_metric(values, sum(counts))
            yield counter
        for name, (text, bounds) in HISTOGRAMS.items():
            found = [figures.histograms[name] for figures in self._all]
            counts = [sum(each) for each in zip(*(one.counts for one in found), strict=True)]
            histogram = HistogramMetricFamily(PREFIX + name, text)
            ends = [*(str(bound) for bound in bounds), "+Inf"]
            buckets = [(end, float(sum(counts[: place + 1]))) for place, end in enumerate(ends)]
            histogram.add_metric((), buckets, sum(one.sum for one in found))
            yield histogram
        for name, (text, labels, merge) in GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=labels)
            for values, counts in self._by_labels("gauges", name):
                gauge.add_metric(values, merge(counts))
            yield gauge

    def _by_labels(self, kind: str, name: str) -> Iterator[tuple[tuple[str, ...], list[float]]]:
        tables: list[dict[tuple[str, ...], Any]] = [getattr(figures, kind)[name] for figures in self._all]
        for labels in sorted({labels for table in tables for labels in table}):
            yield labels, [table[labels] for table in tables if labels in table]
