"""Which side limits a run, and what to change first: from evidence to a verdict. Pure.

A run goes round: training, a sync, and rollouts beside both. Whoever the trainer waits for is what limits it. Its time
has three shares: what it trains, what syncs hold it up, and what it has no samples; rollouts that were held for a
version count with the sync.

Where the samples are late, either the fleet is too small or too few requests are in flight. All that may be are in
flight in nearly every run, and an engine queues nobody before it may have no more at once, however slow its batch has
made it: neither tells the two apart. What does is whether engines decoded more when they had more at once. Where they
were not seen with more or with fewer nobody knows, and the verdict is to try.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Literal

from msgspec import Struct

from adaptersync.coordinator.phases import TRAINER, Rollouts, Share, VersionPhases, shares
from adaptersync_core.events import TAKEN_UP
from adaptersync_core.manifest import Manifest
from adaptersync_core.records import DecodeRate, Decoding, ReplicaReport

LEAST = 3  # versions that must say how long the trainer waited
DOMINANT = 0.4  # of the trainer's time, from which a share limits the run
AT_CAP = 0.9  # of the rollouts that may be under way: one that ends leaves its place for a moment
QUEUES = 0.1  # of a request's time in an engine: above, the engine has more than it can do at once
FULL = 0.9  # of the sequences that an engine takes at once
OTHER_SIZE = 1.5  # times as many sequences at once, from which a batch says something beside another
NEAR = 3.0  # times as many, up to which more tokens say that yet more would come: saturation may lie in between
GAINS = 0.5  # the power of the batch by which tokens grew, at least: 1.4 times as many for twice the batch
REFUSED = 0.01  # of all requests, turned away by a router that is full
NOTICEABLE = 0.05

Limit = Literal["trainer", "generation", "in-flight", "generation or in-flight", "sync", "balanced", "unknown"]


class Decoded(Struct, frozen=True, kw_only=True):
    """Sums over the engines that were seen with two sizes."""

    batch: float
    tokens_per_s: float


class Evidence(Struct, frozen=True, kw_only=True):
    """What a verdict rests on. None: nobody said so. `trained_s`, `sync_s` and `wait_s` are sums over `versions`,
    and `steps` are the steps between them.

    `held` is the share of rollouts' time in which they waited for a version; `engine_queue` that of requests' time in
    engines in which they queued there. `batch` is what engines decode at once, of `batch_max` at most; `fewer` and
    `more` are batches that they were seen with, and the tokens a second that they then decoded. `phase` is the longest
    one of a sync, with its median.
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
    batch: float | None = None
    batch_max: float | None = None
    fewer: Decoded | None = None
    more: Decoded | None = None
    phase: str = ""
    phase_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.trained_s + self.sync_s + self.wait_s

    @property
    def gain(self) -> float | None:
        """1: so many times the batch brought so many times the tokens; 0: it brought none. None: nobody saw it."""
        if self.fewer is None or self.more is None:
            return None
        tokens = self.more.tokens_per_s / self.fewer.tokens_per_s
        return math.log(tokens) / math.log(self.more.batch / self.fewer.batch)


class Verdict(Struct, frozen=True, kw_only=True):
    """`change` is what to do, first things first; `shares` are of the trainer's time."""

    limit: Limit
    says: str
    evidence: list[str]
    change: list[str]
    shares: dict[str, float] = {}


