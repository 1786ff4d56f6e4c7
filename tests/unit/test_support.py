"""The instruments themselves: a fault proxy that does not lose anything would make its users' tests empty."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import click
import pytest
import redis.asyncio
import redis.exceptions
from aiohttp import web
from blockbuster import BlockBuster, BlockingError
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from adaptersync_core.keys import ROUTER_TTL_S, Keys
from adaptersync_tools.servers import Role
from support import surface
from support.proxy import Fault, FaultProxy
from support.redis_servers import RedisServers, objection
from support.wait import wait_until, wait_until_sync

pytestmark = pytest.mark.foreign_keys("tests of the instruments")


@pytest.fixture
async def proxy(redis_url: str) -> AsyncIterator[FaultProxy]:
    async with FaultProxy("127.0.0.1", int(redis_url.rpartition(":")[2].partition("/")[0])) as proxy:
        yield proxy


@pytest.fixture
async def direct(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        yield client


def through(proxy: FaultProxy, *, retries: int = 0, timeout_s: float = 5.0) -> redis.asyncio.Redis:
    return redis.asyncio.Redis(
        port=proxy.port, retry=Retry(NoBackoff(), retries), socket_timeout=timeout_s, max_connections=4
    )


async def test_reply_lost_after_execution(proxy: FaultProxy, direct: redis.asyncio.Redis) -> None:
    proxy.arm(Fault.LOSE_REPLY, match=b"INCR")
    async with through(proxy) as client:
        with pytest.raises(redis.exceptions.ConnectionError):
            await client.incr("n")
        assert await client.incr("n") == 2
    assert await direct.get("n") == b"2"
    assert proxy.faults_done == 1


async def test_two_replies_lost_double_a_naive_write(proxy: FaultProxy, direct: redis.asyncio.Redis) -> None:
    proxy.arm(Fault.LOSE_REPLY, match=b"XADD", times=2)
    async with through(proxy, retries=3) as client:
        await client.xadd("s", {"a": 1})
    assert await direct.xlen("s") == 3


async def test_request_lost_before_execution(proxy: FaultProxy, direct: redis.asyncio.Redis) -> None:
    proxy.arm(Fault.LOSE_REQUEST, match=b"INCR")
    async with through(proxy) as client:
        with pytest.raises(redis.exceptions.ConnectionError):
            await client.incr("n")
    assert await direct.get("n") is None


async def test_large_request_is_recognised_by_its_end(proxy: FaultProxy, direct: redis.asyncio.Redis) -> None:
    value = b"x" * 3_000_000 + b"END"
    proxy.arm(Fault.LOSE_REPLY, match=b"xEND")
    async with through(proxy) as client:
        with pytest.raises(redis.exceptions.ConnectionError):
            await client.set("big", value)
        assert await client.get("big") == value


async def test_cut_ends_a_blocking_read(proxy: FaultProxy) -> None:
    async with through(proxy) as client:
        read = asyncio.ensure_future(client.blpop(["q"], timeout=4))
        await wait_until(lambda: proxy.connections == 1)
        await client.ping()
        proxy.cut()
        with pytest.raises(redis.exceptions.ConnectionError):
            await read
        assert await client.ping()


async def test_blackhole_is_silence_and_ends(proxy: FaultProxy, direct: redis.asyncio.Redis) -> None:
    async with through(proxy) as client:
        await client.ping()
        proxy.blackhole = True
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.incr("n"), 0.2)
        assert await direct.get("n") is None
        proxy.blackhole = False
        assert await client.incr("m") == 1


async def test_delay(proxy: FaultProxy) -> None:
    async with through(proxy) as client:
        await client.ping()
        proxy.delay_s = 0.2
        before = time.monotonic()
        await client.ping()
        assert time.monotonic() - before >= 0.2


async def test_refused_connection(proxy: FaultProxy) -> None:
    proxy.refuse = True
    async with through(proxy) as client:
        with pytest.raises(redis.exceptions.ConnectionError):
            await client.ping()
        proxy.refuse = False
        assert await client.ping()


async def test_wait_until() -> None:
    seen: list[int] = []

    async def third_time() -> bool:
        seen.append(1)
        return len(seen) == 3

    await wait_until(third_time)
    assert len(seen) == 3
    with pytest.raises(AssertionError, match=r"not within 0\.02 s: .*len\(seen\) == 4"):
        await wait_until(lambda: len(seen) == 4, timeout_s=0.02)
    with pytest.raises(AssertionError, match="a fourth"):
        wait_until_sync(lambda: False, timeout_s=0.01, what="a fourth")


async def test_blocking_call_is_caught(no_blocking: BlockBuster) -> None:
    with pytest.raises(BlockingError):
        time.sleep(0.01)  # noqa: ASYNC251 (this is what must be caught)


def test_unlisted_key_is_named(redis_servers: RedisServers, redis_url: str) -> None:
    keys = Keys("g")
    with redis.Redis.from_url(redis_url) as client:
        client.hset(keys.control, "generation", 1)
        client.hset(keys.router("r1"), "generation", 1)
        client.set(keys.manifest("a-v1"), "{}", ex=60)
        client.set("stray", 1)
    assert [key.split(": ", 1)[1] for key in sorted(redis_servers.unlisted_keys())] == [
        f"{keys.router('r1')}: never expires, listed with {ROUTER_TTL_S:g} s",
        "stray: is no key of adaptersync_core.keys",
    ]
    assert redis_servers.url("valkey9", Role.CONTROL)  # empty again
    assert redis_servers.unlisted_keys() == []


def test_objections() -> None:
    keys = Keys("g")
    assert objection(keys.inflight, "hash", 60, Role.CACHE) is None
    assert objection(keys.inflight, "hash", -1, Role.CONTROL) == "belongs on the cache server"
    assert objection(keys.table, "hash", -1, Role.CONTROL) == "is a hash, listed as string"
    assert objection(keys.table, "none", -2, Role.CONTROL) is None  # it expired while the keys were looked through
    assert objection(keys.events + "x", "stream", -1, Role.CONTROL) == "is no key of adaptersync_core.keys"


def test_surface_of_a_command_and_of_an_application() -> None:
    @click.group()
    def top() -> None: ...

    @top.command()
    @click.option("--json/--table", "-j/-t")
    @click.argument("run")
    def show() -> None: ...

    assert list(surface.cli_options(top, "x")) == [
        "x",
        *("x show", "x show --json", "x show -j", "x show --table", "x show -t", "x show <run>"),
    ]

    async def answer(request: web.Request) -> web.Response:
        return web.Response()

    application = web.Application()
    application.add_routes([web.get("/replicas/{name}", answer), web.post("/replicas", answer)])
    assert list(surface.http_routes(application, "s")) == ["s GET /replicas/{name}", "s POST /replicas"]


def test_changed_surface_is_shown_and_accepted(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(surface, "DATA", tmp_path)
    monkeypatch.setattr(pytestconfig.option, "accept_surface", False)
    (tmp_path / "surface_s.txt").write_text("a\nb\n")
    surface.assert_frozen("s", ["b", "a"], pytestconfig)
    with pytest.raises(AssertionError, match=r"(?s)--accept-surface.*-b.*\+c"):
        surface.assert_frozen("s", ["a", "c"], pytestconfig)
    with pytest.raises(AssertionError, match="nothing was collected"):
        surface.assert_frozen("s", [], pytestconfig)
    monkeypatch.setattr(pytestconfig.option, "accept_surface", True)
    surface.assert_frozen("s", ["a", "c"], pytestconfig)
    assert (tmp_path / "surface_s.txt").read_text() == "a\nc\n"
