"""Loads of which nobody can say whether they have ended: the files they read must stay."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from adaptersync.agent.engine import Engine
from adaptersync_core.errors import EngineRefused, EngineUnavailable
from adaptersync_core.vllm import EngineFacts, Held, Identity, VllmClient
from adaptersync_tools.demo.synthetic import write_base_model

NAME = "run-v1-0123456789ab"
STAGED = Path("/staged")
FACTS = EngineFacts(
    base_model="base",
    root="/none",
    max_model_len=1,
    block_size=16,
    max_loras=1,
    max_cpu_loras=1,
    max_lora_rank=8,
    version="0",
)


class Server(VllmClient):
    """One vLLM that answers as a test says."""

    def __init__(self) -> None:
        self.url = "http://engine"
        self.life = "1.00"
        self.listed: dict[str, str] = {}
        self.failure: Exception | None = None
        self.said = FACTS
        self.workers: list[Held] = []
        self.looked = 0

    async def alive(self, *, timeout_s: float) -> None:
        pass

    async def identity(self) -> Identity | None:
        return None

    async def epoch(self) -> str:
        return self.life

    async def facts(self) -> EngineFacts:
        return self.said

    async def adapters(self) -> dict[str, str]:
        return self.listed

    async def held(self) -> list[Held]:
        self.looked += 1
        return self.workers

    async def load(self, name: str, path: str, *, timeout_s: float) -> None:
        if self.failure is not None:
            raise self.failure
        self.listed[name] = path

    async def unload(self, name: str) -> None:
        self.listed.pop(name, None)


@pytest.mark.parametrize(
    ("failure", "unsettled"),
    [
        (None, set()),
        (EngineRefused("no", status=400), set()),
        (EngineUnavailable("no answer in time"), {NAME}),
    ],
)
async def test_a_load_is_unsettled_until_it_was_answered(failure: Exception | None, unsettled: set[str]) -> None:
    server = Server()
    server.failure = failure
    engine = Engine(server, STAGED)
    await engine.observe(timeout_s=1)
    try:
        await engine.load(NAME, STAGED / NAME, timeout_s=1)
    except (EngineRefused, EngineUnavailable) as error:
        assert error is failure  # noqa: PT017 - the case without a failure raises nothing
    assert engine.unsettled == unsettled


async def test_what_turns_out_to_be_loaded_is_settled_by_taking_it_back() -> None:
    server = Server()
    server.failure = EngineUnavailable("no answer in time")
    engine = Engine(server, STAGED)
    await engine.observe(timeout_s=1)
    with pytest.raises(EngineUnavailable):
        await engine.load(NAME, STAGED / NAME, timeout_s=1)
    server.listed[NAME] = str(STAGED / NAME)
    assert await engine.loaded() == [NAME]
    await engine.unload(NAME)
    assert engine.unsettled == set()


async def test_another_life_of_the_engine_reads_nothing_of_the_one_before() -> None:
    server = Server()
    server.failure = EngineUnavailable("no answer in time")
    engine = Engine(server, STAGED)
    await engine.observe(timeout_s=1)
    with pytest.raises(EngineUnavailable):
        await engine.load(NAME, STAGED / NAME, timeout_s=1)
    server.life = "2.00"
    await engine.observe(timeout_s=1)
    assert engine.unsettled == set()


async def test_what_cannot_be_checked_is_said(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    server = Server()
    server.said = replace(FACTS, root="some/model-of-a-hub", max_loras=0)
    await Engine(server, STAGED).observe(timeout_s=1)
    assert "base weights are not on this host at 'some/model-of-a-hub': no shapes are checked" in caplog.text
    assert "no ranks or slots are checked" in caplog.text
    caplog.clear()
    write_base_model(tmp_path)
    server.said = replace(FACTS, root=str(tmp_path))
    await Engine(server, STAGED).observe(timeout_s=1)
    assert "checked" not in caplog.text


async def test_whether_prompts_may_be_scored_is_asked_once_in_a_life() -> None:
    server = Server()
    server.said = replace(FACTS, audits=True)
    engine = Engine(server, STAGED)
    await engine.observe(timeout_s=1)
    server.workers = [Held(error="RuntimeError: not yet")]
    assert not await engine.scores()
    server.workers = [Held(scores=True), Held(scores=True)]
    assert [await engine.scores(), await engine.scores()] == [True, True]
    assert server.looked == 2
    server.life, server.workers = "2.00", [Held(scores=True), Held()]
    await engine.observe(timeout_s=1)
    assert [await engine.scores(), await engine.scores()] == [False, False]
    assert server.looked == 3