def evidence(
    manifests: Sequence[Manifest],
    found: Iterable[VersionPhases],
    rollouts: Rollouts,
    replicas: Sequence[ReplicaReport],
) -> Evidence:
    """Of a run's latest versions, oldest first."""
    telling = [each for each in manifests if {"step_s", "sync_s", "rollout_wait_s"} <= each.timings.keys()]
    waits = [min(each.timings["rollout_wait_s"], each.timings["step_s"]) for each in telling]
    steps = [each.step for each in telling if each.step is not None]
    engines = [each.request_times for each in replicas if each.request_times.requests]
    in_engines = sum(each.queue_s + each.prefill_s + each.decode_s for each in engines)
    decoding = [each.decoding for each in replicas if each.decoding.rates]
    limited = [each.batch_max for each in decoding if each.batch_max]
    pairs = [pair for pair in map(_other_size, decoding) if pair is not None]
    sync_s = sum(each.timings["sync_s"] for each in telling)
    longest = longest_of_sync(shares(found), sync_s=sync_s / max(len(telling), 1))
    return Evidence(
        versions=len(telling),
        steps=steps[-1] - steps[0] if steps else 0,
        trained_s=sum(each.timings["step_s"] for each in telling) - sum(waits),
        sync_s=sync_s,
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
        batch=sum(each.batch for each in decoding) if decoding else None,
        batch_max=sum(limited) if decoding and len(limited) == len(decoding) else None,
        fewer=_together([fewer for fewer, _ in pairs]),
        more=_together([more for _, more in pairs]),
        phase=longest.phase if longest else "",
        phase_s=longest.p50_s if longest else 0.0,
    )


def _other_size(engine: Decoding) -> tuple[DecodeRate, DecodeRate] | None:
    """What an engine decodes at its batch of lately, with what it did at a larger one; else at a smaller one."""
    now = min(engine.rates, key=lambda rate: abs(math.log(rate.batch / engine.batch)))
    larger = [rate for rate in engine.rates if rate.batch >= OTHER_SIZE * now.batch]
    if larger:
        return now, larger[0]
    smaller = [rate for rate in engine.rates if rate.batch * OTHER_SIZE <= now.batch]
    return (smaller[-1], now) if smaller else None


def _together(rates: Sequence[DecodeRate]) -> Decoded | None:
    if not rates:
        return None
    return Decoded(batch=sum(each.batch for each in rates), tokens_per_s=sum(each.tokens_per_s for each in rates))


def longest_of_sync(phases: Sequence[Share], *, sync_s: float) -> Share | None:
    """The longest phase on the longer side of a sync: what the trainer does itself, or what the fleet does then.

    As long as the fleet is at the version before, one is not taken up: of that wait only what goes beyond one promotion
    is a cause of its own.
    """
    ours = [each for each in phases if each.phase in TRAINER.values() and each.phase != "step"]
    fleets = [each for each in phases if each.phase not in TRAINER.values() and each.phase != "first token"]
    side = ours if sum(each.p50_s for each in ours) * 2 >= sync_s else fleets
    promotion_s = sum(each.p50_s for each in fleets if each.phase != TAKEN_UP)
    return max(side, key=lambda each: each.p50_s - (promotion_s if each.phase == TAKEN_UP else 0.0), default=None)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def judge(known: Evidence) -> Verdict:
    """What limits the run; `unknown` where the evidence does not say, with what is missing."""
    if known.versions < LEAST or known.total_s <= 0:
        return Verdict(
            limit="unknown",
            says="not enough evidence",
            evidence=[
                f"{known.versions} of the latest versions say how long the trainer trained, synced and waited; "
                f"{LEAST} are needed"
            ],
            change=[
                "publish with timings= step_s, sync_s and rollout_wait_s, as AdapterSyncGRPOTrainer does "
                "(help(AdapterPublisher.publish)), and let the run go on; behind a relay, look at what TRL logs: "
                "perf/rollout_wait_s and perf/weight_sync_s beside perf/step_s"
            ],
        )
    held = known.held or 0.0
    split = {
        "training": known.trained_s / known.total_s,
        "sync": (known.sync_s + known.wait_s * held) / known.total_s,
        "rollouts": known.wait_s * (1 - held) / known.total_s,
    }
    because = list(_because(known, split))
    most = max(split, key=lambda name: split[name])
    if split[most] < DOMINANT:
        says = "nothing stands out: training, syncs and rollouts take about as long"
        change = ["more of one alone gains little: more replicas, and a trainer as much faster"]
        return Verdict(limit="balanced", says=says, evidence=because, change=change, shares=split)
    limit, says, change = {"training": _trainer, "sync": _sync, "rollouts": _rollouts}[most](known, split)
    return Verdict(limit=limit, says=says, evidence=because, change=change, shares=split)


