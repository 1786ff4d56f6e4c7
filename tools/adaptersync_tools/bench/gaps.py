"""Arithmetic of token streams: gaps between tokens, rates in windows, and ratios of neighbouring windows. Pure.

Times are seconds on one monotonic clock. A gap belongs to a time when the two overlap at all: a stream that stood
still across the end of a load has its whole gap counted as the load's.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from math import sqrt
from statistics import fmean, median, stdev

from msgspec import Struct

Span = tuple[float, float]  # from, until


class TokenStream(Struct, kw_only=True):
    """One answer as its reader saw it: when each piece came, and how many tokens had come by then."""

    replica: str
    version: str = ""
    at: list[float] = []
    tokens: list[int] = []


class Spread(Struct, frozen=True, kw_only=True):
    """Several measurements of one thing; `error` is the mean's standard error, 0 where there is only one."""

    count: int
    mean: float
    error: float
    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    error = stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
    return Spread(
        count=len(values), mean=fmean(values), error=error, median=median(values), low=min(values), high=max(values)
    )


def longest_gap(streams: Iterable[TokenStream], span: Span) -> float:
    """The longest time between two successive tokens of one answer that overlaps `span`; 0 when nothing was read."""
    began, ended = span
    longest = 0.0
    for stream in streams:
        at = stream.at
        first = max(bisect_left(at, began), 1)
        last = min(bisect_right(at, ended), len(at) - 1)
        for index in range(first, last + 1):
            longest = max(longest, at[index] - at[index - 1])
    return longest


def tokens_in(streams: Iterable[TokenStream], span: Span) -> int:
    """Tokens that came after the begin of `span` and not after its end."""
    return sum(_until(stream, span[1]) - _until(stream, span[0]) for stream in streams)


def _until(stream: TokenStream, moment: float) -> int:
    came = bisect_right(stream.at, moment)
    return stream.tokens[came - 1] if came else 0


def rate(streams: Sequence[TokenStream], spans: Sequence[Span]) -> float:
    """Tokens a second over all of `spans`, which do not overlap; 0 when they have no length."""
    length = sum(ended - began for began, ended in spans)
    return sum(tokens_in(streams, span) for span in spans) / length if length > 0 else 0.0


def within(spans: Iterable[Span], window: Span) -> list[Span]:
    """What of `spans` lies in `window`."""
    cut = [(max(began, window[0]), min(ended, window[1])) for began, ended in spans]
    return [(began, ended) for began, ended in cut if began < ended]


def before(span: Span) -> Span:
    """The time of equal length that ends where `span` begins: what a longest gap is fairly compared with."""
    began, ended = span
    return (2 * began - ended, began)


def share(rate_within: float, rate_before: float, rate_after: float) -> float:
    """A window's rate by the mean of its neighbours': what drifts steadily cancels."""
    return 2 * rate_within / (rate_before + rate_after)
