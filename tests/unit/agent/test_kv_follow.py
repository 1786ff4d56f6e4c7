"""Following an engine's publisher over real sockets, wherever it binds, whatever it leaves out, and rank by rank."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import redis

from adaptersync.agent import kv_follow, kv_line
from adaptersync.agent.kv_follow import Follower
from adaptersync_core.blocks import block_hashes
from adaptersync_core.errors import EngineRefused
from adaptersync_core.keys import Keys
from adaptersync_core.redis import RedisClient
from adaptersync_core.vllm import KvSource, VllmClient
from adaptersync_tools.simulator.kv_wire import BlockRemoved, BlockStored
from adaptersync_tools.simulator.publisher import Publisher, PublisherConfig
from adaptersync_tools.up import free_ports
from support.wait import wait_until

KEYS = Keys("test")


class Client(VllmClient):
    """Says where the publishers of an engine are; nothing else is asked."""

    def __init__(self) -> None:
        self.url = "http://127.0.0.1:1"
        self.publishers: list[Publisher] = []
        self.silent = False
        self.first = 0

    async def kv_event_sources(self) -> dict[int, KvSource]:
        if self.silent:
            raise EngineRefused("not now", status=503)
        told = [msgspec.to_builtins(publisher.config) for publisher in self.publishers]
        found = {rank: msgspec.convert(config, KvSource) for rank, config in enumerate(told, self.first)}
        return dict(reversed(found.items()))  # vLLM lists them as they came


class World:
    """One engine's publishers, a follower, and the table."""

    def __init__(self, client: Client, follower: Follower, server: redis.Redis) -> None:
        self.client = client
        self.follower = follower
        self.server = server

    def publisher(self, **config: object) -> Publisher:
        publisher = Publisher(PublisherConfig(**config))  # type: ignore[arg-type]
        self.client.publishers.append(publisher)
        return publisher

    def table(self) -> set[str]:
        return set(map(str, self.server.hkeys(KEYS.owned("base"))))

    async def shows(self, *tokens: int) -> None:
        """The table is one block for each of these tokens, and the follower is content."""
        expected = {block_hashes("base", [token], 1, 1)[0] for token in tokens}
        await wait_until(lambda: self.table() == expected, what=f"the table to be blocks of {tokens}")

    async def followed(self) -> None:
        await wait_until(lambda: self.follower.report().followed, what="the follower to have caught up")


def stored(token: int, *, parent: int | None = None) -> BlockStored:
    return BlockStored(
        block_hashes=[token],
        parent_block_hash=parent,
        token_ids=[token],
        block_size=1,
        lora_id=None,
        medium="GPU",
        lora_name=None,
    )


def removed(token: int) -> BlockRemoved:
    return BlockRemoved(block_hashes=[token], medium="GPU")


Worlds = Callable[[], AbstractAsyncContextManager[World]]


@asynccontextmanager
async def following(cache_url: str) -> AsyncIterator[World]:
    client, cache_server = Client(), RedisClient(cache_url, name="test")
    follower = Follower(client, cache_server, KEYS, replica="r1", depth=100, limit=1000)
    with redis.Redis.from_url(cache_url, decode_responses=True) as server:
        world = World(client, follower, server)
        task = asyncio.create_task(follower.run())
        try:
            yield world
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            async with AsyncExitStack() as stack:
                for publisher in client.publishers:
                    stack.push_async_callback(publisher.close)
            await cache_server.close()


