"""What the latest requests of one engine spent in its queue, prefilling and decoding, from its own counters.

vLLM tells it of no single request, and under no adapter's name; so it is kept by replica, as sums over a time in which
requests ended. A look at which none did says nothing and makes nothing older: what a run came to can still be read when
it is over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque

from adaptersync.agent.decode_rates import DecodeRates
from adaptersync_core.errors import AdapterSyncError
from adaptersync_core.records import RequestTimes
from adaptersync_core.vllm import VllmClient
from adaptersync_core.vllm_metrics import RequestTotals

LOOK_S = 5.0  # between two looks
LOOKS = 12  # of those at which requests had ended: a minute of a busy engine

log = logging.getLogger(__name__)


class LatestTimes:
    """The latest looks, each as what came since the one before it."""

    def __init__(self) -> None:
        self._last: tuple[RequestTotals, float] | None = None
        self._parts: deque[RequestTimes] = deque(maxlen=LOOKS)

    def see(self, now: RequestTotals, at: float) -> None:
        """The counters at a moment of the clock; lower ones are of another life of the engine, which knows nothing."""
        last, self._last = self._last, (now, at)
        if last is None:
            return
        before, since = last
        if now.requests < before.requests:
            self._parts.clear()
        elif now.requests > before.requests:
            self._parts.append(
                RequestTimes(
                    requests=round(now.requests - before.requests),
                    over_s=at - since,
                    queue_s=now.queue_s - before.queue_s,
                    prefill_s=now.prefill_s - before.prefill_s,
                    decode_s=now.decode_s - before.decode_s,
                )
            )

    def told(self) -> RequestTimes:
        parts = self._parts
        return RequestTimes(
            requests=sum(part.requests for part in parts),
            over_s=sum(part.over_s for part in parts),
            queue_s=sum(part.queue_s for part in parts),
            prefill_s=sum(part.prefill_s for part in parts),
            decode_s=sum(part.decode_s for part in parts),
        )


async def watch(engine: VllmClient, latest: LatestTimes, rates: DecodeRates) -> None:
    """Look again and again; runs until cancelled. An engine that is away, or does not count, is told nothing of."""
    while True:
        try:
            totals = await engine.request_totals()
            if totals is not None:
                at = time.monotonic()
                latest.see(totals, at)
                rates.see(totals, at)
        except AdapterSyncError as error:
            log.debug("engine's counters not read: %s", error)
        await asyncio.sleep(LOOK_S)
