"""Figures of one worker and of several: what Prometheus reads of them, and what is left when a worker is replaced."""

from __future__ import annotations

import math

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from adaptersync.router.metrics import COUNTERS, GAUGES, HISTOGRAMS, PREFIX, Metrics, text

# what dashboards know: names change only on purpose
NAMES = {
    "cache_reachable": "gauge",
    "cached_tokens": "counter",
    "circuit": "gauge",
    "connections": "gauge",
    "decode_seconds": "histogram",
    "first_byte_seconds": "histogram",
    "first_token_seconds": "histogram",
    "held": "gauge",
    "hold_seconds": "histogram",
    "imbalance": "gauge",
    "inflight": "gauge",
    "ledger_lost": "counter",
    "ledger_rewritten": "counter",
    "ledger_spool_bytes": "gauge",
    "ledger_spool_limit_bytes": "gauge",
    "ledger_untold": "counter",
    "unauthorized": "counter",
    "ledger_waiting": "gauge",
    "ledger_written": "counter",
    "missing_version": "counter",
    "predicted_tokens": "counter",
    "prompt_tokens": "counter",
    "prompts": "counter",
    "ready": "gauge",
    "replica_phase_seconds": "histogram",
    "requests": "counter",
    "retries": "counter",
    "route_seconds": "histogram",
    "routed": "counter",
    "table_age_seconds": "gauge",
    "table_generation": "gauge",
    "total_seconds": "histogram",
    "version_phase_seconds": "histogram",
}


def read(metrics: Metrics) -> dict[str, Metric]:
    told = text([metrics.encode()]).decode()
    return {metric.name.removeprefix(PREFIX): metric for metric in text_string_to_metric_families(told)}


def values(metrics: Metrics, *others: Metrics) -> dict[str, float]:
    """By series, as it is written."""
    lines = text([each.encode() for each in (metrics, *others)]).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.removeprefix(PREFIX): float(value) for name, value in pairs}


def worker(times: int = 1) -> Metrics:
    """One that has counted all there is to count, so many times."""
    metrics = Metrics()
    for _ in range(times):
        for name, (_, labels) in COUNTERS.items():
            metrics.count(name, *(f"{label}-1" for label in labels))
        for name, (_, labels, _) in HISTOGRAMS.items():
            metrics.observe(name, 0.03, *(f"{label}-1" for label in labels))
    for name, (_, labels, _) in GAUGES.items():
        metrics.gauge(name, times, *(f"{label}-1" for label in labels))
    return metrics


def test_names_and_kinds_are_those_that_dashboards_know() -> None:
    assert {name: metric.type for name, metric in read(worker()).items()} == NAMES


def test_labels_are_those_that_dashboards_know() -> None:
    found = {
        name: sorted(sample.labels)
        for name, metric in read(worker()).items()
        for sample in metric.samples[:1]
        if metric.type != "histogram"
    }
    assert {name: labels for name, labels in found.items() if labels} == {
        "requests": ["outcome", "status"],
        "routed": ["replica", "routing", "version"],
        "prompts": ["read", "reason"],
        "retries": ["reason", "replica"],
        "unauthorized": ["status"],
        "missing_version": ["replica"],
        "circuit": ["replica"],
        "inflight": ["replica"],
        "ready": ["replica"],
        "predicted_tokens": ["replica", "version"],
        "cached_tokens": ["replica", "version"],
        "prompt_tokens": ["replica", "version"],
    }


def test_a_histogram_counts_each_value_in_its_bucket_and_all_above() -> None:
    metrics = Metrics()
    for value in (0.005, 0.0051, 0.3, 601.0):
        metrics.observe("total_seconds", value)
    found = values(metrics)
    assert [
        found[f'total_seconds_bucket{{le="{end}"}}'] for end in ("0.005", "0.02", "0.25", "0.5", "600.0", "+Inf")
    ] == [*(1, 2, 2, 3, 3, 4)]
    assert found["total_seconds_count"] == 4
    assert found["total_seconds_sum"] == pytest.approx(601.3101)


def test_what_several_counted_is_their_sum() -> None:
    found = values(worker(1), worker(2), worker(4))
    assert found['requests_total{outcome="outcome-1",status="status-1"}'] == 7
    assert found['prompt_tokens_total{replica="replica-1",version="version-1"}'] == 7
    assert found['first_byte_seconds_count{replica="replica-1"}'] == 7
    assert found['hold_seconds_bucket{le="0.05"}'] == 7
    assert found['hold_seconds_bucket{le="0.02"}'] == 0
    assert found["hold_seconds_count"] == 7
    assert found["hold_seconds_sum"] == pytest.approx(0.21)


