"""Replicas without engines: they say what agents say, through the real registry, and answer what routers send.

For as many replicas as no one machine runs. Each has its own heartbeat and its own acks; looking at the table is done
once for all, because hundreds of agents live on hundreds of hosts and would not share two cores.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from typing import Self

from aiohttp import web

from adaptersync_core.bus import Bell, ring_on_events
from adaptersync_core.config import Config
from adaptersync_core.events import REPORTS
from adaptersync_core.keys import Keys
from adaptersync_core.proof import Proof
from adaptersync_core.records import Ack, ReplicaReport
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from adaptersync_tools.engines import HOST

SLOTS = 8
AT_ONCE = 16  # calls on their way: a fleet's acks come close together, not all in one instant
PHASES = {
    "staged_s": 0.1,
    "verified_s": 0.01,
    "loaded_s": 0.05,
    "proved_s": 0.05,
}  # of no account; as long as real ones


class LightFleet:
    """Replicas of one process: it is busy with all of them, so the server's clock tells better when each has spoken.

    `urls` are where they answer, if it is not here.
    """

    def __init__(self, config: Config, replicas: int, *, urls: Sequence[str] = ()) -> None:
        self._config = config
        self._client = RedisClient(config.redis.control_url, name="light-replicas")
        self.registry = Registry(self._client, Keys(config.group.name))
        self._names = [f"replica-{number}" for number in range(replicas)]
        self._urls = dict(zip(self._names, urls, strict=True)) if urls else {}
        self._held: tuple[str, ...] = ()
        self._wanted: list[str] = []
        self._room = asyncio.Semaphore(AT_ONCE)
        self._may_ack = asyncio.Event()
        self._bell = Bell()
        self._exit = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._client.close)
            if not self._urls:
                self._urls = dict.fromkeys(self._names, await stack.enter_async_context(_upstream()))
            group = await stack.enter_async_context(asyncio.TaskGroup())
            url, events = self._config.redis.control_url, self.registry.keys.events
            loops = [
                ring_on_events(self._bell, url, events, name="light-replicas", unless=REPORTS),
                self._follow(),
                *(self._beat(name, place / len(self._names)) for place, name in enumerate(self._names)),
            ]
            for task in [group.create_task(loop) for loop in loops]:
                stack.callback(task.cancel)
            self._exit = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._exit.aclose()

    def hold_acks(self) -> None:
        """Load what is wanted, and do not say so before `release_acks`."""
        self._may_ack.clear()

    def release_acks(self) -> None:
        self._may_ack.set()

    async def _beat(self, name: str, phase: float) -> None:
        """Heartbeats of the fleet are spread over their interval."""
        await self._report(name)
        await asyncio.sleep(phase * self._config.agent.heartbeat_s)
        while True:
            await self._report(name)
            await asyncio.sleep(self._config.agent.heartbeat_s)

    async def _report(self, name: str) -> None:
        report = ReplicaReport(
            url=self._urls[name],
            base_model=self._config.group.base_model,
            engine_epoch=f"life-of-{name}",
            max_loras=SLOTS,
            max_cpu_loras=SLOTS,
            max_lora_rank=64,
            block_size=16,
            loaded=self._held,
            engine="none",
            host="bench",
        )
        async with self._room:
            await self.registry.report_replica(name, report)

    async def _follow(self) -> None:
        while True:
            table = await self.registry.table()
            wanted = table.wanted()
            fresh = [name for name in wanted if name not in self._held]
            gone = [name for name in self._held if name not in wanted]
            self._held = tuple(wanted)
            for version in fresh:
                await self._may_ack.wait()
                ack = self._ack
                await self._all(ack(name, version) for name in self._names)
            if gone:
                await self._all(self._unloaded(name, gone) for name in self._names)
            await self._bell.wait(self._config.agent.heartbeat_s)

    async def _ack(self, name: str, version: str) -> None:
        ack = Ack(accepted=True, engine_epoch=f"life-of-{name}", proof=Proof(verdict="proved"), phases=PHASES)
        async with self._room:
            await self.registry.ack(name, version, ack)

    async def _unloaded(self, name: str, versions: list[str]) -> None:
        async with self._room:
            await self.registry.forget_acks(name, versions)
        await self._report(name)

    async def _all(self, calls: Iterable[Awaitable[None]]) -> None:
        await asyncio.gather(*calls)


@contextlib.asynccontextmanager
async def _upstream() -> AsyncIterator[str]:
    """What all replicas' addresses lead to: answers at once."""

    async def complete(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({"choices": [{"text": "", "index": 0, "finish_reason": "length"}]})

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, HOST, 0)
        await site.start()
        yield f"http://{HOST}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
