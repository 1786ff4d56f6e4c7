"""Beginning a run, asking a server again until it answers, and what its stream of events tells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from adaptersync_core.errors import ControlUnavailable
from adaptersync_core.events import from_fields
from adaptersync_core.registry import Registry


async def insist(call: Callable[[], Awaitable[Any]]) -> tuple[Any, int]:
    """The answer, and how often there was none before."""
    for lost in range(10):
        try:
            return await call(), lost
        except ControlUnavailable:
            continue
    raise AssertionError("never answered")


async def begin(
    registry: Registry, nonce: str = "n1", max_staleness: int = 1, stored: tuple[int, int] = (0, 0)
) -> tuple[int, int]:
    """A trainer begins the run `run`."""
    return await registry.begin_run("run", nonce=nonce, max_staleness=max_staleness, trainer="host", stored=stored)


async def events(registry: Registry) -> list[dict[str, str]]:
    return [fields for _, fields in await registry.client.read_stream(registry.keys.events, "0", count=1000)]


async def kinds(registry: Registry) -> Counter[str]:
    """How many events there are of each kind; each must be readable as one."""
    found = await events(registry)
    for fields in found:
        from_fields(fields)
    return Counter(fields["type"] for fields in found)
