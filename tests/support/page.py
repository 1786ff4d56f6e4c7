"""A coordinator's page on a real server, with a fleet of two replicas of which one refused a version."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from adaptersync.coordinator.page.server import Page
from adaptersync_core.config import Config, CoordinatorSection, GroupSection, PageSection, RedisSection
from adaptersync_core.events import ReplicaState, to_fields
from adaptersync_core.keys import Keys
from adaptersync_core.proof import Proof
from adaptersync_core.records import Ack, ReplicaReport, RouterReport, Traffic
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from support.tables import TableWriter, version_name
from support.wait import wait_until

V1, V2 = version_name(1), version_name(2)
HOSTILE = "<img src=x onerror=\"document.title='hit'\"> & <script>document.title='hit'</script>"


@dataclass
class Served:
    """A page at `url`, and the registry beside it."""

    url: str
    page: Page
    config: Config
    registry: Registry
    tables: TableWriter
    session: aiohttp.ClientSession

    async def get(self, path: str, **more: Any) -> tuple[int, Any]:
        async with self.session.get(self.url + path, **more) as answer:
            return answer.status, await answer.json()

    async def happen(self, reason: str, replica: str = "replica-1") -> str:
        event = ReplicaState(replica=replica, state="ejected", generation=1, reason=reason)
        entry: str = await self.registry.client.command("XADD", self.registry.keys.events, "*", *to_fields(event))
        return entry


Serve = Callable[..., contextlib.AbstractAsyncContextManager[Served]]


def server_of(redis_url: str) -> Serve:
    """serve(**settings of the page), a context in which it is served."""

    @contextlib.asynccontextmanager
    async def serve(**settings: Any) -> AsyncIterator[Served]:
        config = Config(
            group=GroupSection(name="group"),
            redis=RedisSection(control_url=redis_url),
            coordinator=CoordinatorSection(name="coordinator-1"),
            page=PageSection(**settings),
        )
        client = RedisClient(redis_url, name="test")
        registry = Registry(client, Keys("group"))
        page = Page(config, registry)
        runner = page.runner()
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            async with aiohttp.ClientSession() as session:
                url = f"http://127.0.0.1:{runner.addresses[0][1]}"
                yield Served(url, page, config, registry, TableWriter(client, registry.keys), session)
        finally:
            await runner.cleanup()
            await client.close()

    return serve


async def fill(registry: Registry, tables: TableWriter) -> None:
    """Two replicas, two versions, a router, and somebody who leads."""
    await tables.write(
        {V1: "retained", V2: "current"},
        {"replica-0": "http://a", "replica-1": "http://b"},
        members={"replica-1": {"state": "ejected", "reason": HOSTILE}},
    )
    for name in ("replica-0", "replica-1"):
        report = ReplicaReport(
            url=f"http://{name}", base_model="base", engine_epoch=f"{name}-life-1", max_loras=4, max_cpu_loras=8,
            max_lora_rank=8, block_size=16, loaded=(V1, V2),
        )  # fmt: skip
        await registry.report_replica(name, report)
        for version in (V1, V2):
            fine = name == "replica-0" or version == V1
            await registry.ack(
                name,
                version,
                Ack(
                    accepted=fine,
                    engine_epoch=f"{name}-life-1",
                    proof=Proof(verdict="proved" if fine else "refuted"),
                    reason="" if fine else HOSTILE,
                ),
            )
    traffic = Traffic(ended={"ok": 10}, routed={"cold": 10}, tokens={"prompt": 100}, at={"replica-0": 3})
    await registry.report_router("router-0", RouterReport(generation=1, url="http://r", traffic=traffic))
    await registry.lead("coordinator-0", "term", lease_s=60.0)


async def populate(served: Served) -> None:
    """The same, and the page has seen it."""
    await fill(served.registry, served.tables)

    async def shown() -> bool:
        _, told = await served.get("/api/fleet")
        return bool(told["leader"])

    await wait_until(shown, what="the page has looked again")