def _trainer(known: Evidence, split: dict[str, float]) -> tuple[Limit, str, list[str]]:
    change = ["more trainer: more devices, or less work a step; more replicas would gain nothing"]
    if known.steps > known.versions and split["sync"] < NOTICEABLE:
        change.append("a smaller sync interval: syncs cost next to nothing, and samples would be fresher")
    return "trainer", "the trainer: samples are there before it is", change


def _sync(known: Evidence, split: dict[str, float]) -> tuple[Limit, str, list[str]]:
    change = ["sync less often: a larger interval (weight_sync_steps), or a larger max_staleness"]
    if known.phase:
        change.insert(0, f"look at `{known.phase}`, the longest phase of a sync: {_seconds(known.phase_s)}")
    return "sync", "syncs: training, or rollouts, wait for versions", change


def _rollouts(known: Evidence, split: dict[str, float]) -> tuple[Limit, str, list[str]]:
    if known.rollouts and known.refused_full > REFUSED * known.rollouts:
        change = ["a larger router.max_inflight, or another router"]
        return "in-flight", "in-flight requests: routers turn rollouts away that engines might take", change
    capped, room = _capped(known), _room(known)
    if room is False or capped is False:
        change = ["more replicas, or faster ones"]
        says = "engines do what they can" if room is False else "fewer are in flight than may be"
        return "generation", f"generation: the trainer waits for rollouts, and {says}", change
    limit = "a larger in-flight limit (max_inflight_tasks)"
    if capped is None:
        limit += ", if the trainer has one"
    if room:
        change = [f"{limit}; then look again"]
        return "in-flight", "in-flight requests: engines decoded more when they had more at once", change
    change = [
        f"{limit}, once: it costs least to try",
        "look again a minute later: it is then known how many more tokens a second that brought; if next "
        "to none, more replicas",
    ]
    says = "generation, or in-flight requests: engines were seen with too little else at once"
    return "generation or in-flight", says, change


def _room(known: Evidence) -> bool | None:
    """Whether engines would do more if they had more at once; None where nobody saw it."""
    if known.engine_queue is not None and known.engine_queue >= QUEUES:
        return False
    if known.batch is not None and known.batch_max and known.batch >= FULL * known.batch_max:
        return False
    if known.fewer is None or known.more is None or known.gain is None:
        return None
    if known.gain < GAINS:
        return False
    return True if known.more.batch <= NEAR * known.fewer.batch else None


def _capped(known: Evidence) -> bool | None:
    if known.inflight is None or not known.inflight_max:
        return None
    return known.inflight >= AT_CAP * known.inflight_max


def _because(known: Evidence, split: dict[str, float]) -> Iterable[str]:
    over = f"{_seconds(known.total_s)} of the trainer, over {known.versions} versions"
    parts = (("training", "trained"), ("sync", "held up by syncs"), ("rollouts", "waited for rollouts"))
    yield f"{over}: " + ", ".join(f"{split[name]:.0%} {said}" for name, said in parts)
    if known.held is not None and known.held >= NOTICEABLE:
        yield f"rollouts were held for a version for {known.held:.0%} of their time, which counts with the syncs"
    if known.inflight is not None and known.inflight_max:
        yield f"{known.inflight:.0f} of at most {known.inflight_max:.0f} rollouts were in flight"
    if known.queued is not None and known.queued_max:
        yield f"{known.queued:.0f} of at most {known.queued_max:.0f} samples waited for the trainer"
    if known.backpressure_s is not None:
        yield f"samples found that queue full, and waited {_seconds(known.backpressure_s)} each"
    if known.engine_queue is not None:
        requests = f"{known.engine_requests} requests"
        yield f"of the time that the latest {requests} spent in engines, they queued {known.engine_queue:.0%}"
    if known.batch is not None:
        most = f" of at most {known.batch_max:.0f}" if known.batch_max else ""
        yield f"engines decode {known.batch:.0f}{most} sequences at once"
    if known.fewer is not None and known.more is not None:
        fewer, more = known.fewer, known.more
        yield (
            f"with {more.batch:.0f} at once they decoded {more.tokens_per_s:.0f} tokens a second, "
            f"with {fewer.batch:.0f} {fewer.tokens_per_s:.0f}"
        )
    if known.refused_full:
        yield f"routers that were full turned {known.refused_full} of {known.rollouts} rollouts away"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
