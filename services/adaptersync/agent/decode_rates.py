"""How fast one engine decodes, by how many sequences it decodes at once, from its own counters.

An engine that is slowed down by its batch queues nobody until it may have no more at once: whether it has room is seen
only where its batch was of another size before. Of a look in which the batch changed nothing is kept: its mean would
pass for a size at which the engine was not.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from msgspec import Struct

from adaptersync_core.records import DecodeRate, Decoding
from adaptersync_core.vllm_metrics import RequestTotals

LOOKS = 12  # kept of each size, and of those that say how large the batch is lately
LEAST = 3  # of one size, from which it is told of: one alone may be wrong by what begins and ends in it
KEPT_S = 3600.0  # prompts and answers change while a run trains, and with them what a token costs
STEADY = 1.5  # times the least of what says how large a batch was in a look, to the most


class _Look(Struct, frozen=True, kw_only=True):
    at: float
    batch: float
    tokens: float
    over_s: float


class DecodeRates:
    """Looks by the power of two that is nearest to their batch: as many sizes as there are digits in a batch."""

    def __init__(self) -> None:
        self._last: tuple[RequestTotals, float] | None = None
        self._sizes: dict[int, deque[_Look]] = {}
        self._lately: deque[float] = deque(maxlen=LOOKS)

    def see(self, now: RequestTotals, at: float) -> None:
        """The counters at a moment of the clock; lower ones are of another life of the engine, which knows nothing."""
        last, self._last = self._last, (now, at)
        if last is None:
            return
        before, since = last
        tokens, over_s = now.tokens - before.tokens, at - since
        if tokens < 0 or now.requests < before.requests:
            self._sizes.clear()
            self._lately.clear()
            return
        if tokens == 0 or over_s <= 0:
            return
        batch = (now.tokens_s - before.tokens_s) / over_s
        said = (batch, before.running, now.running)
        if min(said) <= 0 or max(said) > STEADY * min(said):
            return
        looks = self._sizes.setdefault(round(math.log2(batch)), deque(maxlen=LOOKS))
        looks.append(_Look(at=at, batch=batch, tokens=tokens, over_s=over_s))
        self._lately.append(batch)

    def told(self, now: float, *, batch_max: int) -> Decoding:
        rates = []
        for _, looks in sorted(self._sizes.items()):
            kept = [look for look in looks if now - look.at <= KEPT_S]
            if len(kept) >= LEAST:
                over_s = sum(look.over_s for look in kept)
                rates.append(
                    DecodeRate(
                        batch=sum(look.batch * look.over_s for look in kept) / over_s,
                        tokens_per_s=sum(look.tokens for look in kept) / over_s,
                        over_s=over_s,
                    )
                )
        return Decoding(batch=median(self._lately) if rates else 0.0, batch_max=batch_max, rates=tuple(rates))
