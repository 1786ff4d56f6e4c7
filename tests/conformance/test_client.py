"""Our own client of one engine, against both: what it reads is what they say, and what they refuse it names."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from adaptersync_core.errors import EngineRefused, EngineUnavailable
from adaptersync_core.vllm import VllmClient
from support.engines import BLOCK_SIZE, MAX_CPU_LORAS, MAX_LORA_RANK, MAX_LORAS, MAX_MODEL_LEN, MODEL, Engine


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[VllmClient]:
    # The first /server_info of a vLLM collects facts about the machine, for seconds.
    async with VllmClient(engine.url, timeout_s=30, token=engine.token) as client:
        yield client


async def test_facts(engine: Engine, client: VllmClient) -> None:
    facts = await client.facts()
    assert (facts.base_model, facts.root, facts.version) == (MODEL, str(engine.model_directory), "0.32.0")
    assert (facts.max_model_len, facts.block_size) == (MAX_MODEL_LEN, BLOCK_SIZE)
    assert facts.engines == 1
    assert (facts.max_loras, facts.max_cpu_loras, facts.max_lora_rank) == (MAX_LORAS, MAX_CPU_LORAS, MAX_LORA_RANK)


async def test_a_life_has_one_epoch(client: VllmClient) -> None:
    assert await client.epoch() == await client.epoch()


async def test_adapters_come_and_go(engine: Engine, client: VllmClient, adapter: Callable[..., Path]) -> None:
    name, path = engine.fresh("client"), str(adapter())
    await client.load(name, path, timeout_s=30)
    assert (await client.adapters())[name] == path
    with pytest.raises(EngineRefused) as twice:
        await client.load(name, path, timeout_s=30)
    assert (twice.value.status, twice.value.kind) == (400, "InvalidUserInput")
    with pytest.raises(EngineRefused) as absent:
        await client.load(engine.fresh("client"), f"{path}/absent", timeout_s=30)
    assert (absent.value.status, absent.value.kind) == (404, "NotFoundError")
    await client.unload(name)
    assert name not in await client.adapters()
    await client.unload(name)


async def test_a_frozen_engine_is_not_alive(engine: Engine, client: VllmClient) -> None:
    await client.alive(timeout_s=30)
    engine.freeze(True)
    try:
        with pytest.raises(EngineUnavailable):
            await client.alive(timeout_s=0.5)
    finally:
        engine.freeze(False)
    await client.alive(timeout_s=30)
