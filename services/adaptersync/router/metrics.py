"""The router's figures for Prometheus. Labels are bounded: replicas and versions of the table, and words of
our own.

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
_SERVED = ("replica", "version")
_PHASE = ("replica", "phase")
_FINE = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25, 1.0)
_COARSE = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

# name: what it says, labels; for gauges also how those of several workers become one
COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "requests": ("Requests by how they ended", ("outcome", "status")),
    "unauthorized": ("Requests refused for want of a key, or of a scope", ("status",)),
    "routed": ("Choices of a replica", ("routing", *_SERVED)),
    "prompts": ("Prompts by how they were read, and why not by tokens", ("read", "reason")),
    "retries": ("Requests sent to another replica, by the one that did not do", ("reason", "replica")),
    "missing_version": ("Replicas that lacked a version they should hold", ("replica",)),
    "predicted_tokens": ("Prompt tokens expected to be cached, where replicas report how many were", _SERVED),
    "cached_tokens": ("Prompt tokens that replicas report as cached", _SERVED),
    "prompt_tokens": ("Prompt tokens that replicas report", _SERVED),
    "ledger_written": ("Ledger rows written", ()),
    "ledger_rewritten": ("Ledger rows that Redis had and lost, and that are written again", ()),
    "ledger_lost": ("Requests served without a ledger row: there was no room", ()),
    "ledger_untold": ("Refusals without a ledger row: there was no room", ()),
}
HISTOGRAMS: Mapping[str, tuple[str, tuple[str, ...], tuple[float, ...]]] = {
    "hold_seconds": ("Wait for a version to become current", (), _COARSE),
    "route_seconds": ("Choice of a replica", (), _FINE),
    "first_byte_seconds": ("From sending to a replica to its first byte", ("replica",), _COARSE),
    "first_token_seconds": ("From sending to a replica to the first token of a stream", _SERVED, _COARSE),
    "decode_seconds": ("From the first token of a stream to its last", ("replica",), _COARSE),
    "total_seconds": ("From request to last byte", (), _COARSE),
    "version_phase_seconds": ("Phases of versions; each router tells of all", ("phase",), _COARSE),
    "replica_phase_seconds": ("Phases of versions at their replicas; each router tells of all", _PHASE, _COARSE),
}
GAUGES: Mapping[str, tuple[str, tuple[str, ...], Callable[[Iterable[float]], float]]] = {
    "inflight": ("Sequences of this router at a replica", ("replica",), sum),
    "ready": ("1 for a replica that may be sent requests", ("replica",), min),
    "circuit": ("Whether a replica is left out: 0 no, 1 one request at a time tries it, 2 yes", ("replica",), max),
    "held": ("Requests held for a version", (), sum),
    "connections": ("Connections of clients", (), sum),
    "table_generation": ("Generation of the table served", (), min),
    "table_age_seconds": ("Time since the table was last read", (), max),
    "ledger_waiting": ("Ledger rows not yet written", (), sum),
    "ledger_spool_bytes": ("Bytes of the spool that rows take", (), sum),
    "ledger_spool_limit_bytes": ("Bytes that rows may take there", (), sum),
    "cache_reachable": ("1 when prefix ownership can be asked for", (), min),
}

IMBALANCE = "Most sequences of this router at one ready replica, over their mean; 1 when all have as many"


class Histogram(Struct):
    """`counts` by bucket, the last for what is above all bounds."""

    counts: list[int]
    sum: float = 0.0


class Figures(Struct):
    """All that one worker has counted, by name and then by labels."""

    counters: dict[str, dict[tuple[str, ...], float]]
    histograms: dict[str, dict[tuple[str, ...], Histogram]]
    gauges: dict[str, dict[tuple[str, ...], float]]

    @classmethod
    def none(cls) -> Figures:
        return cls(
            counters={name: {} if labels else {(): 0.0} for name, (_, labels) in COUNTERS.items()},
            histograms={name: {} if labels else {(): _empty(name)} for name, (_, labels, _) in HISTOGRAMS.items()},
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

    def observe(self, name: str, value: float, *labels: str) -> None:
        histograms = self.figures.histograms[name]
        histogram = histograms.get(labels)
        if histogram is None:
            histogram = histograms[labels] = _empty(name)
        histogram.counts[bisect_left(HISTOGRAMS[name][2], value)] += 1
        histogram.sum += value

    def gauge(self, name: str, value: float, *labels: str) -> None:
        self.figures.gauges[name][labels] = float(value)  # what others read is strict

    def keep(self, *, replicas: Collection[str], versions: Collection[str]) -> None:
        """Drop the series of replicas and versions that are gone."""
        kept = {"replica": replicas, "version": versions}
        tables: list[tuple[tuple[str, ...], dict[tuple[str, ...], Any]]] = [
            *((labels, self.figures.counters[name]) for name, (_, labels) in COUNTERS.items()),
            *((labels, self.figures.histograms[name]) for name, (_, labels, _) in HISTOGRAMS.items()),
        ]
        for labels, table in tables:
            places = [(place, kept[label]) for place, label in enumerate(labels) if label in kept]
            for values in [each for each in table if any(each[place] not in live for place, live in places)]:
                del table[values]
        for name, (_, by, _) in GAUGES.items():
            if by:
                self.figures.gauges[name].clear()

    def encode(self) -> bytes:
        """For other workers, and for who follows this one."""
        return msgspec.msgpack.encode(self.figures)

    def counted(self, name: str) -> int:
        """So often, under whatever labels."""
        return int(sum(self.figures.counters[name].values()))


def text(encoded: Iterable[bytes]) -> bytes:
    """What Prometheus reads, of all workers that these figures are of; of large groups this takes its time."""
    registry = CollectorRegistry()
    registry.register(_Sum([_decode(each) for each in encoded]))
    return generate_latest(registry)


def _empty(name: str) -> Histogram:
    return Histogram([0] * (len(HISTOGRAMS[name][2]) + 1))


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
        for name, (text, labels, bounds) in HISTOGRAMS.items():
            histogram = HistogramMetricFamily(PREFIX + name, text, labels=labels)
            ends = [*(str(bound) for bound in bounds), "+Inf"]
            for values, found in self._by_labels("histograms", name):
                counts = [sum(each) for each in zip(*(one.counts for one in found), strict=True)]
                buckets = [(end, float(sum(counts[: place + 1]))) for place, end in enumerate(ends)]
                histogram.add_metric(values, buckets, sum(one.sum for one in found))
            yield histogram
        for name, (text, labels, merge) in GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=labels)
            for values, counts in self._by_labels("gauges", name):
                gauge.add_metric(values, merge(counts))
            yield gauge
        yield GaugeMetricFamily(PREFIX + "imbalance", IMBALANCE, value=self._imbalance())

    def _imbalance(self) -> float:
        ready = {labels for labels, told in self._by_labels("gauges", "ready") if min(told)}
        counts = [sum(counts) for labels, counts in self._by_labels("gauges", "inflight") if labels in ready]
        return max(counts) * len(counts) / sum(counts) if sum(counts) else 1.0

    def _by_labels(self, kind: str, name: str) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
        tables: list[dict[tuple[str, ...], Any]] = [getattr(figures, kind)[name] for figures in self._all]
        for labels in sorted({labels for table in tables for labels in table}):
            yield labels, [table[labels] for table in tables if labels in table]
