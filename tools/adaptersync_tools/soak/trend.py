"""Whether a series grows. Pure.

The slope is the median of the slopes between all pairs of points (Theil and Sen): a quarter of them may be anything.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

POINTS = 120  # of a series, evenly: the pairs are 7,140
BARS = "▁▂▃▄▅▆▇█"

Point = tuple[float, float]  # seconds, value


def slope(points: Sequence[Point]) -> float:
    """What it grows in a second."""
    few = thin(points, POINTS)
    steeps = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for earlier, later in itertools.combinations(few, 2)
        if later[0] > earlier[0]
    ]
    return statistics.median(steeps) if steeps else 0.0


def warm(points: Sequence[Point]) -> list[Point]:
    """Without the first third of its time, in which whatever is kept on purpose fills."""
    if not points:
        return []
    begin = points[0][0] + (points[-1][0] - points[0][0]) / 3
    return [point for point in points if point[0] >= begin]


def growth(points: Sequence[Point]) -> float:
    """How much more it is at the end of these points than at their beginning, by the slope."""
    return slope(points) * (points[-1][0] - points[0][0]) if points else 0.0


def thin(points: Sequence[Point], count: int) -> list[Point]:
    """So many of them, or fewer, evenly; the first and the last among them."""
    if len(points) <= count:
        return list(points)
    step = (len(points) - 1) / (count - 1)
    return [points[round(number * step)] for number in range(count)]


def sparkline(points: Sequence[Point], *, width: int, least: float) -> str:
    """Its course in one line. What varies by less than `least` is not blown up."""
    values = [value for _, value in thin(points, width)]
    if not values:
        return ""
    low = min(values)
    span = max(max(values) - low, least)
    return "".join(BARS[min(int((value - low) / span * len(BARS)), len(BARS) - 1)] for value in values)
