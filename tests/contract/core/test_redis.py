"""The client's two profiles: what is refused, what cannot be reached, and that nothing is done twice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from adaptersync_core.errors import ControlError, ControlUnavailable
from adaptersync_core.redis import RedisClient
from adaptersync_tools.servers import RedisServer, Role
from support.proxy import Fault, FaultProxy
from support.redis_servers import KINDS, RedisServers, server_binary
from support.wait import wait_until

pytestmark = pytest.mark.foreign_keys("plain keys are enough to see what the client does")


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[RedisClient]:
    client = RedisClient(redis_url, name="test")
    yield client
    await client.close()


@pytest.fixture
async def lossy(proxy: FaultProxy) -> AsyncIterator[RedisClient]:
    client = RedisClient(f"redis://127.0.0.1:{proxy.port}/0", name="test-lossy", timeout_s=1.0)
    yield client
    await client.close()


@pytest.mark.parametrize("fault", list(Fault))
async def test_no_write_is_repeated_by_the_client_itself(
    client: RedisClient, lossy: RedisClient, proxy: FaultProxy, fault: Fault
) -> None:
    proxy.arm(fault, match=b"INCR")
    with pytest.raises(ControlUnavailable, match="cannot be reached") as refusal:
        await lossy.command("INCR", "n")
    assert refusal.value.retryable
    assert await client.command("GET", "n") == ("1" if fault is Fault.LOSE_REPLY else None)
    assert await lossy.command("INCR", "m") == 1  # and the next call has a new connection


async def test_no_pipeline_is_repeated_by_the_client_itself(
    client: RedisClient, lossy: RedisClient, proxy: FaultProxy
) -> None:
    proxy.arm(Fault.LOSE_REPLY, match=b"EXEC")
    with pytest.raises(ControlUnavailable):
        await lossy.pipeline([("INCR", "n"), ("GET", "n")])
    assert await client.command("GET", "n") == "1"
    assert await lossy.pipeline([]) == []


async def test_a_read_that_waits_longer_than_the_clients_default_returns_properly(
    redis_servers: RedisServers, no_leaked_keys: None
) -> None:
    """redis-py 8 gives up after 5 s of silence by default, and repeats the read without a word."""

    async def wait(kind: str) -> None:
        url = redis_servers.url(kind, Role.CONTROL)
        client = RedisClient.blocking(url, name="test-blocking", block_s=5.5)
        before = time.monotonic()
        assert await client.read_stream("s", "0", block_s=5.5) == []
        assert 5.4 < time.monotonic() - before < 8
        asked = await client.command("INFO", "commandstats")
        assert asked["cmdstat_xread"]["calls"] == 1
        await client.close()

    for kind in KINDS:
        client = RedisClient(redis_servers.url(kind, Role.CONTROL), name="test")
        await client.command("CONFIG", "RESETSTAT")
        await client.close()
    await asyncio.gather(*(wait(kind) for kind in KINDS))


async def test_a_waiting_read_is_woken_by_an_entry(client: RedisClient, redis_url: str) -> None:
    reader = RedisClient.blocking(redis_url, name="test-reader", block_s=10)
    read = asyncio.create_task(reader.read_stream("s", "0-0", block_s=10))
    await wait_until(lambda: _blocked(client))
    entry = await client.command("XADD", "s", "*", "a", "1", "b", "zwei")
    async with asyncio.timeout(2):
        assert await read == [(entry, {"a": "1", "b": "zwei"})]
    assert await reader.read_stream("s", entry) == []
    await reader.close()


async def _blocked(client: RedisClient) -> bool:
    return bool((await client.command("INFO", "clients"))["blocked_clients"])


async def test_a_silent_server_is_given_up(lossy: RedisClient, proxy: FaultProxy) -> None:
    await lossy.command("PING")
    proxy.blackhole = True
    async with asyncio.timeout(3):
        with pytest.raises(ControlUnavailable, match="no answer in time"):
            await lossy.command("PING")
    proxy.blackhole = False


async def test_a_cancelled_call_is_cancelled(lossy: RedisClient, proxy: FaultProxy) -> None:
    await lossy.command("PING")
    proxy.blackhole = True
    call = asyncio.create_task(lossy.command("PING"))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    proxy.blackhole = False


@pytest.mark.parametrize("steps", range(12))
async def test_whoever_stops_does_not_wait_for_the_server(client: RedisClient, redis_url: str, steps: int) -> None:
    """At any step of a call: when it is written, too, and the reply will come in ten seconds."""
    reader = RedisClient.blocking(redis_url, name="test-reader", block_s=10)
    await reader.command("PING")
    read = asyncio.create_task(reader.read_stream("s", "0-0", block_s=10))
    for _ in range(steps):
        await asyncio.sleep(0)
    read.cancel()
    await asyncio.wait([read], timeout=1)
    assert read.cancelled()
    assert await reader.command("PING")  # and no reply of that is taken for this one's
    await reader.close()


async def test_what_the_server_refuses_is_said_with_its_reason(client: RedisClient) -> None:
    await client.command("SET", "k", "text")
    with pytest.raises(ControlError, match="WRONGTYPE") as refusal:
        await client.command("LPUSH", "k", "x")
    assert not refusal.value.retryable
    with pytest.raises(ControlError, match="unknown command"):
        await client.command("NO_SUCH_COMMAND")


async def test_a_full_server_is_one_to_try_again(client: RedisClient) -> None:
    _, limit = await client.command("CONFIG", "GET", "maxmemory")
    await client.command("CONFIG", "SET", "maxmemory", 1)
    try:
        with pytest.raises(ControlUnavailable, match=r"used memory"):
            await client.command("SET", "k", "v")
    finally:
        await client.command("CONFIG", "SET", "maxmemory", limit)
    await client.command("SET", "k", "v")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_wrong_password_is_refused_and_never_shown(kind: str, tmp_path: Path) -> None:
    with RedisServer(Role.CONTROL, tmp_path, password="secret-one", binary=server_binary(kind)) as server:
        client = RedisClient(server.url.replace("secret-one", "secret-two"), name="test")
        with pytest.raises(ControlError, match="user and password") as refusal:
            await client.command("PING")
        assert not refusal.value.retryable
        assert "secret" not in str(refusal.value)
        await client.close()
        right = RedisClient(server.url, name="test")
        assert await right.command("PING")
        await right.close()


async def test_nobody_there(redis_url: str) -> None:
    client = RedisClient("redis://user:secret@127.0.0.1:1/0", name="test")
    with pytest.raises(ControlUnavailable) as refusal:
        await client.command("PING")
    assert "127.0.0.1:1" in str(refusal.value)
    assert "secret" not in str(refusal.value)
    await client.close()


async def test_a_restarted_server_is_found_again(tmp_path: Path, redis_kind: str) -> None:
    server = RedisServer(Role.CONTROL, tmp_path, binary=server_binary(redis_kind))
    server.start()
    client = RedisClient(server.url, name="test")
    await client.command("SET", "k", "v")
    await asyncio.to_thread(server.kill)
    with pytest.raises(ControlUnavailable):
        await client.command("GET", "k")
    server._any_port = False
    await asyncio.to_thread(server.start)

    async def answered() -> bool:
        try:
            return bool(await client.command("GET", "k") == "v")
        except ControlUnavailable:
            return False

    await wait_until(answered)
    await client.close()
    server.stop()
