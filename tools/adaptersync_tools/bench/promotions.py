"""What promotions cost a fleet that generates, from token streams and the times of what happened. Pure.

Two shares answer two questions. *Over a step*: tokens of a whole window in which versions were published, by those of
the steady windows beside it; what a training run loses. *Under way*: tokens a second from the call of `publish` to the
moment the version is current, by those of the same steady windows; what a promotion costs while it lasts.

A third figure does not depend on who else wants the machine: the engines' CPU time for one token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Literal

from msgspec import Struct

from adaptersync_core.events import PHASES
from adaptersync_tools.bench.gaps import (
    Span,
    Spread,
    TokenStream,
    before,
    longest_gap,
    rate,
    share,
    spread,
    tokens_in,
    within,
)
from adaptersync_tools.bench.result import Figure

Kind = Literal["steady", "paced", "back to back"]
ENGINE = "engine"
WITH_TOKENS = (ENGINE, "router", "bench", "others")  # roles whose CPU time follows the tokens, or is not ours


class Window(Struct, frozen=True, kw_only=True):
    """`paced` has one publication, at its beginning; `back to back` one after the other; `steady` none.

    `spent` is CPU seconds by role.
    """

    kind: Kind
    span: Span
    spent: dict[str, float] = {}


class Experiment(Struct, frozen=True, kw_only=True):
    """One thing done to one engine under load: a load, a proof, a commissioning, an unload."""

    what: str
    replica: str
    span: Span


class Promotions(Struct, frozen=True, kw_only=True):
    """The windows of one kind; `busy` is the part of them in which a promotion was under way.

    `engine_cpu` is the engines' CPU time for a token by that of the neighbours; `cpu_s` what else one promotion took,
    by role.
    """

    kind: Kind
    promotions: int
    promotion_s: float
    busy: float
    tokens_per_s: float
    steady_tokens_per_s: float
    over_step: Spread
    under_way: Spread | None
    engine_cpu: Spread | None
    cpu_s: dict[str, float]


def gap_figures(experiments: Iterable[Experiment], streams: Sequence[TokenStream]) -> list[Figure]:
    """The longest gap in the answers of the replica, while each thing was done and in as long a time before it."""
    grouped: dict[tuple[str, str], list[Span]] = {}
    for experiment in experiments:
        grouped.setdefault((experiment.replica, experiment.what), []).append(experiment.span)
    figures = []
    for (replica, what), spans in sorted(grouped.items()):
        mine = [stream for stream in streams if stream.replica == replica]
        steady = Figure.of(f"{replica}, before {what}", [longest_gap(mine, before(span)) for span in spans])
        known = steady if steady.p50_s else None  # 0 when it was too short for a token
        during = [longest_gap(mine, span) for span in spans]
        figures += [steady, Figure.of(f"{replica}, {what}", during, against=known)]
    return figures


def compare(
    kind: Kind, windows: Sequence[Window], promotions: Sequence[Span], streams: Sequence[TokenStream]
) -> Promotions:
    """`windows` in the order of time: a steady one at each end, and beside every other one."""
    rates = [rate(streams, [window.span]) for window in windows]
    chosen = [index for index, window in enumerate(windows) if window.kind == kind]
    whole = [windows[index].span for index in chosen]
    begun = [span for span in promotions if any(window[0] <= span[0] < window[1] for window in whole)]
    busy = [within(promotions, window) for window in whole]
    neighbours = [(rates[index - 1], rates[index + 1]) for index in chosen]
    under_way = [share(rate(streams, spans), *beside) for spans, beside in zip(busy, neighbours, strict=True) if spans]
    return Promotions(
        kind=kind,
        promotions=len(begun),
        promotion_s=median(ended - began for began, ended in begun) if begun else 0.0,
        busy=_length(span for spans in busy for span in spans) / _length(whole),
        tokens_per_s=rate(streams, whole),
        steady_tokens_per_s=sum(map(sum, neighbours)) / (2 * len(neighbours)),
        over_step=spread([share(rates[index], *beside) for index, beside in zip(chosen, neighbours, strict=True)]),
        under_way=spread(under_way) if under_way else None,
        engine_cpu=_engine_cpu(windows, chosen, streams),
        cpu_s=_cpu(windows, chosen, len(begun)),
    )


def _engine_cpu(windows: Sequence[Window], chosen: Sequence[int], streams: Sequence[TokenStream]) -> Spread | None:
    each = [
        window.spent.get(ENGINE, 0.0) / tokens if (tokens := tokens_in(streams, window.span)) else 0.0
        for window in windows
    ]
    ratios = [share(each[index], each[index - 1], each[index + 1]) for index in chosen if each[index - 1]]
    return spread(ratios) if ratios else None


def _cpu(windows: Sequence[Window], chosen: Sequence[int], promotions: int) -> dict[str, float]:
    """More than in as much time of the neighbours, of what does not grow with the tokens."""
    more: dict[str, float] = {}
    for index in chosen:
        length = _length([windows[index].span])
        for role, spent in windows[index].spent.items():
            if role not in WITH_TOKENS:
                beside = [
                    windows[index + side].spent.get(role, 0.0) / _length([windows[index + side].span])
                    for side in (-1, 1)
                ]
                more[role] = more.get(role, 0.0) + spent - length * sum(beside) / 2
    return {role: spent / promotions for role, spent in more.items()} if promotions else {}


def _length(spans: Iterable[Span]) -> float:
    return sum(ended - began for began, ended in spans)


def phases(events: Iterable[Mapping[str, str]]) -> dict[str, dict[str, float]]:
    """Median seconds of each phase by replica, from the acknowledgements among the events."""
    told: dict[str, dict[str, list[float]]] = {}
    for event in events:
        if event.get("type") == "replica.acked":
            mine = told.setdefault(event["replica"], {})
            for phase in PHASES:
                if phase in event:
                    mine.setdefault(phase, []).append(float(event[phase]))
    return {
        replica: {phase: median(values) for phase, values in mine.items()} for replica, mine in sorted(told.items())
    }
