"""The agent's figures for Prometheus; its replica's name is on all of them."""

from __future__ import annotations

from typing import get_args

from adaptersync_core.metrics import Metric, Metrics
from adaptersync_core.proof import Verdict
from adaptersync_core.records import Ack, ReplicaReport

TABLE = (
    Metric(name="engine_reachable", kind="gauge", text="1 while the engine answers its agent"),
    Metric(name="reported_seconds", kind="age", text="Since the control server last took a report of the replica"),
    Metric(name="loaded", kind="gauge", text="Versions that the engine lists"),
    Metric(name="slots", kind="gauge", text="Adapters the engine can hold at once (--max-loras); 0: it does not say"),
    Metric(
        name="proofs", kind="counter", text="Versions judged by the proof that they are served", labels=("verdict",),
        words=get_args(Verdict),
    ),
    Metric(
        name="acks", kind="counter", text="Words on versions: accepted, or refused by whose fault", labels=("word",),
        words=("accepted", "refused_version", "refused_replica"),
    ),
    Metric(name="cache_followed", kind="gauge", text="1 while the engine's own word on its cache is followed"),
    Metric(name="cache_blocks", kind="gauge", text="Prefix blocks it owns by that"),
    Metric(name="cache_lag_seconds", kind="gauge", text="How far behind the engine that was at the last change"),
    Metric(name="cache_gaps", kind="gauge", text="Gaps in it that were filled, in the lives of its present streams"),
    Metric(name="cache_losses", kind="gauge", text="Times all was forgotten, since a gap could not be filled"),
)  # fmt: skip


def reported(figures: Metrics, report: ReplicaReport) -> None:
    figures.set("engine_reachable", 1)
    figures.since("reported_seconds", 0.0)
    figures.set("loaded", len(report.loaded))
    figures.set("slots", report.max_loras)
    figures.set("cache_followed", report.cache.followed)
    figures.set("cache_blocks", report.cache.blocks)
    figures.set("cache_lag_seconds", report.cache.lag_s)
    figures.set("cache_gaps", report.cache.gaps)
    figures.set("cache_losses", report.cache.losses)


def answered(figures: Metrics, ack: Ack) -> None:
    figures.count("acks", "accepted" if ack.accepted else f"refused_{ack.fault}")
    if "proved_s" in ack.phases:  # else it came to no proof
        figures.count("proofs", ack.proof.verdict)