def test_series_of_one_worker_alone_are_there_as_well() -> None:
    one, other = Metrics(), Metrics()
    one.count("retries", "unreachable", "r1")
    other.count("retries", "silent", "r1", by=2.0)
    found = values(one, other)
    told = [found[f'retries_total{{reason="{reason}",replica="r1"}}'] for reason in ("unreachable", "silent")]
    assert told == [1, 2]


@pytest.mark.parametrize(
    ("name", "merged"),
    [("connections", 7), ("held", 7), ("table_generation", 1), ("table_age_seconds", 4), ("cache_reachable", 1)],
)
def test_a_gauge_of_several_is_their_sum_or_that_of_the_worst_off(name: str, merged: float) -> None:
    assert values(worker(2), worker(1), worker(4))[name] == merged


def test_gauges_may_be_truths_and_without_end_also_for_other_workers() -> None:
    metrics = Metrics()
    metrics.gauge("cache_reachable", True)
    metrics.gauge("table_age_seconds", math.inf)
    found = values(Metrics(), metrics)
    assert (found["cache_reachable"], found["table_age_seconds"]) == (1, math.inf)


def test_histograms_without_labels_are_there_before_anything_was_counted() -> None:
    found = values(Metrics())
    assert (found["hold_seconds_count"], found["total_seconds_count"]) == (0, 0)


def test_series_of_replicas_that_left_are_dropped() -> None:
    metrics = Metrics()
    for replica in ("r1", "r2"):
        metrics.count("routed", "cold", replica, "v1")
        metrics.count("missing_version", replica)
        metrics.observe("first_byte_seconds", 0.5, replica)
        metrics.gauge("inflight", 1, replica)
        metrics.gauge("ready", True, replica)
    metrics.count("requests", "ok", "200")
    metrics.keep(replicas={"r2"}, versions={"v1"})
    metrics.gauge("inflight", 1, "r2")
    assert not [name for name in values(metrics) if "r1" in name]
    assert {name for name in values(metrics) if "r2" in name and "first_byte" not in name} == {
        'routed_total{replica="r2",routing="cold",version="v1"}',
        'missing_version_total{replica="r2"}',
        'inflight{replica="r2"}',
    }
    assert values(metrics)['requests_total{outcome="ok",status="200"}'] == 1


def test_series_of_versions_that_left_are_dropped() -> None:
    metrics = Metrics()
    for name in ("predicted_tokens", "cached_tokens", "prompt_tokens"):
        for version in ("v1", "v2"):
            metrics.count(name, "r1", version)
    metrics.keep(replicas={"r1"}, versions={"v2"})
    assert not [name for name in values(metrics) if "v1" in name]
    assert len([name for name in values(metrics) if "v2" in name and "_total" in name]) == 3


def test_imbalance_is_that_of_all_workers_together_over_ready_replicas() -> None:
    one, other = Metrics(), Metrics()
    assert values(one)["imbalance"] == 1
    for metrics, counts in ((one, (6, 0, 90)), (other, (2, 4, 0))):
        for place, count in enumerate(counts):
            metrics.gauge("inflight", count, f"r{place}")
            metrics.gauge("ready", place < 2, f"r{place}")
    assert values(one, other)["imbalance"] == pytest.approx(8 / 6)


def test_who_takes_anothers_place_counts_on_and_says_nothing_of_how_that_one_was() -> None:
    before = worker(3)
    after = Metrics(before.encode())
    counted = {name for name in values(before) if name.split("{")[0] not in GAUGES}
    assert {name: values(after)[name] for name in counted} == {name: values(before)[name] for name in counted}
    assert not [name for name in values(after) if name.split("{")[0] in GAUGES]
    after.count("prompt_tokens", "replica-1", "version-1", by=2.0)
    assert values(after)['prompt_tokens_total{replica="replica-1",version="version-1"}'] == 5


def test_what_was_counted_under_all_labels_is_told_as_one_number() -> None:
    metrics = Metrics()
    assert metrics.counted("ledger_lost") == 0
    metrics.count("ledger_lost", by=2)
    assert Metrics(metrics.encode()).counted("ledger_lost") == 2
    for reason in ("silent", "cut"):
        metrics.count("retries", reason, "r1")
    assert metrics.counted("retries") == 2


def test_labels_that_need_it_are_escaped() -> None:
    metrics = Metrics()
    metrics.count("retries", 'a"b\\c\nd', "r1")
    (sample,) = [sample for sample in read(metrics)["retries"].samples if sample.labels]
    assert sample.labels == {"reason": 'a"b\\c\nd', "replica": "r1"}
