"""What is promised of our router beside others. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from adaptersync_tools.bench.result import TIMES, Target
from adaptersync_tools.bench.routers.parties import DIRECT, OURS, OURS_AGENTS, OURS_TWO, VLLM, Party

Samples = Mapping[tuple[str, str], Sequence[Mapping[str, float]]]
"""By case and party, in the order they were taken: those at one place of it were taken one after the other."""

Value = Callable[[Samples], float]


class Unmeasured(Exception):
    """Something was not measured; says what."""


class Promise(Struct, frozen=True, kw_only=True):
    case: str
    name: str
    value: Value
    kind: Literal["at least", "at most"]
    bound: float
    unit: str


def promised(found: Samples, cases: Collection[str]) -> tuple[tuple[Target, ...], tuple[str, ...]]:
    """Of these cases; and the promises that cannot be judged, each with what is missing for it."""
    judged: list[Target] = []
    unjudged: list[str] = []
    for promise in PROMISES:
        if promise.case not in cases:
            continue
        name = f"{promise.case}: {promise.name}"
        make = Target.at_least if promise.kind == "at least" else Target.at_most
        try:
            judged.append(make(name, promise.value(found), promise.bound, unit=promise.unit))
        except Unmeasured as missing:
            unjudged.append(f"{name}: there is no {missing}")
    return tuple(judged), tuple(unjudged)


def _series(found: Samples, case: str, party: Party, figure: str) -> list[float]:
    samples = found.get((case, party.name), ())
    if not samples:
        raise Unmeasured(f"{case} of {party.name}")
    return [sample[figure] for sample in samples]


def _median(case: str, figure: str, party: Party = OURS) -> Value:
    return lambda found: statistics.median(_series(found, case, party, figure))


def _all(case: str, figure: str, party: Party = OURS) -> Value:
    """What must not happen may not happen once."""
    return lambda found: sum(_series(found, case, party, figure))


# Of two that were measured in turn, the median of what each repetition says: the machine may have been another in each.


def _fewer_warm(found: Samples) -> float:
    one, two = (_series(found, case, OURS, "warm_percent") for case in ("warmth", "two-routers"))
    return statistics.median(alone - split for alone, split in zip(one, two, strict=True))


def _rate(found: Samples) -> float:
    ours, theirs = (_series(found, "throughput", party, "requests_per_s") for party in (OURS_TWO, VLLM))
    return statistics.median(our / their for our, their in zip(ours, theirs, strict=True))


def _added(found: Samples) -> float:
    ours, direct = (_series(found, "added", party, "p50_ms") for party in (OURS, DIRECT))
    return statistics.median(our - least for our, least in zip(ours, direct, strict=True))


def _at_least(case: str, name: str, value: Value, bound: float, unit: str) -> Promise:
    return Promise(case=case, name=name, value=value, kind="at least", bound=bound, unit=unit)


def _at_most(case: str, name: str, value: Value, bound: float, unit: str) -> Promise:
    return Promise(case=case, name=name, value=value, kind="at most", bound=bound, unit=unit)


PROMISES = (
    _at_least("warmth", "warm", _median("warmth", "warm_percent"), 87.0, "%"),
    _at_most("warmth", "most in flight at one", _median("warmth", "largest_inflight"), 43, "requests"),
    _at_most("two-routers", "fewer warm than through one", _fewer_warm, 0.3, "points"),
    _at_most("template", "requests at the busiest", _median("template", "busiest_percent"), 30.0, "%"),
    _at_most("restarted", "404 at clients", _all("restarted", "not_found"), 0, "answers"),
    _at_most("restarted", "404 at clients, with agents", _all("restarted", "not_found", OURS_AGENTS), 0, "answers"),
    _at_most("killed", "errors at clients", _all("killed", "errors"), 0, "requests"),
    _at_least("throughput", f"requests/s, 2 workers over {VLLM.name}", _rate, 1.2, TIMES),
    _at_most("throughput", "CPU of the router", _median("throughput", "router_cpu_us"), 110, "µs a request"),
    _at_most("throughput", "CPU of 2 workers", _median("throughput", "router_cpu_us", OURS_TWO), 110, "µs a request"),
    _at_most("added", "p50 added", _added, 0.6, "ms"),
    *(
        _at_most(case, "errors at clients", _all(case, "errors"), 0, "requests")
        for case in ("warmth", "two-routers", "template", "throughput", "added")
    ),
)
