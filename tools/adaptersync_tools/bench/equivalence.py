"""Whether two ways of training make the same of a step, within noise. Pure.

A run is one value a step. Two things scatter: steps, because a reward is the mean of some hundred answers; and runs,
because a run that was lucky early stays ahead for a while, which no number of its steps averages away. The error of a
difference is the larger of what either says. With one run of each way only steps say something, and too little.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import fmean, stdev, variance

from msgspec import Struct

from adaptersync_tools.summary import CHANCE_ERRORS, in_errors

Runs = Sequence[Sequence[float]]
THIRDS = 3


class Difference(Struct, frozen=True, kw_only=True):
    """Means of steps `first` to `last`, over all runs; `error` is the standard error of ours less theirs."""

    first: int
    last: int
    ours: float
    theirs: float
    error: float

    @property
    def errors(self) -> float:
        """Ours less theirs, in standard errors."""
        return in_errors(self.ours - self.theirs, self.error)

    @property
    def visible(self) -> float:
        """The least difference that would not have passed as noise."""
        return CHANCE_ERRORS * self.error


def difference(ours: Runs, theirs: Runs, first: int, last: int) -> Difference:
    """Of steps `first` to `last`, counted from 1. Every run has them, and there are as many runs of each."""
    mine, others = ([run[first - 1 : last] for run in runs] for runs in (ours, theirs))
    between = [a - b for left, right in zip(mine, others, strict=True) for a, b in zip(left, right, strict=True)]
    of_steps = stdev(between) / math.sqrt(len(between)) if len(between) > 1 else 0.0
    of_runs = math.hypot(*(_error_of_runs(runs) for runs in (mine, others)))
    return Difference(
        first=first,
        last=last,
        ours=fmean(fmean(run) for run in mine),
        theirs=fmean(fmean(run) for run in others),
        error=max(of_steps, of_runs),
    )


def thirds(ours: Runs, theirs: Runs) -> list[Difference]:
    """Beginning, middle and end; the whole where it is shorter than that."""
    steps = min(len(run) for run in (*ours, *theirs))
    parts = THIRDS if steps >= 2 * THIRDS else 1
    edges = [part * steps // parts for part in range(parts + 1)]
    return [difference(ours, theirs, first + 1, last) for first, last in itertools.pairwise(edges)]


def _error_of_runs(runs: Runs) -> float:
    means = [fmean(run) for run in runs]
    return math.sqrt(variance(means) / len(means)) if len(means) > 1 else 0.0
