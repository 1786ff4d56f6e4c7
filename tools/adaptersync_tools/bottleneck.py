"""Which side limits a run, and what to change first: from figures to a verdict with its evidence. Pure.

A run goes round: training, a sync, and rollouts beside both. Whoever the trainer waits for is what limits it. Its time
has three shares: what it trains, what syncs hold it up, and what it has no samples; rollouts that were held for a
version count with the sync. Where the samples are late, the fleet is too small if its engines let requests queue, and
too few requests are in flight if all that may be are, and none queues.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Literal

from msgspec import Struct

from adaptersync_core.manifest import Manifest
from adaptersync_core.records import RequestTimes
from adaptersync_tools.phases import TRAINER, Rollouts, Share, VersionPhases, shares

LEAST = 3  # versions that must say how long the trainer waited
DOMINANT = 0.4  # of the trainer's time, from which a share limits the run
AT_CAP = 0.9  # of the rollouts that may be under way: one that ends leaves its place for a moment
QUEUES = 0.1  # of a request's time in an engine: above, the engine has more than it can do at once
REFUSED = 0.01  # of all requests, turned away by a router that is full
NOTICEABLE = 0.05

Limit = Literal["trainer", "generation", "in-flight", "sync", "balanced", "unknown"]


class Figures(Struct, frozen=True, kw_only=True):
    """What a verdict is made from. None: nobody said so. `trained_s`, `sync_s` and `wait_s` are sums over `versions`,
    and `steps` are the steps between them.

    `held` is the share of rollouts' time in which they waited for a version; `engine_queue` that of requests' time in
    engines in which they queued there. `phase` is the longest one of a sync, with its median.
    """

    versions: int = 0
    steps: int = 0
    trained_s: float = 0.0
    sync_s: float = 0.0
    wait_s: float = 0.0
    inflight: float | None = None
    inflight_max: float | None = None
    queued: float | None = None
    queued_max: float | None = None
    backpressure_s: float | None = None
    rollouts: int = 0
    refused_full: int = 0
    held: float | None = None
    engine_requests: int = 0
    engine_queue: float | None = None
    phase: str = ""
    phase_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.trained_s + self.sync_s + self.wait_s


class Verdict(Struct, frozen=True, kw_only=True):
    """`change` is what to do, first things first; `shares` are of the trainer's time."""

    limit: Limit
    says: str
    evidence: list[str]
    change: list[str]
    shares: dict[str, float] = {}


def figures(
    manifests: Sequence[Manifest], found: Iterable[VersionPhases], rollouts: Rollouts, served: Iterable[RequestTimes]
) -> Figures:
    """Of a run's latest versions, oldest first."""
    telling = [each for each in manifests if {"step_s", "sync_s", "rollout_wait_s"} <= each.timings.keys()]
    waits = [min(each.timings["rollout_wait_s"], each.timings["step_s"]) for each in telling]
    steps = [each.step for each in telling if each.step is not None]
    engines = [each for each in served if each.requests]
    in_engines = sum(each.queue_s + each.prefill_s + each.decode_s for each in engines)
    longest = _longest(shares(found), sync_s=fmean(each.timings["sync_s"] for each in telling) if telling else 0.0)
    return Figures(
        versions=len(telling),
        steps=steps[-1] - steps[0] if steps else 0,
        trained_s=sum(each.timings["step_s"] for each in telling) - sum(waits),
        sync_s=sum(each.timings["sync_s"] for each in telling),
        wait_s=sum(waits),
        inflight=_mean(each.load.get("inflight") for each in telling),
        inflight_max=_mean(each.load.get("inflight_max") for each in telling),
        queued=_mean(each.load.get("queued") for each in telling),
        queued_max=_mean(each.load.get("queued_max") for each in telling),
        backpressure_s=_mean(each.timings.get("backpressure_s") for each in telling),
        rollouts=rollouts.count,
        refused_full=rollouts.full,
        held=rollouts.held_s / rollouts.total_s if rollouts.total_s else None,
        engine_requests=sum(each.requests for each in engines),
        engine_queue=sum(each.queue_s for each in engines) / in_engines if in_engines else None,
        phase=longest.phase if longest else "",
        phase_s=longest.p50_s if longest else 0.0,
    )


