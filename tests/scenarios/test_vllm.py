"""The rows that are about the engine, on a real vLLM: agent, coordinator and router as always, one server for all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from adaptersync_core.config import Config
from adaptersync_core.errors import AdapterInvalid
from adaptersync_core.manifest import WEIGHTS_FILE
from support.engines import BLOCK_SIZE, MAX_CPU_LORAS, Engine
from support.tiny_model import HIDDEN, LAYERS
from support.wait import wait_until
from support.whole_fleet import WholeFleet, whole_fleet

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

TEXT = [65 + place % 26 for place in range(2 * BLOCK_SIZE + 3)]


@pytest.fixture
def engine(real_engine: Engine) -> Engine:
    return real_engine


@pytest.fixture
async def real(config: Config, engine: Engine, tmp_path: Path) -> AsyncIterator[WholeFleet]:
    patient = replace(
        config,
        agent=replace(config.agent, heartbeat_s=0.3, probe_timeout_s=20.0, load_timeout_s=60.0),
        coordinator=replace(config.coordinator, alive_s=30.0, deadline_s=120.0),
    )
    async with whole_fleet(patient, tmp_path, replicas=1, real=engine, start=False) as fleet:
        fleet.start_coordinator()
        await fleet[0].start()
        await fleet.ready(timeout_s=60)
        await fleet.start_router()
        yield fleet
    for name in engine.listed():  # the next test begins with an empty engine
        engine.unload(name)
    for number in engine.resident():
        engine.post("/collective_rpc", {"method": "remove_lora", "args": [number]})


@pytest.mark.parametrize(
    "shape",
    [{"hidden": HIDDEN // 2}, {"hidden": 2 * HIDDEN}, {"layers": LAYERS + 1}],
    ids=["narrower", "wider", "layers the base lacks"],
)
async def test_s06_what_does_not_fit_is_refused_and_the_server_lives(
    real: WholeFleet, engine: Engine, shape: dict[str, Any]
) -> None:
    trainer = await real.trainer()
    old = await real.promoted(trainer)
    publication = await real.publish(trainer, **shape)
    outcome = await real.outcome(publication)
    assert outcome.state == "rolled_back", outcome
    assert outcome.reason.startswith("replica-0: ")
    assert publication.adapter_id not in engine.listed()
    assert (await real.complete("run", TEXT)).json["model"] == old


async def test_s06_a_rank_above_what_the_server_says_is_not_announced(real: WholeFleet, engine: Engine) -> None:
    trainer = await real.trainer()
    old = await real.promoted(trainer)
    with pytest.raises(AdapterInvalid, match=r"rank 64 is above the limit"):
        await real.publish(trainer, rank=64)
    assert list(engine.listed()) == [old]


async def test_s07_no_version_is_answered_from_the_cache_of_another(real: WholeFleet) -> None:
    trainer = await real.trainer()
    for _ in range(3):
        name = await real.promoted(trainer)
        cached = []
        for _ in range(2):
            answer = (await real.complete(name, TEXT)).json
            assert answer["model"] == name
            cached.append((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)
        assert cached == [0, 2 * BLOCK_SIZE]


async def test_s08_an_engine_needs_no_file_after_a_load(real: WholeFleet, tmp_path: Path) -> None:
    trainer = await real.trainer()
    names = [await real.promoted(trainer) for _ in range(2)]
    for name in names:
        (tmp_path / "staged" / "replica-0" / name / WEIGHTS_FILE).rename(tmp_path / name)
    for _ in range(5):
        for name in names:
            answer = await real.complete(name, TEXT)
            assert (answer.status, answer.json["model"]) == (200, name)


async def test_s09_s11_sessions_go_on_and_nothing_fails_while_versions_pass(real: WholeFleet, engine: Engine) -> None:
    """Twelve promotions under traffic, which is three times what the engine has room for."""
    trainer = await real.trainer()
    names = [await real.promoted(trainer)]
    async with real.traffic("run", clients=3, max_tokens=8) as served:
        for _ in range(12):
            pinned = asyncio.create_task(real.complete(names[-1], TEXT, max_tokens=64, ignore_eos=True))
            names.append(await real.promoted(trainer))
            answer = await pinned
            assert (answer.status, answer.json["model"]) == (200, names[-2])
    assert {answer.answer.status for answer in served} == {200}
    assert {answer.version for answer in served} <= set(names)
    table = await real.settled()
    assert set(engine.listed()) == set(table.versions) == set(names[-2:])
    await wait_until(lambda: len(engine.resident()) <= MAX_CPU_LORAS, timeout_s=20)
    assert engine.process.poll() is None


async def test_s24_what_the_table_serves_is_never_evicted(real: WholeFleet, engine: Engine) -> None:
    """Two runs of two versions fill the engine; a fifth would push one out without a word."""
    trainers = [await real.trainer(name) for name in ("run-a", "run-b")]
    for _ in range(3):
        publications = [await real.publish(trainer) for trainer in trainers]
        outcomes = [await real.outcome(publication, 60) for publication in publications]
        assert all(
            outcome.state in ("current", "superseded") or outcome.reason.startswith("capacity") for outcome in outcomes
        )
        table = await real.settled()
        held = set(engine.resident())
        assert len(table.versions) <= MAX_CPU_LORAS
        for name in table.versions:
            assert (await real.complete(name, TEXT)).status == 200
        assert set(engine.resident()) == held  # nothing had to be read again
