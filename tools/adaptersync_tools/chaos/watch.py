"""Reads the events in their order, and loses none of them: not even where what is read is about to be destroyed.

The history it keeps is that of an outside observer. It goes on across a Redis that is emptied or set back, so that what
comes twice, or back, is seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from adaptersync_core.errors import ControlError
from adaptersync_core.events import from_fields
from adaptersync_core.keys import Keys
from adaptersync_core.redis import Entry, RedisClient
from adaptersync_tools.chaos.history import History, Violation
from adaptersync_tools.chaos.names import Names

PAGE = 1000
LOOK_S = 0.2
WRITES_STOP_MS = 10_000  # for what is read before a server is set back; it is over when the server is gone


class Watch:
    """`seen` counts events by type, `versions` what became of versions."""

    def __init__(
        self, client: RedisClient, keys: Keys, history: History, names: Names, found: Callable[[Violation], None]
    ) -> None:
        self._client = client
        self._keys = keys
        self._history = history
        self._names = names
        self._found = found
        self._after = "0"
        self._news = asyncio.Event()
        self._reading = asyncio.Lock()
        self.seen: Counter[str] = Counter()
        self.versions: Counter[str] = Counter()

    async def read(self) -> bool:
        """Take in what came since; False when nothing did."""
        async with self._reading:
            entries = await self._client.read_stream(self._keys.events, self._after, count=PAGE)
            self._take(entries)
        return bool(entries)

    async def flush_control(self) -> None:
        """Empty the server in the same instant in which the last events are read."""
        async with self._reading:
            while True:
                entries = await self._client.read_stream(self._keys.events, self._after, count=PAGE)
                self._take(entries)
                if not entries:
                    break
            read = ("XREAD", "COUNT", PAGE, "STREAMS", self._keys.events, self._after)
            reply, _ = await self._client.pipeline([read, ("FLUSHALL",)])
            self._take([(entry_id, fields or {}) for _, entries in reply or [] for entry_id, fields in entries])
            self._history.lost()

    @contextlib.asynccontextmanager
    async def before_it_is_set_back(self) -> AsyncIterator[None]:
        """Nothing is written any more, and everything was read; the context sets the server back."""
        async with self._reading:
            await self._client.command("CLIENT", "PAUSE", WRITES_STOP_MS, "WRITE")
            while entries := await self._client.read_stream(self._keys.events, self._after, count=PAGE):
                self._take(entries)
            yield
            self._history.lost()

    async def step(self, event: str, limit_s: float) -> str:
        """Wait for the next event of that kind; "" when none came in time."""
        before = self.seen[event]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s if event else 0):
                while self.seen[event] == before:
                    await self.anything()
                return event
        return ""

    async def anything(self) -> None:
        """Wait for any event."""
        self._news.clear()
        await self._news.wait()

    def _take(self, entries: list[Entry]) -> None:
        for entry_id, fields in entries:
            self._after = entry_id
            event = from_fields(fields)
            for violation in self._history.add(float(entry_id.partition("-")[0]), event):
                self._found(violation)
            if fields["type"] == "adapter.published":
                for what in self._names.add("an event", fields["version"], fields["digest"]):
                    self._found(Violation(kind="identity", what=what, at=time.time()))
            self.seen[fields["type"]] += 1
            if fields["type"].startswith(("version.", "adapter.")):
                self.versions[fields["type"].partition(".")[2]] += 1
        if entries:
            self._news.set()


async def insist(call: Callable[[], Awaitable[Any]], limit_s: float) -> bool:
    """Repeat a call while Redis is away; False when it stays away."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            await call()
        except ControlError:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(LOOK_S)
        else:
            return True
