"""Who is told of events as they come. Bounded: so many at once, and so much that one may be behind; a slower one is
dropped, and comes again with the last event that it had. Knows nothing of HTTP but what an event stream's lines are.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

import msgspec

from adaptersync.coordinator.overview import line
from adaptersync.coordinator.recent import Happened

BEHIND = 512  # events that one may have to read yet


class Listener:
    """One that is told."""

    def __init__(self, behind: int) -> None:
        self.dropped = False
        self._behind = behind
        self._waiting: deque[bytes] = deque()
        self._more = asyncio.Event()

    def put(self, message: bytes) -> None:
        if self.dropped:
            return
        if len(self._waiting) >= self._behind:
            self.drop()
            return
        self._waiting.append(message)
        self._more.set()

    def drop(self) -> None:
        self.dropped = True
        self._waiting.clear()
        self._more.set()

    async def take(self, timeout_s: float) -> bytes:
        """All that waits, as soon as something does; nothing when `timeout_s` passed, or when it was dropped."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._more.wait()
        except TimeoutError:
            return b""
        self._more.clear()
        taken = b"".join(self._waiting)
        self._waiting.clear()
        return taken


class Streams:
    def __init__(self, most: int, *, behind: int = BEHIND) -> None:
        self.listeners: set[Listener] = set()
        self._most = most
        self._behind = behind

    def join(self, missed: Iterable[Happened] = ()) -> Listener | None:
        """A listener that begins with what it `missed`; None when there are as many as may be."""
        if len(self.listeners) >= self._most:
            return None
        listener = Listener(self._behind)
        self.listeners.add(listener)
        for event in missed:
            listener.put(message(event))
        return listener

    def leave(self, listener: Listener) -> None:
        self.listeners.discard(listener)

    def tell(self, news: Iterable[Happened]) -> None:
        for event in news:
            said = message(event)
            for listener in self.listeners:
                listener.put(said)

    def end(self) -> None:
        """Everybody is to go."""
        for listener in self.listeners:
            listener.drop()


def message(event: Happened) -> bytes:
    """One event of a `text/event-stream`; JSON has no line ends of its own."""
    return b"id: %s\ndata: %s\n\n" % (event.id.encode(), msgspec.json.encode(line(event)))
