"""A fleet of two replicas, a table, and a router in front of it, on real Redis servers."""

from __future__ import annotations

import contextlib
import io
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from adaptersync.router.app import serving
from adaptersync.router.policy import Policy
from adaptersync_core.config import Config, GroupSection, RedisSection, RouterSection
from adaptersync_core.keys import Keys
from adaptersync_core.redis import RedisClient
from adaptersync_core.rollouts import OPEN, Row, decode, join
from adaptersync_core.table import LiveState
from adaptersync_tools.servers import RedisServer
from support.ledger_rows import as_text
from support.tables import TableWriter, version_name
from support.upstreams import Upstream, upstream
from support.wait import wait_until

PROGRAM = """
import sys
from adaptersync.router.app import run_router
from adaptersync_core.config import load_config
run_router(load_config(overrides=dict(zip(sys.argv[1::2], sys.argv[2::2]))))
"""

V1, V2, V3 = version_name(1), version_name(2), version_name(3)


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def message(self) -> str:
        return str(self.json["error"]["message"])


@dataclass
class Fleet:
    """Replicas, the servers' clients and what a test needs to play with them."""

    control_url: str
    cache_url: str
    keys: Keys
    control: RedisClient
    cache: RedisClient
    tables: TableWriter
    replicas: dict[str, Upstream]
    session: aiohttp.ClientSession
    spool: Path
    url: str = ""
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def urls(self) -> dict[str, str]:
        return {name: replica.url for name, replica in self.replicas.items()}

    async def table(self, versions: Mapping[str, LiveState], **more: Any) -> int:
        """Write a table and wait until the router serves it."""
        generation = await self.tables.write(versions, more.pop("urls", self.urls), **more)
        if self.url:
            await wait_until(lambda: self._serves(generation), what=f"router serves generation {generation}")
        return generation

    async def _serves(self, generation: int) -> bool:
        health = await self.get("/health")
        return bool(health.json["table"]["generation"] == generation)

    @contextlib.asynccontextmanager
    async def router(
        self,
        *,
        group: str = "test",
        policy: Policy = "promise",
        blocks: Mapping[str, int] | None = None,
        **settings: Any,
    ) -> AsyncIterator[str]:
        """`blocks`: bounds of the group, by the end of their name."""
        bounds = {f"blocks_{name}": bound for name, bound in (blocks or {}).items()}
        config = Config(
            group=GroupSection(name=group, base_model="base", policy=policy, **bounds),
            redis=RedisSection(control_url=self.control_url, cache_url=self.cache_url),
            router=RouterSection(**self.settings | {"port": 0, "hold_s": 50.0, "connect_timeout_s": 1.0} | settings),
        )
        async with serving(config, drain_s=2.0) as router:
            self.url = router.url
            yield router.url
        self.url = ""

    async def get(self, path: str, *, url: str = "") -> Answer:
        async with self.session.get((url or self.url) + path) as answer:
            return Answer(answer.status, answer.headers, await answer.read())

    async def post(self, path: str, body: object, *, url: str = "", **more: Any) -> Answer:
        sent = {"data": io.BytesIO(body)} if isinstance(body, bytes) else {"json": body}
        async with self.session.post((url or self.url) + path, **sent, **more) as answer:
            return Answer(answer.status, answer.headers, await answer.read())

    async def complete(self, model: str, prompt: object = (1, 2, 3), *, url: str = "", **fields: Any) -> Answer:
        return await self.post("/v1/completions", {"model": model, "prompt": prompt} | fields, url=url)

    @property
    def settings(self) -> dict[str, Any]:
        """What every router here needs."""
        return {"spool_path": str(self.spool.parent), "spool_bytes": 1 << 20, "kept_bytes": 1 << 20}

    async def entries(self) -> list[dict[str, str]]:
        """The ledger's stream, each value as text."""
        return [as_text(fields) for _, fields in await self.control.read_stream(self.keys.rollouts, "0", count=100_000)]

    async def joined(self) -> list[Row]:
        """The ledger as its readers have it."""
        entries = await self.control.read_stream(self.keys.rollouts, "0", count=100_000)
        return join(decode(fields) for _, fields in entries)

    async def rows(self, count: int) -> list[dict[str, str]]:
        """What ended, once it is `count` rows; more are a failure."""

        async def ended() -> list[dict[str, str]]:
            return [fields for fields in await self.entries() if fields["outcome"] != OPEN]

        async def enough() -> bool:
            return len(await ended()) >= count

        await wait_until(enough, what=f"{count} ledger rows")
        rows = await ended()
        assert len(rows) == count
        return rows

    async def counts(self) -> dict[str, int]:
        """In-flight counts in Redis, leases left out."""
        flat = await self.cache.command("HGETALL", self.keys.inflight)
        return {name: int(value) for name, value in flat.items() if not name.endswith("|")}


@contextlib.asynccontextmanager
async def make_fleet(control_url: str, cache_url: str, directory: Path) -> AsyncIterator[Fleet]:
    keys = Keys("test")
    async with contextlib.AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(upstream(f"replica-{place}")) for place in range(2)]
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        control, cache = RedisClient(control_url, name="test"), RedisClient(cache_url, name="test")
        stack.push_async_callback(control.close)
        stack.push_async_callback(cache.close)
        yield Fleet(
            control_url=control_url,
            cache_url=cache_url,
            keys=keys,
            control=control,
            cache=cache,
            tables=TableWriter(control, keys),
            replicas={replica.name: replica for replica in replicas},
            session=session,
            spool=directory / "spool" / "test",  # its group's
        )


@dataclass
class Servers:
    """Two servers of a test's own, to be killed."""

    control: RedisServer
    cache: RedisServer


@contextlib.contextmanager
def router_process(fleet: Fleet, port: int, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    settings = {
        "group.name": "test",
        "redis.control_url": fleet.control_url,
        "redis.cache_url": fleet.cache_url,
        "router.port": str(port),
        **{f"router.{name}": str(value) for name, value in (fleet.settings | more).items()},
    }
    arguments = [part for item in settings.items() for part in item]
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
