"""The router's figures for Prometheus. Labels are bounded: replicas of the table, and words of our own.

Own registry, made per router, so that two of them in one process (a test) do not add up.
"""

from __future__ import annotations

from collections.abc import Collection

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_FINE = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25, 1.0)
_COARSE = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """Counters that the hot path adds to; gauges that are read when somebody looks."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"adaptersync_router_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"adaptersync_router_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"adaptersync_router_{name}", text, registry=registry, buckets=buckets)

        self.requests = counter("requests", "Requests by how they ended", "outcome", "status")
        self.routed = counter("routed", "Choices of a replica", "routing", "replica")
        self.prompts = counter("prompts", "Prompts by how they were read, and why not by tokens", "read", "reason")
        self.retries = counter("retries", "Requests sent to another replica", "reason")
        self.missing = counter("missing_version", "Replicas that lacked a version they should hold", "replica")
        self.hold_s = histogram("hold_seconds", "Wait for a version to become current", _COARSE)
        self.route_s = histogram("route_seconds", "Choice of a replica", _FINE)
        self.first_byte_s = histogram("first_byte_seconds", "From sending to a replica to its first byte", _COARSE)
        self.total_s = histogram("total_seconds", "From request to last byte", _COARSE)
        self.cached_tokens = counter("cached_tokens", "Prompt tokens that replicas report as cached")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens that replicas report")
        self.inflight = gauge("inflight", "Sequences of this router at a replica", "replica")
        self.held = gauge("held", "Requests held for a version")
        self.generation = gauge("table_generation", "Generation of the table served")
        self.table_age_s = gauge("table_age_seconds", "Time since the table was last read")
        self.ledger_waiting = gauge("ledger_waiting", "Ledger rows not yet written")
        self.ledger_written = gauge("ledger_written", "Ledger rows written since the start")
        self.ledger_lost = gauge("ledger_lost", "Requests served without a ledger row since the start")
        self.ledger_untold = gauge("ledger_untold", "Refusals without a ledger row since the start")
        self.ledger_spool = gauge("ledger_spool_bytes", "Bytes of the spool that rows take")
        self.cache_reachable = gauge("cache_reachable", "1 when prefix ownership can be asked for")
        self._replicas: set[str] = set()

    def keep_replicas(self, replicas: Collection[str]) -> None:
        """Drop the series of replicas that are gone."""
        for name in self._replicas - set(replicas):
            self.missing.remove(name)
            self.inflight.remove(name)
            for routing in ("affinity", "cold", "spill", "local"):
                self.routed.remove(routing, name)
        self._replicas = set(replicas)

    def text(self) -> bytes:
        return generate_latest(self.registry)
