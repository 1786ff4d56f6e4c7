"""An agent's word on how fast its engine prefills, from the counters of one that takes its time."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import pytest

from adaptersync.agent import rate
from adaptersync_core.keys import QUEUES_TTL_S
from adaptersync_core.redis import RedisClient
from support.agent_bench import bench_on
from support.engines import simulator
from support.wait import wait_until

TOKENS_PER_S = 4000


@pytest.mark.parametrize(("ranks", "names"), [(1, ["r1"]), (2, ["r1/0", "r1/1"])])
async def test_routers_are_told_the_rate_that_was_measured(
    redis_url: str,
    cache_url: str,
    model_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    names: list[str],
) -> None:
    """Of several ranks, what each does of it."""
    monkeypatch.setattr(rate, "LOOK_S", 0.3)
    monkeypatch.setattr(rate, "LEAST", 300)
    latency = f'{{"prefill_tokens_per_s": {TOKENS_PER_S}, "decode_tokens_per_s": 50}}'
    ports = ("--kv-events-endpoint", "tcp://*:0", "--kv-replay-endpoint", "tcp://*:0")
    more = ("--latency", latency, "--data-parallel-size", str(ranks), *ports)
    with simulator(tmp_path, model_directory, *more, guarded=True) as engine:
        async with (
            bench_on(redis_url, engine, tmp_path, cache_url=cache_url, policy="expected") as bench,
            contextlib.AsyncExitStack() as opened,
        ):
            client, key = RedisClient(cache_url, name="test"), bench.registry.keys.queues
            opened.push_async_callback(client.close)

            async def told() -> bool:
                """One long prompt after the other, with time to spare between two, until the agent has seen enough."""
                prompt = [chance.randrange(3, 250) for _ in range(400)]
                await asyncio.to_thread(engine.complete, "base", prompt, max_tokens=10, ignore_eos=True)
                return bool(await client.command("HEXISTS", key, f"{names[0]}|"))

            chance = random.Random(0)
            await wait_until(told)
            told_of = await client.command("HGETALL", key)
            assert sorted(told_of) == [f"{name}|" for name in names]
            assert [int(rate) for rate in told_of.values()] == pytest.approx([TOKENS_PER_S] * ranks, rel=0.02)
            assert 0 < await client.command("TTL", key) <= QUEUES_TTL_S
