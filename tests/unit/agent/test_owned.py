"""What a replica owns in the table is what its engine has, on both servers, whatever was there before."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest
import redis

from adaptersync.agent import owned as owned_module
from adaptersync.agent.cached import Cache
from adaptersync.agent.kv_events import BlockRemoved, BlockStored
from adaptersync.agent.owned import Owned
from adaptersync_core.blocks import BY_BYTES, block_hashes
from adaptersync_core.errors import ControlError
from adaptersync_core.keys import Keys
from adaptersync_core.redis import RedisClient
from adaptersync_core.scripts import Script
from support.wait import wait_until

KEYS = Keys("test")
VERSION = "run-a-v1-000000000001"
OWNED = KEYS.owned(VERSION)


@pytest.fixture
def server(cache_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(cache_url, decode_responses=True) as client:
        yield client


def tell(
    server: redis.Redis, stored: Sequence[str] = (), gone: Sequence[str] = (), *, replica: str = "r1", limit: int = 1000
) -> int:
    return int(server.eval(Script("cached").source, 1, OWNED, replica, limit, 60, len(stored), *stored, *gone))


def name(number: int) -> str:
    return f"{number:016x}"


def test_stored_blocks_are_owned_and_removed_ones_are_not(server: redis.Redis) -> None:
    assert tell(server, [name(1), name(2)]) == 2
    tell(server, [name(2)], [], replica="r2")
    assert server.hgetall(OWNED) == {name(1): ":r1", name(2): ":r1,r2"}
    assert tell(server, [name(3)], [name(1), name(2), name(9)]) == 2
    assert server.hgetall(OWNED) == {name(2): ":r2", name(3): ":r1"}
    assert 0 < server.ttl(OWNED) <= 60


def test_told_again_nothing_changes(server: redis.Redis) -> None:
    for _ in range(2):
        tell(server, [name(1), name(2)], [name(3)])
        tell(server, [name(1)], replica="r2")
    assert server.hgetall(OWNED) == {name(1): ":r1,r2", name(2): ":r1"}


def test_what_routers_know_of_prompts_is_kept(server: redis.Redis) -> None:
    server.hset(OWNED, mapping={name(1): "ab12:r2", name(2): "*:r1", name(3): "cd34:r1"})
    tell(server, [name(1)], [name(2), name(3)])
    assert server.hgetall(OWNED) == {name(1): "ab12:r2,r1", name(2): "*:"}


def test_a_name_within_another_is_another(server: redis.Redis) -> None:
    server.hset(OWNED, mapping={name(1): ":r11,xr1", name(2): ":r11"})
    tell(server, [name(1)], [name(2)])
    assert server.hgetall(OWNED) == {name(1): ":r11,xr1,r1", name(2): ":r11"}


def test_nothing_is_made_of_what_nobody_has(server: redis.Redis) -> None:
    assert tell(server, [], [name(number) for number in range(300)]) == 0
    assert server.exists(OWNED) == 0


def test_blocks_and_owners_are_bounded(server: redis.Redis) -> None:
    for first in range(0, 2000, 200):
        assert tell(server, [name(number) for number in range(first, first + 200)], limit=500) <= 500
    assert server.hlen(OWNED) == 500
    server.delete(OWNED)
    for number in range(40):
        tell(server, [name(1)], replica=f"r{number}")
    (value,) = map(str, server.hvals(OWNED))
    owners = value.removeprefix(":").split(",")
    assert owners == [f"r{number}" for number in range(24, 40)]


def test_the_script_agrees_with_sets(server: redis.Redis) -> None:
    chance, truth = random.Random(3), {name(number): set[str]() for number in range(200)}
    for _ in range(60):
        replica = f"r{chance.randrange(4)}"
        touched = chance.sample(sorted(truth), chance.randrange(1, 180))
        split = chance.randrange(len(touched) + 1)
        tell(server, touched[:split], touched[split:], replica=replica)
        for block in touched[:split]:
            truth[block].add(replica)
        for block in touched[split:]:
            truth[block].discard(replica)
        kept = {block: set(str(value).removeprefix(":").split(",")) for block, value in server.hgetall(OWNED).items()}
        assert kept == {block: owners for block, owners in truth.items() if owners}


def route(
    server: redis.Redis, hashes: Sequence[str], candidates: Sequence[str] = ("r1", "r2", "r3")
) -> tuple[str, str]:
    """As routers choose; nothing stays in flight."""
    keys = (OWNED, KEYS.inflight, KEYS.promises(VERSION), KEYS.repeats("run-a"), KEYS.queues)
    settings = ("promise", 8, 0, 1000, 60, 60, 60, 60, 60, 1, 1, "", "", 0, "1")
    arguments: tuple[str | int, ...] = ("left", *settings, len(candidates), *candidates, *hashes)
    replica, outcome, *_ = server.eval(Script("route").source, len(keys), *keys, *arguments)
    server.delete(KEYS.inflight, KEYS.promises(VERSION))
    return str(replica), str(outcome)


def test_routers_believe_the_engines(server: redis.Redis) -> None:
    prompt = block_hashes(VERSION, [1, 2, 3], 1, 9)
    assert route(server, prompt) == ("r1", "cold")
    tell(server, prompt, replica="r1")
    assert route(server, prompt) == ("r1", "affinity")
    tell(server, [], prompt, replica="r1")
    tell(server, prompt[:2], replica="r2")
    assert route(server, prompt) == ("r2", "affinity"), "evicted on one, computed by another"
    tell(server, [], prompt, replica="r2")
    assert route(server, prompt)[1] == "cold"


def test_answers_do_not_make_boilerplate_of_their_prompt(server: redis.Redis) -> None:
    """Engines cache answers, too: many of one prompt, which must not count as many prompts of one beginning."""
    prompt = block_hashes(VERSION, [1, 2], 1, 9)
    for answer in range(5):
        tell(server, block_hashes(VERSION, [1, 2, 10 + answer], 1, 9), replica="r3")
    longer = block_hashes(VERSION, [1, 2, 12, 7], 1, 9)
    assert route(server, prompt) == ("r3", "affinity")
    assert route(server, longer) == ("r3", "affinity")


# the table as an agent keeps it


class Share:
    """Whoever keeps the share of r1, its cache, and the table beside it."""

    def __init__(self, server: redis.Redis, client: RedisClient, *, limit: int = 1000) -> None:
        self.server = server
        self.cache = Cache(base_model="base", depth=100)
        self.owned = Owned(client, KEYS, self.cache, replica="r1", limit=limit)
        self.owned.serve([VERSION])

    def store(self, *tokens: int, version: str = VERSION) -> list[str]:
        """Blocks of one token each."""
        names = [hash((version, tokens[: place + 1])) & 0xFFFF_FFFF_FFFF for place in range(len(tokens))]
        self.cache.apply(
            0,
            [
                BlockStored(
                    block_hashes=[*names],
                    token_ids=list(tokens),
                    block_size=1,
                    lora_name=version,
                    lora_id=1,
                    extra_keys=[[version]] * len(tokens),
                )
            ],
        )
        self.owned.changed()
        return block_hashes(version, tokens, 1, 100)

    def remove(self, *tokens: int, version: str = VERSION) -> None:
        """The last block of such a prompt."""
        self.cache.apply(0, [BlockRemoved(block_hashes=[hash((version, tokens)) & 0xFFFF_FFFF_FFFF])])
        self.owned.changed()

    def route(self, hashes: Sequence[str], replica: str = "r1") -> None:
        """As a router notes it."""
        for place in hashes:
            self.server.hset(OWNED, place, f":{replica}")
        self.server.expire(OWNED, 60)

    def table(self, replica: str = "r1") -> set[str]:
        return {
            str(block)
            for block, value in self.server.hgetall(OWNED).items()
            if replica in str(value).split(":")[1].split(",")
        }

    @contextlib.asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self.owned.write()), asyncio.create_task(self.owned.compare())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
async def client(cache_url: str) -> AsyncIterator[RedisClient]:
    client = RedisClient(cache_url, name="test")
    yield client
    await client.close()


@pytest.fixture
def share(server: redis.Redis, client: RedisClient) -> Share:
    return Share(server, client)


async def test_changes_are_written_and_taken_back(share: Share) -> None:
    first = share.store(1, 2, 3)
    await share.owned.flush()
    assert share.table() == set(first)
    share.remove(1, 2, 3)
    share.store(1, 5)
    await share.owned.flush()
    assert share.table() == {*first[:2], *block_hashes(VERSION, [1, 5], 1, 9)}
    assert share.cache.changed == {}
    assert share.cache.changed_at == math.inf


async def test_a_version_that_is_not_live_is_not_written_and_one_that_left_is_freed(share: Share) -> None:
    share.store(1, version="run-a-v2-000000000002")
    hashes = share.store(1)
    share.store(1, version="base")
    await share.owned.flush()
    assert set(share.server.keys()) == {OWNED, KEYS.owned("base")}
    share.owned.serve(["run-a-v2-000000000002"])
    await share.owned.flush()
    assert set(share.server.keys()) == {KEYS.owned("run-a-v2-000000000002"), KEYS.owned("base")}
    share.store(1, 2)
    await share.owned.flush()
    assert share.server.exists(OWNED) == 0
    share.owned.serve([VERSION])
    await share.owned.flush()
    assert share.table() >= set(hashes)


async def test_what_an_older_life_left_goes_at_once_and_what_others_own_stays(share: Share) -> None:
    left = share.store(7, 8)
    share.cache.clear_all()
    share.cache.changed = {}
    share.route(left)
    share.route(["00000000000000aa"], "r2")
    true = share.store(1, 2)
    async with share.kept():
        share.owned.begin()
        await wait_until(lambda: share.table() == set(true))
    assert share.table("r2") == {"00000000000000aa"}


async def test_a_note_that_does_not_come_true_is_taken_back_after_a_while_and_a_young_one_is_not(
    share: Share, monkeypatch: pytest.MonkeyPatch
) -> None:
    share.route(["00000000000000aa"])
    async with share.kept():
        share.owned.begin()
        await wait_until(lambda: share.table() == set(), what="the first comparison to be over")
        early, by_bytes = block_hashes(VERSION, [4], 1, 1), block_hashes(VERSION, [5], 1, 1, by_bytes=True)
        assert by_bytes[0].endswith(BY_BYTES)
        share.route([*early, *by_bytes])
        await share.owned._compare(VERSION, at_once=False)
        await share.owned.flush()
        assert share.table() == {*early, *by_bytes}, "it may still come true"
        true = share.store(1)
        monkeypatch.setattr(owned_module, "COMPARE_S", 0.05)
        share.owned._compare_bell.ring()
        await wait_until(lambda: share.table() == {*true, *by_bytes})


async def test_a_cache_server_that_lost_everything_is_told_again(share: Share, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owned_module, "COMPARE_S", 0.05)
    true = share.store(*range(600))
    async with share.kept():
        share.owned.begin()
        await wait_until(lambda: share.table() == set(true))
        share.server.flushall()
        await wait_until(lambda: share.table() == set(true))


async def test_a_full_table_is_not_filled_again_and_again(server: redis.Redis, client: RedisClient) -> None:
    share = Share(server, client, limit=50)
    share.store(*range(100))
    await share.owned.flush()
    share.owned._true = True
    await share.owned._compare(VERSION, at_once=False)
    assert server.hlen(OWNED) == 50
    assert share.cache.changed == {}


async def test_nothing_is_taken_back_while_the_cache_is_not_known(share: Share) -> None:
    share.route(["00000000000000aa"])
    await share.owned._compare(VERSION, at_once=True)
    await share.owned.flush()
    assert share.table() == {"00000000000000aa"}


async def test_changes_wait_for_a_server_that_is_away_as_far_as_there_is_room(
    server: redis.Redis, client: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = Share(server, RedisClient("redis://127.0.0.1:1/0", name="test"))
    share.store(1, 2, 3)
    with pytest.raises(ControlError):
        await share.owned.flush()
    assert len(share.cache.changed[VERSION]) == 3
    monkeypatch.setattr(owned_module, "WAITING", 2)
    with pytest.raises(ControlError):
        await share.owned.flush()
    assert share.cache.changed == {}
