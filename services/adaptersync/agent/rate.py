"""How fast one engine prefills, from its own counters, told to the routers by the cache server.

Two measures are both too small, so the larger one counts: what a request's prefill took is too long where several
shared a step, and what was computed in a second of the clock is too little while the engine had time to spare. Each is
an average over the latest looks. A look since which little was computed says nothing: a step takes its time, however
short a prompt is. An engine that was not busy keeps the rate it had, and so does, until it is measured, one that began
anew.
"""

from __future__ import annotations

import asyncio
import logging
import time

from adaptersync_core.errors import AdapterSyncError
from adaptersync_core.keys import QUEUES_TTL_S, Keys
from adaptersync_core.ranks import rank_names, told_apart
from adaptersync_core.redis import RedisClient
from adaptersync_core.vllm import VllmClient
from adaptersync_core.vllm_metrics import Prefills

LOOK_S = 5.0  # between two looks
KEEP = 0.8  # of what was known, at the next look that says something: ten of them are nearly all that counts
LEAST = 1024  # tokens computed between two looks, below which they say nothing
LEAST_EACH = 128  # tokens computed for a request on average, below which steps were measured instead

log = logging.getLogger(__name__)


class Rate:
    """Tokens a second; 0 as long as nothing is known."""

    def __init__(self) -> None:
        self._last: tuple[Prefills, float] | None = None
        self._by_requests = (0.0, 0.0)  # tokens and seconds
        self._by_clock = (0.0, 0.0)

    @property
    def tokens_per_s(self) -> int:
        measures = [tokens / seconds for tokens, seconds in (self._by_requests, self._by_clock) if seconds > 0]
        return round(max(measures, default=0.0))

    def see(self, now: Prefills, at: float) -> None:
        """The counters at a moment of the clock."""
        last, self._last = self._last, (now, at)
        if last is None:
            return
        before, since = last
        computed, requests = now.computed - before.computed, now.requests - before.requests
        tokens, seconds = now.tokens - before.tokens, now.seconds - before.seconds
        if min(requests, tokens, seconds, computed) < 0:  # another life of the engine
            self._by_requests = self._by_clock = (0.0, 0.0)
            return
        if computed >= LEAST:
            self._by_clock = _later(self._by_clock, computed, at - since)
        if tokens >= max(LEAST, requests * LEAST_EACH):
            self._by_requests = _later(self._by_requests, tokens * now.ranks, seconds)


def _later(known: tuple[float, float], tokens: float, seconds: float) -> tuple[float, float]:
    return known[0] * KEEP + tokens, known[1] * KEEP + seconds


async def tell_rate(engine: VllmClient, cache: RedisClient, keys: Keys, *, replica: str) -> None:
    """Measure and tell; runs until cancelled. What is not told is taken as usual by the routers.

    Of several ranks each is taken to do as much as the others.
    """
    rate, names = Rate(), rank_names(replica, 1)
    while True:
        try:
            prefills = await engine.prefills()
            if prefills is not None:
                rate.see(prefills, time.monotonic())
                names = rank_names(replica, told_apart(prefills.ranks))
            if each := rate.tokens_per_s // len(names):
                fields = [part for name in names for part in (f"{name}|", each)]
                await cache.command("HSET", keys.queues, *fields)
                await cache.command("EXPIRE", keys.queues, QUEUES_TTL_S, "NX")
        except AdapterSyncError as error:
            log.debug("rate not told: %s", error)
        await asyncio.sleep(LOOK_S)
