"""What is ordinary in half an hour: replicas that are restarted in order, and agents that die.

Neither may cost a request: a replica drains before its engine ends, and an engine goes on answering without its agent.
The last replica is left alone, and is there for whoever asks meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Literal

import aiohttp
from msgspec import Struct

from adaptersync_core.errors import ControlError
from adaptersync_core.registry import Registry
from adaptersync_tools.supervisor import StackFailed
from adaptersync_tools.up import Stack

Kind = Literal["replica restarted", "agent killed"]
EVERY_S = 240.0  # so many are planned, but two at least
DRAIN_S = 60.0
READ_S = 2.0  # until every router has read a table
LOOK_S = 0.2
_WORK = re.compile(r"^vllm:num_requests_(?:running|waiting)\{[^}]*\} ([\d.e+]+)$", re.MULTILINE)


class Restart(Struct, frozen=True, kw_only=True):
    at_s: float
    kind: Kind
    number: int  # of the replica


def planned(seed: int, *, seconds: float, replicas: int) -> Iterator[Restart]:
    """Evenly, the first of each kind in the first half; none in the last tenth."""
    rng = random.Random(seed)  # noqa: S311 - to be repeated, not to be secret
    count = max(2, round(seconds / EVERY_S))
    kinds: tuple[Kind, Kind] = ("replica restarted", "agent killed")
    for number in range(count):
        at_s = seconds * (0.1 + 0.8 * number / count)
        yield Restart(at_s=round(at_s, 1), kind=kinds[number % 2], number=rng.randrange(replicas - 1))


class Restarter:
    """`done` are those that were carried out, `ordered` counts the ends of services that were ordered here."""

    def __init__(self, stack: Stack, registry: Registry) -> None:
        self._stack = stack
        self._registry = registry
        self.done: list[Restart] = []
        self.ordered: Counter[str] = Counter()

    async def carry_out(self, restart: Restart) -> None:
        agent = f"agent-{restart.number}"
        if restart.kind == "agent killed":
            async with self._away(agent, signal.SIGKILL):
                pass
        else:
            async with self._away(agent, signal.SIGTERM):
                await self._drained(f"replica-{restart.number}")
                async with self._away(f"engine-{restart.number}", signal.SIGTERM):
                    pass
        self.done.append(restart)

    @contextlib.asynccontextmanager
    async def _away(self, service: str, number: int) -> AsyncIterator[None]:
        self.ordered[service] += 1
        with contextlib.ExitStack() as stack:
            await asyncio.to_thread(stack.enter_context, self._stack.supervisor.away(service, number))
            yield

    async def _drained(self, replica: str) -> None:
        """Nobody is sent to it any more, and what was has been answered."""
        deadline = time.monotonic() + DRAIN_S
        async with aiohttp.ClientSession() as session:
            while await self._busy(session, replica):
                if time.monotonic() > deadline:
                    raise StackFailed("replica does not drain", next_step="see its agent's log", replica=replica)
                await asyncio.sleep(LOOK_S)

    async def _busy(self, session: aiohttp.ClientSession, replica: str) -> bool:
        with contextlib.suppress(ControlError):
            if replica in (await self._registry.table()).ready():
                return True
            await asyncio.sleep(READ_S)
            async with session.get(f"{self._stack.engine_urls[replica]}/metrics") as answer:
                return any(float(count) for count in _WORK.findall(await answer.text()))
        return True
