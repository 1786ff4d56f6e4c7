"""Following events: nothing that comes is missed, and whoever lost the place wakes up and goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from adaptersync_core import bus
from adaptersync_core.bus import Bell, follow, ring_on_events
from adaptersync_core.events import REPORTS
from adaptersync_core.keys import Keys
from adaptersync_core.records import Ack
from adaptersync_core.redis import Entry, RedisClient
from adaptersync_core.registry import Registry
from adaptersync_tools.servers import RedisServer, Role
from support.redis_servers import server_binary
from support.wait import wait_until

STREAM = Keys("group").events


@pytest.fixture(autouse=True)
def short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus, "RETRY_S", 0.05)


@pytest.fixture
async def follower(redis_url: str) -> AsyncIterator[AsyncIterator[list[Entry]]]:
    async with aclosing(_generator(redis_url)) as batches:
        assert await anext(batches) == []  # it begins with a look at the records
        yield batches


def _generator(url: str) -> AsyncGenerator[list[Entry], None]:
    return follow(url, STREAM, name="test-follow")


async def write(registry: Registry, number: int) -> None:
    await registry.ack("r1", f"run-v{number}-0123456789ab", Ack(accepted=True, engine_epoch="1"))


async def test_every_entry_comes_once_and_in_order(registry: Registry, follower: AsyncIterator[list[Entry]]) -> None:
    writer = asyncio.create_task(_write_many(registry, 300))
    seen: list[str] = []
    async with asyncio.timeout(10):
        while len(seen) < 300:
            seen += [fields["version"] for _, fields in await anext(follower)]
    await writer
    assert seen == [f"run-v{number}-0123456789ab" for number in range(1, 301)]


async def test_a_stream_that_was_set_back_is_followed_from_its_end(
    registry: Registry, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write it gave it an id that nothing comes after, and its admin mended it."""
    monkeypatch.setattr(bus, "BLOCK_S", 0.05)
    async with aclosing(_generator(redis_url)) as follower, asyncio.timeout(10):
        assert await anext(follower) == []
        await registry.client.command("XADD", STREAM, "18446744073709551615-18446744073709551615", "type", "x")
        assert [fields["type"] for _, fields in await anext(follower)] == ["x"]
        await registry.client.command("DEL", STREAM)
        assert await anext(follower) == []
        await write(registry, 1)
        assert [fields["version"] for _, fields in await anext(follower)] == ["run-v1-0123456789ab"]


async def _write_many(registry: Registry, count: int) -> None:
    for number in range(1, count + 1):
        await write(registry, number)


async def test_what_was_there_before_is_not_told_again(registry: Registry, redis_url: str) -> None:
    await write(registry, 1)
    async with aclosing(_generator(redis_url)) as batches:
        assert await anext(batches) == []
        await write(registry, 2)
        ((_, fields),) = await anext(batches)
        assert fields["version"] == "run-v2-0123456789ab"


async def test_a_place_may_be_given(registry: Registry, redis_url: str) -> None:
    await _write_many(registry, 3)
    async with aclosing(follow(redis_url, STREAM, name="test", after="0")) as batches:
        assert len(await anext(batches)) == 3


async def test_it_goes_on_after_a_flush(registry: Registry, follower: AsyncIterator[list[Entry]]) -> None:
    await write(registry, 1)
    assert len(await anext(follower)) == 1
    await registry.client.command("FLUSHALL")
    await write(registry, 2)
    async with asyncio.timeout(5):
        ((_, fields),) = await anext(follower)
    assert fields["version"] == "run-v2-0123456789ab"


async def test_bytes_that_are_no_text_are_an_entry_like_another(
    registry: Registry, follower: AsyncIterator[list[Entry]]
) -> None:
    """Whoever wrote them must not end every service that follows."""
    await registry.client.command("XADD", STREAM, "*", "type", b"\xff\xfe")
    async with asyncio.timeout(5):
        ((_, fields),) = await anext(follower)
    assert fields == {"type": r"\xff\xfe"}
    await write(registry, 1)
    ((_, fields),) = await anext(follower)
    assert fields["version"] == "run-v1-0123456789ab"


