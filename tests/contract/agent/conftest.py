"""One simulated engine as a process, an agent in this one, and a table written by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from msgspec import to_builtins

from adaptersync.agent import app
from adaptersync_tools.simulator.faults import Faults
from support.agent_bench import Bench, bench_on
from support.engines import Engine, simulator
from support.whole_fleet import write_model


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes for the simulator; for the agent the weights that adapters of these tests and its canary change."""
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def shared_engine(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Iterator[Engine]:
    with simulator(tmp_path_factory.mktemp("engine"), model_directory, guarded=True) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """Shared by all tests that let it live; what they leave on it is taken off."""
    yield shared_engine
    shared_engine.post("/simulator/faults", to_builtins(Faults()))
    for name in shared_engine.listed():
        shared_engine.unload(name)


@pytest.fixture(autouse=True)
def short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "REST_S", 0.5)
    monkeypatch.setattr(app, "RETRY_S", 0.2)


@pytest.fixture
async def bench(redis_url: str, engine: Engine, tmp_path: Path) -> AsyncIterator[Bench]:
    async with bench_on(redis_url, engine, tmp_path) as bench:
        yield bench


@pytest.fixture
async def mortal(redis_url: str, model_directory: Path, tmp_path: Path) -> AsyncIterator[Bench]:
    """On an engine of its own, which may die."""
    with simulator(tmp_path, model_directory, guarded=True) as engine:
        async with bench_on(redis_url, engine, tmp_path) as bench:
            yield bench
