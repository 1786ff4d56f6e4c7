"""A replica of two engines behind one address, beside a plain one: what is cached in one rank is asked of that rank."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from adaptersync_core.config import Config
from adaptersync_core.redis import RedisClient
from support.wait import wait_until
from support.whole_fleet import WholeFleet, whole_fleet

BLOCK = 16
TOKENS = 6 * BLOCK + 1
with_and_without_events = pytest.mark.parametrize("kv_events", [True, False], ids=["events", "no events"])
SEATS = {("replica-0", "0"), ("replica-0", "1"), ("replica-1", "")}


@pytest.fixture
def kv_events() -> bool:
    """Whether engines say what they cache."""
    return True


@pytest.fixture
async def fleet(config: Config, patient: None, tmp_path: Path, kv_events: bool) -> AsyncIterator[WholeFleet]:
    """The first has two ranks."""
    async with whole_fleet(config, tmp_path, start=False, block_size=BLOCK) as fleet:
        fleet.kv_events = kv_events
        fleet[0].ranks = 2
        await fleet.start()
        await fleet.promoted(await fleet.trainer())
        await followed(fleet)
        yield fleet


async def followed(fleet: WholeFleet) -> None:
    async def all_are() -> bool:
        seen = (await fleet.registry.fleet()).replicas
        return all(one.report.cache.followed for one in seen.values()) or not fleet.kv_events

    await wait_until(all_are, what="the agents to follow")


def prompt() -> list[int]:
    return [random.randrange(33, 127) for _ in range(TOKENS)]


async def asked(fleet: WholeFleet, tokens: list[int]) -> dict[str, str]:
    """The row of one rollout."""
    answer = await fleet.complete("run", tokens, max_tokens=1)
    assert answer.status == 200, answer.body
    found: list[dict[str, str]] = []

    async def told() -> bool:
        found[:] = [
            row
            for row in await fleet.rows()
            if row["request_id"] == answer.headers["x-adaptersync-request-id"] and row["outcome"] != "open"
        ]
        return bool(found)

    await wait_until(told, what="the ledger's row")
    return found[0]


def seat(row: dict[str, str]) -> tuple[str, str]:
    return row["replica"], row.get("rank", "")


async def warm_everywhere(fleet: WholeFleet) -> dict[tuple[str, str], list[int]]:
    """A prompt that is cached at each of the three."""
    homes: dict[tuple[str, str], list[int]] = {}
    for _ in range(60):
        tokens = prompt()
        homes.setdefault(seat(await asked(fleet, tokens)), tokens)
        if len(homes) == 3:
            break
    assert set(homes) == SEATS
    return homes


async def owners(fleet: WholeFleet) -> set[str]:
    """Who owns some block of the current version, by the cache server."""
    version = await fleet.current()
    assert version is not None
    client = RedisClient(fleet.config.redis.cache_url or fleet.config.redis.control_url, name="test")
    try:
        held = await client.command("HGETALL", fleet.keys.owned(version))
        return {owner for value in held.values() for owner in value.partition(":")[2].split(",") if owner}
    finally:
        await client.close()


@with_and_without_events
async def test_groups_stay_where_they_are_cached(fleet: WholeFleet) -> None:
    assert (await fleet.table()).members["replica-0"].ranks == 2
    assert (await fleet.table()).members["replica-1"].ranks == 1
    for home, tokens in (await warm_everywhere(fleet)).items():
        rows = [await asked(fleet, tokens) for _ in range(7)]
        assert {seat(row) for row in rows} == {home}
        assert {row["cached_tokens"] for row in rows} == {str(TOKENS - 1)}
        assert {row["predicted_tokens"] for row in rows} == {str(TOKENS - 1)}


@with_and_without_events
async def test_all_of_a_group_at_once_are_on_one_rank_and_ranks_share_the_load(fleet: WholeFleet) -> None:
    prompts = [prompt() for _ in range(12)]
    rows = [row for one in prompts for row in [await asked(fleet, one)]]
    used = {seat(row) for row in rows}
    assert used == SEATS
    again = await asyncio.gather(*(asked(fleet, one) for one in prompts))
    assert [seat(row) for row in again] == [seat(row) for row in rows]
    assert {row["cached_tokens"] for row in again} == {str(TOKENS - 1)}


async def warm(fleet: WholeFleet, rank: int, tokens: list[int]) -> None:
    """Ask a rank directly: no router knows."""
    body = {"model": await fleet.current(), "prompt": tokens, "max_tokens": 1}
    chosen = {"X-data-parallel-rank": str(rank)}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{fleet[0].url}/v1/completions", json=body, headers=chosen) as answer,
    ):
        assert answer.status == 200, await answer.text()


async def test_what_a_rank_says_it_has_is_asked_of_that_rank(fleet: WholeFleet) -> None:
    for rank in (1, 0):
        tokens = prompt()
        await warm(fleet, rank, tokens)

        async def owned(name: str = f"replica-0/{rank}") -> bool:
            return name in await owners(fleet)

        await wait_until(owned, what=f"ownership of rank {rank}")
        for _ in range(3):
            row = await asked(fleet, tokens)
            assert (seat(row), row["cached_tokens"]) == (("replica-0", str(rank)), str(TOKENS - 1))


async def test_a_restart_takes_the_ownership_of_all_ranks(fleet: WholeFleet) -> None:
    homes = await warm_everywhere(fleet)

    async def by_rank() -> bool:
        return await owners(fleet) == {"replica-0/0", "replica-0/1", "replica-1"}

    await wait_until(by_rank, what="ownership by rank")
    await fleet[0].stop_engine()
    await fleet[0].start_engine()

    async def gone() -> bool:
        return await owners(fleet) == {"replica-1"}

    await wait_until(gone, timeout_s=20.0, what="the ownership of both ranks to be gone")
    await fleet.ready()
    await followed(fleet)
    rows = {home: await asked(fleet, tokens) for home, tokens in homes.items()}
    assert rows["replica-1", ""]["cached_tokens"] == str(TOKENS - 1)
    assert {rows["replica-0", rank]["predicted_tokens"] for rank in "01"} == {"0"}


async def test_an_engine_that_comes_back_with_one_rank_is_a_plain_replica(fleet: WholeFleet) -> None:
    await warm_everywhere(fleet)
    await fleet[0].stop_engine()
    fleet[0].ranks = 1
    await fleet[0].start_engine()

    async def plain() -> bool:
        return (await fleet.table()).members["replica-0"].ranks == 1

    await wait_until(plain, timeout_s=20.0, what="the table to say so")
    await fleet.ready()
    rows = [await asked(fleet, prompt()) for _ in range(12)]
    assert {seat(row) for row in rows} == {("replica-0", ""), ("replica-1", "")}


async def test_when_a_replica_dies_its_prompts_go_to_another_replica(fleet: WholeFleet) -> None:
    homes = await warm_everywhere(fleet)
    await fleet[0].stop_agent()  # the table goes on saying that it is ready
    await fleet[0].stop_engine()
    rows = [await asked(fleet, tokens) for tokens in homes.values()]
    assert {seat(row) for row in rows} == {("replica-1", "")}
    assert {row.get("tried", "") for row in rows} <= {"", "replica-0 unreachable"}
    assert {row["attempts"] for row in rows} <= {"1", "2"}