@pytest.fixture
def server(redis_kind: str, tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(Role.CONTROL, tmp_path, binary=server_binary(redis_kind)) as server:
        server._any_port = False  # it comes back where it was
        yield server


async def test_it_goes_on_after_a_restart_and_says_that_it_lost_its_place(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    client = RedisClient(server.url, name="test")
    registry = Registry(client, Keys("group"))
    async with aclosing(_generator(server.url)) as batches:
        assert await anext(batches) == []
        await write(registry, 1)
        assert len(await anext(batches)) == 1
        waiting = asyncio.ensure_future(anext(batches))
        await asyncio.to_thread(server.kill)
        await asyncio.sleep(5 * bus.RETRY_S)  # it tries several times, and complains once
        await asyncio.to_thread(server.start)
        async with asyncio.timeout(10):
            assert await waiting == []  # look at the records: something may have been missed
        assert caplog.text.count("events cannot be followed") == 1
        await client.close()
        client = RedisClient(server.url, name="test")
        await write(Registry(client, Keys("group")), 2)
        async with asyncio.timeout(5):
            ((_, fields),) = await anext(batches)
        assert fields["version"] == "run-v2-0123456789ab"
    await client.close()


async def test_the_bell_rings_for_events_and_for_a_lost_place(server: RedisServer) -> None:
    bell = Bell()
    follower = asyncio.create_task(ring_on_events(bell, server.url, STREAM, name="test"))
    assert await bell.wait(5)
    client = RedisClient(server.url, name="test")
    await write(Registry(client, Keys("group")), 1)
    assert await bell.wait(5)
    await client.close()
    await asyncio.to_thread(server.kill)
    assert not await bell.wait(0.2)
    await asyncio.to_thread(server.start)
    assert await bell.wait(10)
    client = RedisClient(server.url, name="test")
    await wait_until(lambda: _blocked(client))
    await client.close()
    follower.cancel()
    await asyncio.gather(follower, return_exceptions=True)
    assert follower.cancelled()


async def test_the_bell_is_silent_for_what_the_table_does_not_change_with(registry: Registry, redis_url: str) -> None:
    bell = Bell()
    ring = ring_on_events(bell, redis_url, registry.keys.events, name="test-ring", unless=REPORTS)
    follower = asyncio.create_task(ring)
    assert await bell.wait(5)  # it begins with a look at the records
    await registry.ack("r1", "run-v1-0123456789ab", Ack(accepted=True, engine_epoch="life"))
    assert not await bell.wait(0.2)
    await registry.client.command("XADD", registry.keys.events, "*", "type", "version.promoted")
    assert await bell.wait(5)
    follower.cancel()
    await asyncio.gather(follower, return_exceptions=True)


async def _blocked(client: RedisClient) -> bool:
    return bool((await client.command("INFO", "clients"))["blocked_clients"])


async def test_a_follower_that_ends_leaves_no_connection(registry: Registry, redis_url: str) -> None:
    async with aclosing(_generator(redis_url)) as batches:
        await anext(batches)
        assert await _connected(registry) == 1
    await wait_until(lambda: _none_connected(registry))


async def _connected(registry: Registry) -> int:
    listed = await registry.client.command("CLIENT", "LIST")
    return sum("test-follow" in str(one) for one in (listed if isinstance(listed, list) else listed.splitlines()))


async def _none_connected(registry: Registry) -> bool:
    return await _connected(registry) == 0


async def test_many_rings_are_one_wake_and_none_is_lost() -> None:
    bell = Bell()
    assert not await bell.wait(0.01)
    for _ in range(3):
        bell.ring()
    assert await bell.wait(1)
    assert not await bell.wait(0.01)
    waiting = asyncio.create_task(bell.wait(5))
    await asyncio.sleep(0)
    bell.ring()
    assert await waiting
