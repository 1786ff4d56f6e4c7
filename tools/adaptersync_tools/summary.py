"""What a run came to, from what it left behind: step lines, events, ledger rows, manifests. No I/O.

`judge` says what keeps a run from being sound. A synthetic run has no reward and no ratio, so none is judged.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median, variance
from typing import Any

from msgspec import Struct

from adaptersync_core.events import PHASES
from adaptersync_core.rollouts import GIVEN_UP, SERVED, UNKNOWN, Row

EDGE_STEPS = 10  # the first and the last steps that are compared
GAIN_ERRORS = 5.0  # by how many standard errors reward and held-out answers must have risen
CHANCE_ERRORS = 3.0  # by fewer they may rise by chance: no control may learn more
RATIO_RANGE = (0.98, 1.02)
LEARNT = ("exact", "digits")  # rewards from which something must be learnt
CONTROL = "coin"  # the reward that says nothing

Fields = Mapping[str, str]


class Reward(Struct, frozen=True, kw_only=True):
    """Means of the first and last `steps` steps, each with its standard error; `gain_errors` of their difference."""

    steps: int
    first: float
    first_error: float
    last: float
    last_error: float
    gain_errors: float


class Spread(Struct, frozen=True, kw_only=True):
    low: float
    mean: float
    high: float


class Latency(Struct, frozen=True, kw_only=True):
    """Seconds."""

    p50: float
    max: float
    count: int


class Rollouts(Struct, frozen=True, kw_only=True):
    """`given_up` were ended by their client or by the stop; `failed` is what the fleet owed and did not give.

    Of `unknown` ones nobody knows how they ended: a router died. `voided` ones, however they ended, had a version
    that was found bad; `substituted` ones another than the trainer asked for.
    """

    total: int
    ok: int
    failed: int
    given_up: int
    unknown: int
    voided: int
    substituted: int
    by_version: dict[str, int]
    by_replica: dict[str, int]
    by_routing: dict[str, int]
    by_outcome: dict[str, int]
    cached_tokens: int
    prompt_tokens: int


class PrefixCache(Struct, frozen=True, kw_only=True):
    """vLLM's `cached_tokens` of answers whose prompt the replica had before: under the same version, or another."""

    versions: tuple[str, str]
    within_answers: int
    within_tokens: int
    across_answers: int
    across_tokens: int
    holds: bool


class HeldOut(Struct, frozen=True, kw_only=True):
    """Mean reward for problems nobody was trained on, at temperature 0 and at 1; of sums, the share of right ones."""

    model: str
    problems: int
    greedy: float
    sampled: float

    @property
    def error(self) -> float:
        """Standard error of `sampled`, or more: no reward from 0 to 1 scatters as much as one of 0 or 1."""
        return math.sqrt(self.sampled * (1 - self.sampled) / self.problems)


class Summary(Struct, frozen=True, kw_only=True):
    """Everything a run is judged by; `sound` when `objections` is empty."""

    run: str
    mode: str
    reward_function: str
    replicas: int
    steps: int
    sound: bool
    objections: list[str]
    reward: Reward | None
    right: Reward | None
    """Right answers, whatever was rewarded."""
    ratio: Spread | None
    versions: dict[str, int]
    latency: dict[str, Latency]
    rollouts: Rollouts
    prefix_cache: PrefixCache | None
    pauses: int | None
    restarts: dict[str, int]
    durations: dict[str, float]
    held_out: list[HeldOut] = []
    lesson: str = "carry"


