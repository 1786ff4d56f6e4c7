"""Rows of what goes wrong in the field, for AdapterSyncGRPOTrainer: a real TRL trainer on a simulated fleet.

Its rollout process stands in here as one request at the beginning, or as its loop alone; whole, in
test_trained_through.py.
"""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from adaptersync_core import store as store_module
from adaptersync_core.config import Config
from adaptersync_core.manifest import WEIGHTS_FILE
from support import trainers
from support.rollouts import AskingWorker, one_turn, rollout_loop
from support.wait import wait_until
from support.whole_fleet import WholeFleet, whole_fleet

pytestmark = [pytest.mark.trl, pytest.mark.filterwarnings("default"), pytest.mark.timeout(240)]


@pytest.fixture(autouse=True)
def cpu(trl: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    trainers.on_cpu(monkeypatch)


async def trained(fleet: WholeFleet, trl: ModuleType, base: Path, **given: Any) -> Any:
    """A trainer of run "run", once it has ended."""

    def train() -> Any:
        worker = AskingWorker(trainers.BATCH, fleet.url, "run")
        out = fleet.directory / "out"
        given.setdefault("adaptersync_config", fleet.config)
        made = trainers.trainer(trl, base, out, run="run", rollout_worker=worker, **given)
        made.train()
        return made

    return await asyncio.to_thread(train)


async def test_s05_steps_that_change_nothing_are_versions_and_stop_nobody(
    config: Config, tmp_path: Path, trl: ModuleType, base: Path
) -> None:
    """A learning rate of nothing: the first version is all zero, as any trainer's is, and the others are it again."""
    async with whole_fleet(config, tmp_path, base=base) as fleet:
        trainer = await trained(fleet, trl, base, steps=3, arguments={"learning_rate": 0.0, "save_strategy": "no"})
        assert trainer.state.global_step == 3
        events = await fleet.events("adapter.published")
        assert len(events) >= 3
        assert all(event.noop for event in events)
        assert trainer.counts.promoted + trainer.counts.superseded + trainer.counts.replaced == 4
        assert trainer.counts.promoted == len(await fleet.events("version.promoted")) >= 2


async def test_s16_s22_s23_what_fails_to_go_out_or_to_be_loaded_costs_nobody_his_bytes(
    config: Config, tmp_path: Path, trl: ModuleType, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is full when the second version comes, and every replica fails to load another one."""
    saved: dict[int, bytes] = {}  # by step
    submit = trl.AdapterSyncGRPOTrainer._submit

    def submitting(trainer: Any, directory: Path, timings: dict[str, float]) -> None:
        saved[trainer.state.global_step] = (directory / WEIGHTS_FILE).read_bytes()
        submit(trainer, directory, timings)

    copy, copies = store_module.copy_verified, 0

    def sometimes_full(*given: Any, **more: Any) -> Any:
        nonlocal copies
        copies += 1
        if copies == 2 * 1 + 2:  # the second file of the second version: half of it is there
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return copy(*given, **more)

    monkeypatch.setattr(trl.AdapterSyncGRPOTrainer, "_submit", submitting)
    monkeypatch.setattr(store_module, "copy_verified", sometimes_full)
    async with whole_fleet(config, tmp_path, base=base) as fleet:
        training = asyncio.create_task(trained(fleet, trl, base, steps=6, arguments={"save_strategy": "no"}))
        await wait_until(lambda: promoted(fleet, 2), timeout_s=90)
        for replica in fleet.replicas.values():
            replica.faults(fail_loads=1)
        trainer = await training
        assert (trainer.state.global_step, len(saved)) == (6, 7)
        assert trainer.counts.rolled_back == 1
        assert trainer._publisher.retries + trainer.counts.replaced >= 1  # tried again, or a newer one was there first
        names = [event.version for event in await fleet.events("adapter.published")]
        assert len(names) + trainer.counts.replaced == 7
        for name in names:
            stored = fleet.store.read_manifest(name)
            assert (fleet.store.directory(name) / WEIGHTS_FILE).read_bytes() == saved[stored.step or 0]
        left = {path.name for path in (fleet.directory / "store" / "run").iterdir()}
        assert left == set(names)  # nothing else is readable under a version's name
        for replica in fleet.replicas.values():
            assert not replica.sim.calls["/pause"]


async def promoted(fleet: WholeFleet, count: int) -> bool:
    return len(await fleet.events("version.promoted")) >= count


async def test_s10_s30_a_rollout_waits_for_what_comes_and_goes_over_from_what_is_gone(
    fleet: WholeFleet, trl: ModuleType
) -> None:
    """TRL would ask for either 90 times. Nothing is written by another version, and nothing before a promotion."""
    trainer = await fleet.trainer()
    for _ in range(4):
        last = await fleet.promoted(trainer)
    await fleet.settled()
    async with rollout_loop(trl, fleet.url, "run", promoted=4) as loop:
        await one_turn(loop, asks=1)  # which has retired
        assert loop._counters == {"adaptersync/repinned_total": 1}
        for replica in fleet.replicas.values():
            replica.faults(delay_load_s=1.0)
        coming = await fleet.publish(trainer)
        loop._model_version_value.value = 5
        await one_turn(loop)
        assert loop._counters == {"adaptersync/repinned_total": 1}
    await wait_until(lambda: ended(fleet, 3), timeout_s=20)
    rows = [row for row in await fleet.rows() if row["outcome"] != "open"]
    assert [(row["outcome"], row.get("version", "")) for row in rows[1:]] == [
        ("ok", last),
        ("ok", coming.adapter_id),
    ]
    assert (rows[0]["outcome"], rows[0]["status"], rows[0]["asked"]) == ("refused", "410", "run@v1")
    ((at, _),) = await fleet.timed_events("version.promoted", coming.adapter_id)
    assert float(rows[2]["started_at"]) + float(rows[2]["hold_s"]) >= at / 1000 - 0.002


async def ended(fleet: WholeFleet, count: int) -> bool:
    return sum(row["outcome"] != "open" for row in await fleet.rows()) >= count