def _longest(phases: Sequence[Share], *, sync_s: float) -> Share | None:
    """The longest phase of a sync on its longer side: what the trainer does itself, or what the fleet does then."""
    ours = [each for each in phases if each.phase in TRAINER.values() and each.phase != "step"]
    fleets = [each for each in phases if each.phase not in TRAINER.values() and each.phase != "first token"]
    side = ours if sum(each.p50_s for each in ours) * 2 >= sync_s else fleets
    return max(side, key=lambda each: each.p50_s, default=None)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def judge(figures: Figures) -> Verdict:
    """What limits the run; `unknown` where the figures do not say, with what is missing."""
    if figures.versions < LEAST or figures.total_s <= 0:
        return Verdict(
            limit="unknown",
            says="not enough evidence",
            evidence=[
                f"{figures.versions} of the latest versions say how long the trainer trained, synced and waited; "
                f"{LEAST} are needed"
            ],
            change=[
                "publish with timings= step_s, sync_s and rollout_wait_s, as AdapterSyncGRPOTrainer does "
                "(help(AdapterPublisher.publish)), and let the run go on; behind a relay, look at what TRL logs: "
                "perf/rollout_wait_s and perf/weight_sync_s beside perf/step_s"
            ],
        )
    held = figures.held or 0.0
    split = {
        "training": figures.trained_s / figures.total_s,
        "sync": (figures.sync_s + figures.wait_s * held) / figures.total_s,
        "rollouts": figures.wait_s * (1 - held) / figures.total_s,
    }
    evidence = list(_evidence(figures, split))
    most = max(split, key=lambda name: split[name])
    if split[most] < DOMINANT:
        says = "nothing stands out: training, syncs and rollouts take about as long"
        change = ["more of one alone gains little: more replicas, and a trainer as much faster"]
        return Verdict(limit="balanced", says=says, evidence=evidence, change=change, shares=split)
    limit, says, change = {"training": _trainer, "sync": _sync, "rollouts": _rollouts}[most](figures, split)
    return Verdict(limit=limit, says=says, evidence=evidence, change=change, shares=split)


def _trainer(figures: Figures, split: dict[str, float]) -> tuple[Limit, str, list[str]]:
    change = ["more trainer: more devices, or less work a step; more replicas would gain nothing"]
    if figures.steps > figures.versions and split["sync"] < NOTICEABLE:
        change.append("a smaller sync interval: syncs cost next to nothing, and samples would be fresher")
    return "trainer", "the trainer: samples are there before it is", change


def _sync(figures: Figures, split: dict[str, float]) -> tuple[Limit, str, list[str]]:
    change = ["sync less often: a larger interval (weight_sync_steps), or a larger max_staleness"]
    if figures.phase:
        change.insert(0, f"look at `{figures.phase}`, the longest phase of a sync: {_seconds(figures.phase_s)}")
    return "sync", "syncs: training, or rollouts, wait for versions", change


def _rollouts(figures: Figures, split: dict[str, float]) -> tuple[Limit, str, list[str]]:
    if figures.rollouts and figures.refused_full > REFUSED * figures.rollouts:
        change = ["a larger router.max_inflight, or another router"]
        return "in-flight", "in-flight requests: routers turn rollouts away that engines might take", change
    capped = _capped(figures)
    queues = figures.engine_queue
    if capped and queues is None:
        change = ["a larger in-flight limit (max_inflight_tasks), and look again: it costs least to try"]
        return "unknown", "not enough evidence: rollouts, and no engine says whether requests queue", change
    if capped and queues is not None and queues < QUEUES:
        change = ["a larger in-flight limit (max_inflight_tasks); then look again"]
        return "in-flight", "in-flight requests: all that may be are under way, and engines have room", change
    change = ["more replicas, or faster ones"]
    if figures.inflight is None and queues is not None and queues < QUEUES:
        change.insert(0, "a larger in-flight limit, if the trainer has one: requests do not queue in engines")
    return "generation", "generation: the trainer waits for rollouts, and engines do what they can", change


def _capped(figures: Figures) -> bool:
    if figures.inflight is None or not figures.inflight_max:
        return False
    return figures.inflight >= AT_CAP * figures.inflight_max


def _evidence(figures: Figures, split: dict[str, float]) -> Iterable[str]:
    over = f"{_seconds(figures.total_s)} of the trainer, over {figures.versions} versions"
    parts = (("training", "trained"), ("sync", "held up by syncs"), ("rollouts", "waited for rollouts"))
    yield f"{over}: " + ", ".join(f"{split[name]:.0%} {said}" for name, said in parts)
    if figures.held is not None and figures.held >= NOTICEABLE:
        yield f"rollouts were held for a version for {figures.held:.0%} of their time, which counts with the syncs"
    if figures.inflight is not None and figures.inflight_max:
        yield f"{figures.inflight:.0f} of at most {figures.inflight_max:.0f} rollouts were in flight"
    if figures.queued is not None and figures.queued_max:
        yield f"{figures.queued:.0f} of at most {figures.queued_max:.0f} samples waited for the trainer"
    if figures.backpressure_s is not None:
        yield f"samples found that queue full, and waited {_seconds(figures.backpressure_s)} each"
    if figures.engine_queue is not None:
        requests = f"{figures.engine_requests} requests"
        yield f"of the time that the latest {requests} spent in engines, they queued {figures.engine_queue:.0%}"
    if figures.refused_full:
        yield f"routers that were full turned {figures.refused_full} of {figures.rollouts} rollouts away"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