def reward_of(rewards: Sequence[float]) -> Reward | None:
    """None when there are too few steps to say anything."""
    count = min(EDGE_STEPS, len(rewards) // 2)
    if count < 2:
        return None
    first, last = rewards[:count], rewards[-count:]
    errors = [math.sqrt(variance(part) / count) for part in (first, last)]
    error = math.hypot(*errors)
    return Reward(
        steps=count,
        first=fmean(first),
        first_error=errors[0],
        last=fmean(last),
        last_error=errors[1],
        gain_errors=in_errors(fmean(last) - fmean(first), error),
    )


def in_errors(difference: float, error: float) -> float:
    if error:
        return difference / error
    return math.copysign(999.0, difference) if difference else 0.0


def held_out_gain(held_out: Sequence[HeldOut]) -> float | None:
    """By how many standard errors the last model is better than the first, sampled; None without two of them."""
    if len(held_out) < 2:
        return None
    before, after = held_out[0], held_out[-1]
    return in_errors(after.sampled - before.sampled, math.hypot(before.error, after.error))


def spread_of(values: Sequence[float]) -> Spread | None:
    return Spread(low=min(values), mean=fmean(values), high=max(values)) if values else None


def versions_of(events: Iterable[Fields]) -> dict[str, int]:
    """How many versions were published, and what became of them."""
    kinds = {
        "published": "adapter.published",
        "promoted": "version.promoted",
        "superseded": "version.superseded",
        "rolled_back": "version.rolled_back",
        "voided": "version.voided",
    }
    seen = Counter(event.get("type", "") for event in events)
    return {name: seen[kind] for name, kind in kinds.items()}


def latency_of(events: Iterable[Fields], timings: Iterable[Mapping[str, float]]) -> dict[str, Latency]:
    """Per phase: what the trainer spent (from manifests), each replica (from acks), and the fleet until promotion."""
    found: dict[str, list[float]] = {}
    for spent in timings:
        for name, value in spent.items():
            found.setdefault(f"trainer {name.removesuffix('_s')}", []).append(value)
    for event in events:
        if event.get("type") == "replica.acked" and event.get("accepted") == "true":
            for phase in PHASES:
                if phase in event:
                    found.setdefault(phase.removesuffix("_s"), []).append(float(event[phase]))
        elif event.get("type") == "version.promoted" and "waited_s" in event:
            found.setdefault("publish → promoted", []).append(float(event["waited_s"]))
    return {name: Latency(p50=median(values), max=max(values), count=len(values)) for name, values in found.items()}


def rollouts_of(rows: Sequence[Row]) -> Rollouts:
    """Of the ledger, joined."""

    def count(field: str) -> dict[str, int]:
        values = [getattr(row, field) for row in rows]
        return dict(Counter(value for value in values if value).most_common())

    outcomes = Counter(row.outcome for row in rows)
    ok = outcomes[SERVED]
    given_up = sum(outcomes[name] for name in GIVEN_UP)
    return Rollouts(
        total=len(rows),
        ok=ok,
        given_up=given_up,
        failed=len(rows) - ok - given_up - outcomes[UNKNOWN],
        unknown=outcomes[UNKNOWN],
        voided=sum(row.voided for row in rows),
        substituted=sum(bool(row.substituted) for row in rows),
        by_version=count("version"),
        by_replica=count("replica"),
        by_routing=count("routing"),
        by_outcome=dict(outcomes),
        cached_tokens=sum(row.cached_tokens or 0 for row in rows),
        prompt_tokens=sum(row.prompt_tokens or 0 for row in rows),
    )


def judge(
    *,
    reward_function: str,
    wanted_steps: int,
    steps: Sequence[Mapping[str, Any]],
    versions: Mapping[str, int],
    rollouts: Rollouts,
    prefix_cache: PrefixCache | None,
    pauses: int | None,
    held_out: Sequence[HeldOut] = (),
) -> list[str]:
    """Why the run is not sound; empty when it is."""
    found = []
    gain = held_out_gain(held_out)
    if gain is not None and reward_function == CONTROL and gain >= CHANCE_ERRORS:
        found.append(f"the control learnt: held-out answers rose by {gain:.1f} standard errors")
    if gain is not None and reward_function in LEARNT and len(steps) >= 2 * EDGE_STEPS and gain < GAIN_ERRORS:
        found.append(f"held-out answers rose by {gain:.1f} standard errors, less than {GAIN_ERRORS:g}")
    if len(steps) < wanted_steps:
        found.append(f"only {len(steps)} of {wanted_steps} steps were made")
    if reward_function in LEARNT and len(steps) >= 2 * EDGE_STEPS:
        reward = reward_of([step["reward"] for step in steps])
        if reward is None or reward.gain_errors < GAIN_ERRORS:
            rose = reward.gain_errors if reward else 0.0
            found.append(f"reward rose by {rose:.1f} standard errors, less than {GAIN_ERRORS:g}")
    ratio = spread_of([step["ratio"] for step in steps if "ratio" in step])
    if ratio is None and steps and reward_function != "synthetic":
        found.append("no step says its ratio")
    elif ratio is not None and not RATIO_RANGE[0] <= ratio.mean <= RATIO_RANGE[1]:
        found.append(f"mean ratio {ratio.mean:.4f} is outside {RATIO_RANGE[0]} to {RATIO_RANGE[1]}")
    for fate in ("rolled_back", "voided"):
        if versions[fate]:
            found.append(f"{versions[fate]} versions were {fate.replace('_', ' ')}")
    missing = versions["published"] - versions["promoted"] - versions["superseded"] - versions["rolled_back"]
    if missing > 0:
        found.append(f"{missing} published versions have no outcome")
    if not versions["promoted"]:
        found.append("no version was promoted")
    if rollouts.failed:
        found.append(f"{rollouts.failed} rollouts failed")
    if rollouts.unknown:
        found.append(f"of {rollouts.unknown} rollouts nobody knows how they ended")
    if rollouts.voided:
        found.append(f"{rollouts.voided} rollouts are of voided versions")
    if not rollouts.ok:
        found.append("no rollout is in the ledger")
    if pauses is None:
        found.append("the engines do not say how often they were paused")
    elif pauses:
        found.append(f"{pauses} pauses were sent to engines")
    if prefix_cache is not None and not prefix_cache.holds:
        found.append("prefix cache is not kept apart by version, or is not used within one")
    return found
