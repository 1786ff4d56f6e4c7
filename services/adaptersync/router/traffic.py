"""What a router process has done since it began, in the few numbers that whoever watches the fleet adds up. No I/O.

Unlike the metrics they are kept by nothing that comes and goes, and they go with each report: sums never fall while the
process lives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from adaptersync_core.ranks import split
from adaptersync_core.records import Traffic
from adaptersync_core.rollouts import Row


class Counts:
    def __init__(self) -> None:
        self._ended: Counter[str] = Counter()
        self._routed: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    def ended(self, row: Row) -> None:
        """A request is over."""
        self._ended[row.outcome] += 1
        if row.routing:
            self._routed[row.routing] += 1
        tokens = self._tokens
        tokens["prompt"] += row.prompt_tokens or 0
        tokens["cached"] += row.cached_tokens or 0
        tokens["completion"] += row.completion_tokens or 0

    def report(self, inflight: Mapping[str, int]) -> Traffic:
        """With what is in flight, by replica or rank of one; ranks are added up."""
        at: Counter[str] = Counter()
        for name, count in inflight.items():
            at[split(name)[0]] += count
        return Traffic(ended=dict(self._ended), routed=dict(self._routed), tokens=dict(self._tokens), at=dict(at))
