"""Waking up: a loop waits for the next event or for its timer, whichever comes first.

Events are hints. A loop that is woken looks at the records; a loop that missed an event looks a little later. So a
follower that loses its place (server restarted, stream gone or set back) just wakes its loop and goes on from the
present end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Container

from adaptersync_core.errors import ControlError, ControlUnavailable
from adaptersync_core.redis import Entry, RedisClient

BLOCK_S = 5.0  # how long one read waits on the server
RETRY_S = 0.5  # pause after the server could not be reached

log = logging.getLogger(__name__)


class Bell:
    """Rung by anybody in this process, waited for by one loop; any number of rings is one wake."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def ring(self) -> None:
        self._rung.set()

    async def wait(self, timeout_s: float) -> bool:
        """True when rung, False when `timeout_s` passed."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._rung.wait()
        except TimeoutError:
            return False
        self._rung.clear()
        return True


async def follow(url: str, stream: str, *, name: str, after: str = "$") -> AsyncGenerator[list[Entry], None]:
    """Batches of entries later than `after`, for ever. An empty batch: the place was lost, look at the records."""
    client = RedisClient.blocking(url, name=name, block_s=BLOCK_S)
    away = False
    try:
        while True:
            try:
                if after == "$":
                    after = await _end(client, stream)
                    away = False
                    yield []
                entries = await client.read_stream(stream, after, block_s=BLOCK_S)
                if entries:
                    after = entries[-1][0]
                    yield entries
                elif _place(await _end(client, stream)) < _place(after):
                    after = "$"  # as where somebody had given it an id of the future, and the stream was mended
            except (ControlUnavailable, ControlError) as error:
                if not away:  # once, not every second until the server is back
                    log.warning("events cannot be followed: %s", error)
                away = True
                after = "$"
                await asyncio.sleep(RETRY_S)
    finally:
        await client.close()


async def _end(client: RedisClient, stream: str) -> str:
    last = await client.command("XREVRANGE", stream, "+", "-", "COUNT", 1)
    return last[0][0] if last else "0-0"


def _place(entry_id: str) -> tuple[int, int]:
    milliseconds, _, number = entry_id.partition("-")
    return int(milliseconds), int(number or 0)


async def ring_on_events(bell: Bell, url: str, stream: str, *, name: str, unless: Container[str] = ()) -> None:
    """Ring `bell` for every batch of events but those of the types in `unless` alone; runs until cancelled."""
    async for entries in follow(url, stream, name=name):
        if not entries or any(fields.get("type") not in unless for _, fields in entries):
            bell.ring()
