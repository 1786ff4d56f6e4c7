"""Rows 26 and 28 with a real TRL trainer: it goes on from a checkpoint, whatever runs already and in any order."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from msgspec.structs import replace

from adaptersync.trainer.checkpoint import adapter_in
from adaptersync_core.config import Config
from adaptersync_core.manifest import FILES, Manifest
from support import trainers
from support.rollouts import AskingWorker
from support.starting import start_part
from support.whole_fleet import WholeFleet, whole_fleet

pytestmark = [pytest.mark.trl, pytest.mark.filterwarnings("default"), pytest.mark.timeout(240)]


class Training:
    """Trainers of one run and one output directory, one after another."""

    def __init__(self, fleet: WholeFleet, trl: ModuleType, base: Path, output: Path) -> None:
        self.fleet = fleet
        self._trl = trl
        self._base = base
        self._output = output

    async def train(self, *, steps: int, url: str = "", resume: int | None = None) -> Any:
        """Until it has ended; the trainer."""
        return await asyncio.to_thread(self._train, steps, url or self.fleet.url, resume)

    def _train(self, steps: int, url: str, resume: int | None) -> Any:
        worker = AskingWorker(trainers.BATCH, url, "run")
        made = trainers.trainer(
            self._trl,
            self._base,
            self._output,
            steps=steps,
            run="run",
            adaptersync_config=self.fleet.config,
            rollout_worker=worker,
        )
        made.train(resume_from_checkpoint=str(self.checkpoint(resume)) if resume else None)
        return made

    def checkpoint(self, step: int) -> Path:
        return self._output / f"checkpoint-{step}"

    def says(self, step: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.checkpoint(step) / "adaptersync.json").read_bytes())
        return found

    def stored(self, version: str) -> Manifest:
        return self.fleet.store.read_manifest(version)


@pytest.fixture(autouse=True)
def cpu(trl: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    trainers.on_cpu(monkeypatch)


async def test_it_goes_on_from_an_older_checkpoint_while_the_fleet_lives(
    config: Config, tmp_path: Path, trl: ModuleType, base: Path
) -> None:
    async with whole_fleet(config, tmp_path, base=base) as fleet:
        training = Training(fleet, trl, base, tmp_path / "out")
        first = await training.train(steps=3)
        assert first.counts.promoted + first.counts.superseded + first.counts.replaced == 4
        last = await fleet.current()
        second = await training.train(steps=4, resume=2)
        version = training.stored(second.rollout_worker.served)
        held = training.says(2)
        assert version.digest == held["digest"]  # the first rollout is on the checkpoint's bytes
        assert (held["run"], held["epoch"], version.epoch) == ("run", 1, 2)
        assert (version.step, version.seq > training.stored(str(last)).seq) == (2, True)
        place = fleet.store.directory(version.adapter_id)
        assert adapter_in(place).weights == held["weights"]
        assert {path.name for path in place.iterdir()} >= set(FILES)
        assert training.says(3)["epoch"] == 1  # not written again: three was a step of the first trainer's only
        assert training.says(4)["epoch"] == 2


@pytest.mark.parametrize(
    "order", [("trainer", "replicas", "coordinator", "router"), ("coordinator", "trainer", "router", "replicas")]
)
async def test_it_goes_on_when_everything_is_started_anew(
    config: Config, tmp_path: Path, trl: ModuleType, base: Path, order: tuple[str, ...]
) -> None:
    """An empty fleet: engines without an adapter, and a Redis that has lost everything."""
    settings = replace(config, router=replace(config.router, port=free_port()))
    async with whole_fleet(settings, tmp_path, base=base) as fleet:
        training = Training(fleet, trl, base, tmp_path / "out")
        url = fleet.url
        await training.train(steps=2)
        await fleet.stop_coordinator()
        for replica in fleet.replicas.values():
            await replica.stop()
        await fleet.stop_router()
        await fleet.control.command("FLUSHALL")
        resumed = None
        for part in order:
            if part == "trainer":
                resumed = asyncio.create_task(training.train(steps=3, resume=2, url=url))
                await asyncio.sleep(1.0)  # it is there before the others, and waits for them
                assert not resumed.done()
            else:
                await start_part(fleet, part)
        assert resumed is not None
        trainer = await asyncio.wait_for(resumed, 120)
        version = training.stored(trainer.rollout_worker.served)
        assert version.digest == training.says(2)["digest"]
        assert version.epoch > training.says(2)["epoch"]
        assert version.seq > training.says(2)["seq"]


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