@pytest.fixture
async def world(cache_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(kv_follow, "QUIET_S", 0.1)
    monkeypatch.setattr(kv_follow, "LOOK_S", 0.05)
    monkeypatch.setattr(kv_follow, "RETRY_S", 0.1)
    monkeypatch.setattr(kv_line, "REPLAY_S", 1.0)
    monkeypatch.setattr(kv_line, "BIND_S", 0.3)
    async with following(cache_url) as world:
        yield world


def endpoints(kind: str, directory: Path) -> dict[str, str]:
    one, other = free_ports(2)
    return {
        "wildcard": {"endpoint": f"tcp://*:{one}", "replay_endpoint": f"tcp://*:{other}"},
        "any port": {"endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"},
        "connects": {"endpoint": f"tcp://127.0.0.1:{one}", "replay_endpoint": f"tcp://127.0.0.1:{other}"},
        "ipc": {"endpoint": f"ipc://{directory}/kv", "replay_endpoint": f"ipc://{directory}/replay"},
    }[kind]


@pytest.mark.parametrize("kind", ["wildcard", "any port", "connects", "ipc"])
async def test_wherever_the_publisher_binds(world: World, kind: str, tmp_path: Path) -> None:
    publisher = world.publisher(**endpoints(kind, tmp_path))
    publisher.publish([stored(1)])  # nobody listens yet
    world.follower.see("life", "base")
    await world.shows(1)
    await world.followed()
    publisher.publish([stored(2), removed(1)])
    await world.shows(2)


async def test_a_lost_message_is_asked_for_whether_or_not_another_follows(world: World, tmp_path: Path) -> None:
    publisher = world.publisher(**endpoints("connects", tmp_path))
    world.follower.see("life", "base")
    await world.followed()
    publisher.drop = 1
    publisher.publish([stored(1)])
    await world.shows(1)
    publisher.drop = 1
    publisher.publish([removed(1)])
    publisher.publish([stored(2)])
    await world.shows(2)
    assert world.follower.report().losses == 0


async def test_what_the_engine_cannot_repeat_costs_all_that_was_known(world: World, tmp_path: Path) -> None:
    publisher = world.publisher(endpoint=endpoints("connects", tmp_path)["endpoint"])
    world.follower.see("life", "base")
    await world.followed()

    async def connected() -> bool:
        publisher.publish([stored(1)])
        return bool(world.table())

    await wait_until(connected)
    publisher.drop = 1
    publisher.publish([removed(1)])
    publisher.publish([stored(2)])
    await world.shows(2)
    assert world.follower.report().losses >= 1


async def test_ranks_are_followed_each_for_itself(world: World, tmp_path: Path) -> None:
    for rank in range(2):
        directory = tmp_path / str(rank)
        directory.mkdir()
        world.publisher(**endpoints("connects", directory)).publish([stored(1), stored(10 + rank)])
    world.follower.see("life", "base")
    await world.shows(1, 10, 11)
    left, right = world.client.publishers
    left.publish([removed(1), removed(10)])
    await world.shows(1, 11)
    right.publish([removed(1)])
    await world.shows(11)


async def test_an_unknown_parent_has_all_read_again(world: World, tmp_path: Path) -> None:
    publisher = world.publisher(**endpoints("connects", tmp_path))
    publisher.publish([stored(1)])
    world.follower.see("life", "base")
    await world.shows(1)
    publisher.publish([stored(3, parent=2), stored(4)])
    await world.shows(1, 4)
    assert world.follower.report().orphans == 1


async def test_what_is_not_understood_ends_it_until_the_next_life(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = world.publisher(**endpoints("connects", tmp_path))
    publisher.publish([stored(1)])
    noted, left = (block_hashes("base", [token], 1, 1)[0] for token in (7, 8))
    world.server.hset(KEYS.owned("base"), left, ":r1")  # by an older life
    world.server.expire(KEYS.owned("base"), 60)
    world.follower.see("life", "base")
    await world.shows(1)
    world.server.hset(KEYS.owned("base"), noted, ":r1")  # by a router

    async def given_up() -> bool:  # once it has connected; one at a time, since what waits would be for the next life
        publisher._pub.send_multipart((b"", (1).to_bytes(8, "big"), b"\x93\x01\x91\x01\x00"))
        with contextlib.suppress(AssertionError):
            await wait_until(lambda: world.table() == {noted}, timeout_s=0.5)
        return world.table() == {noted}

    with caplog.at_level(logging.ERROR):
        await wait_until(given_up)
    (share,) = world.follower._present
    await share.owned._compare("base", at_once=True)
    await share.owned.flush()
    assert world.table() == {noted}
    assert "not understood" in world.follower.report().why
    assert len([one for one in caplog.records if one.levelno == logging.ERROR]) == 1
    world.follower.see("another life", "base")
    await world.followed()
    await world.shows(1)


async def test_an_engine_without_events_leaves_the_table_to_the_routers(world: World) -> None:
    world.server.hset(KEYS.owned("base"), "00000000000000aa", ":r1")
    world.server.expire(KEYS.owned("base"), 60)
    world.follower.see("life", "base")
    await wait_until(lambda: "publishes no KV events" in world.follower.report().why)
    assert world.table() == {"00000000000000aa"}
    world.server.delete(KEYS.owned("base"))


async def test_an_engine_that_does_not_answer_is_asked_again(world: World, tmp_path: Path) -> None:
    world.client.silent = True
    world.publisher(**endpoints("connects", tmp_path)).publish([stored(1)])
    world.follower.see("life", "base")
    await wait_until(lambda: "not now" in world.follower.report().why)
    world.client.silent = False
    await world.shows(1)


def owners(world: World) -> dict[int, set[str]]:
    """Who owns the block of each token, by the table."""
    names = {block_hashes("base", [token], 1, 1)[0]: token for token in range(30)}
    held = world.server.hgetall(KEYS.owned("base"))
    return {names[str(name)]: set(str(value).partition(":")[2].split(",")) for name, value in held.items()}


async def owned(world: World, expected: dict[int, set[str]]) -> None:
    await wait_until(lambda: owners(world) == expected, what=f"owners to be {expected}")


async def test_what_a_rank_has_is_owned_by_that_rank(world: World, tmp_path: Path) -> None:
    for rank in range(2):
        world.publisher(**endpoints("any port", tmp_path)).publish([stored(1), stored(10 + rank)])
    world.follower.see("life", "base", 2)
    await owned(world, {1: {"r1/0", "r1/1"}, 10: {"r1/0"}, 11: {"r1/1"}})
    await world.followed()
    assert world.follower.report().blocks == 4
    left, right = world.client.publishers
    left.publish([removed(1), removed(10)])
    await owned(world, {1: {"r1/1"}, 11: {"r1/1"}})
    right.publish([removed(1)])
    await owned(world, {11: {"r1/1"}})


async def test_with_a_life_the_ownership_of_all_its_ranks_ends(world: World, tmp_path: Path) -> None:
    """What came after this one's own notes, too: an older life's, and what routers noted."""
    for rank in range(2):
        world.publisher(**endpoints("any port", tmp_path)).publish([stored(1 + rank)])
    world.follower.see("life", "base", 2)
    await owned(world, {1: {"r1/0"}, 2: {"r1/1"}})
    await world.followed()
    left = block_hashes("base", [20], 1, 1)[0]
    world.server.hset(KEYS.owned("base"), left, ":r1/1,r2")  # by a router; of the engine that is about to end
    for publisher in world.client.publishers:
        await publisher.close()
    world.client.publishers.clear()
    for rank in range(2):
        world.publisher(**endpoints("any port", tmp_path)).publish([stored(5 + rank)])
    world.follower.see("another life", "base", 2)
    await owned(world, {5: {"r1/0"}, 6: {"r1/1"}, 20: {"r2"}})


async def test_a_life_with_another_number_of_ranks_owns_under_its_own_names(world: World, tmp_path: Path) -> None:
    for rank in range(2):
        world.publisher(**endpoints("any port", tmp_path)).publish([stored(1 + rank)])
    world.follower.see("life", "base", 2)
    await owned(world, {1: {"r1/0"}, 2: {"r1/1"}})
    await world.client.publishers.pop().close()
    world.follower.see("another life", "base", 1)
    await owned(world, {1: {"r1"}})
    world.publisher(**endpoints("any port", tmp_path)).publish([stored(3)])
    world.follower.see("a third life", "base", 2)
    await owned(world, {1: {"r1/0"}, 3: {"r1/1"}})


async def test_the_ranks_of_a_part_of_a_larger_deployment_are_counted_from_0(world: World, tmp_path: Path) -> None:
    """Its sources have the numbers of the whole; the one that is asked, it counts among its own."""
    for rank in range(2):
        world.publisher(**endpoints("any port", tmp_path)).publish([stored(1 + rank)])
    world.client.first = 2
    world.follower.see("life", "base", 2)
    await owned(world, {1: {"r1/0"}, 2: {"r1/1"}})


async def test_while_not_all_ranks_publish_ownership_is_the_routers(world: World, tmp_path: Path) -> None:
    world.publisher(**endpoints("any port", tmp_path)).publish([stored(1)])
    world.follower.see("life", "base", 2)
    await wait_until(lambda: "1 publish" in world.follower.report().why, what="the follower to say why")
    assert not owners(world)
    assert not world.follower.report().followed
