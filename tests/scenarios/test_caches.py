"""Routers know what is warm where by the engines' own word, and not by what they once sent there."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from adaptersync_core.blocks import block_hashes
from adaptersync_core.config import Config
from adaptersync_core.redis import RedisClient
from support.wait import wait_until
from support.whole_fleet import Replica, WholeFleet, whole_fleet

BLOCK = 16
BLOCKS = 40


@pytest.fixture
async def fleet(config: Config, patient: None, tmp_path: Path) -> AsyncIterator[WholeFleet]:
    """Two replicas with room for few blocks, and one version that both serve."""
    async with whole_fleet(config, tmp_path, start=False, num_blocks=BLOCKS, block_size=BLOCK) as fleet:
        fleet.kv_events = True
        await fleet.start()
        await fleet.promoted(await fleet.trainer())
        await wait_until(lambda: _all_followed(fleet), what="the agents to follow")
        yield fleet


async def _all_followed(fleet: WholeFleet) -> bool:
    seen = (await fleet.registry.fleet()).replicas
    return all(one.report.cache.followed for one in seen.values())


def prompt(blocks: int = 6) -> list[int]:
    return [random.randrange(33, 127) for _ in range(blocks * BLOCK + 1)]


async def warm(fleet: WholeFleet, replica: Replica, tokens: list[int]) -> None:
    """Ask an engine directly: no router knows."""
    version = await fleet.current()
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"{replica.url}/v1/completions", json={"model": version, "prompt": tokens, "max_tokens": 1}
        ) as answer,
    ):
        assert answer.status == 200, await answer.text()


async def routed(fleet: WholeFleet) -> dict[str, float]:
    """How many choices of each kind there were."""
    text = (await fleet.get("/metrics")).body.decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "routing" in sample.labels and sample.name.endswith("_total"):
                found[sample.labels["routing"]] = found.get(sample.labels["routing"], 0) + sample.value
    return found


async def choice(fleet: WholeFleet, tokens: list[int]) -> tuple[str, str]:
    """Where a rollout went, and why."""
    before = await routed(fleet)
    answer = await fleet.complete("run", tokens, max_tokens=1)
    assert answer.status == 200, answer.body
    after = await routed(fleet)
    (outcome,) = [name for name, count in after.items() if count != before.get(name, 0)]
    return answer.headers["x-adaptersync-replica"], outcome


async def owned(fleet: WholeFleet, tokens: list[int]) -> bool:
    """Whether routers take the last block of a prompt for cached anywhere."""
    version = await fleet.current() or ""
    client = RedisClient(fleet.config.redis.cache_url, name="test")
    try:
        last = block_hashes(version, tokens, BLOCK, 9)[-1]
        return await client.command("HGET", fleet.keys.owned(version), last) is not None
    finally:
        await client.close()


async def not_owned(fleet: WholeFleet, tokens: list[int]) -> bool:
    return not await owned(fleet, tokens)


async def test_a_prompt_goes_to_where_it_is_cached_whoever_sent_it_there(fleet: WholeFleet) -> None:
    for number in (1, 0, 1):
        tokens = prompt()
        await warm(fleet, fleet[number], tokens)
        # not when its agent knows: that is some 50 ms before routers do
        await wait_until(lambda: owned(fleet, tokens), what="the agent to have told")  # noqa: B023
        assert await choice(fleet, tokens) == (f"replica-{number}", "affinity")


async def test_a_prompt_that_was_evicted_is_cold_again(fleet: WholeFleet) -> None:
    tokens = prompt()
    first, outcome = await choice(fleet, tokens)
    assert outcome == "cold"
    assert await choice(fleet, tokens) == (first, "affinity")
    for _ in range(2 * BLOCKS // 8):
        await warm(fleet, fleet.replicas[first], prompt(8))
    await wait_until(lambda: not_owned(fleet, tokens), what="the router to know that it was evicted")
    assert (await choice(fleet, tokens))[1] == "cold"


async def test_an_engine_that_was_restarted_owns_nothing(fleet: WholeFleet) -> None:
    tokens = prompt()
    first, _ = await choice(fleet, tokens)
    await wait_until(lambda: owned(fleet, tokens))
    await fleet.replicas[first].restart_engine()
    await wait_until(lambda: not_owned(fleet, tokens), timeout_s=15, what="its old life to be forgotten")
    await fleet.ready()
    assert (await choice(fleet, tokens))[1] == "cold"
