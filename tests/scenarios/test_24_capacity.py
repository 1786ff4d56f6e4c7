"""Rows 24 and 25: engines hold a bounded number of adapters, and evict without a word."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from adaptersync_core.config import Config
from adaptersync_tools.simulator.scheduler import Latency
from support.wait import wait_until
from support.whole_fleet import WholeFleet, whole_fleet

# 24: over the slots, the engine evicts a live version


async def test_s24_slots_are_checked_when_a_replica_joins(config: Config, tmp_path: Path) -> None:
    """One that holds less than the others, and less than the window with what comes next, stays outside."""
    async with whole_fleet(config, tmp_path, replicas=3, start=False, max_loras=3, max_cpu_loras=3) as fleet:
        fleet[2].engine_config = replace(fleet.engine, max_loras=2, max_cpu_loras=2)
        fleet.start_coordinator()
        trainer = await fleet.trainer()
        for number in range(2):
            await fleet[number].start()
        await fleet.ready(2)
        names = {await fleet.promoted(trainer) for _ in range(2)}
        await fleet[2].start()
        await fleet.state("replica-2", "joining", "capacity: holds 2 adapters, 3 are needed")
        assert (await fleet.settled()).ready() == ["replica-0", "replica-1"]
        assert fleet[0].listed() == fleet[1].listed() == names


@pytest.mark.parametrize(("slots", "staleness"), [(2, 1), (2, 3), (3, 3)])
async def test_s24_a_fleet_smaller_than_the_window_shortens_it_and_evicts_nothing(
    config: Config, tmp_path: Path, slots: int, staleness: int
) -> None:
    async with whole_fleet(config, tmp_path, max_loras=slots, max_cpu_loras=slots) as fleet:
        trainer = await fleet.trainer(max_staleness=staleness)
        for _ in range(2 * slots):
            name = await fleet.promoted(trainer)
            table = await fleet.settled()
            assert name in table.versions
            assert len(table.versions) <= slots
            assert not await _unanswered(fleet, *table.versions)


async def test_s24_many_runs_share_the_slots_and_no_valid_version_is_evicted(config: Config, tmp_path: Path) -> None:
    """Seven runs, and six places, one of which is for what is on its way: who has none is refused, and told why."""
    async with whole_fleet(config, tmp_path, max_loras=6, max_cpu_loras=6) as fleet:
        trainers = [await fleet.trainer(f"run-{number}") for number in range(7)]
        refused = set()
        for _ in range(3):
            publications = [await fleet.publish(trainer) for trainer in trainers]
            for publication in publications:
                outcome = await fleet.outcome(publication)
                if outcome.state == "rolled_back":
                    assert outcome.reason.startswith("capacity: ")
                    refused.add(publication.manifest.run)
            table = await fleet.settled()
            assert len(table.versions) <= 6
            assert not await _unanswered(fleet, *table.versions)
        assert len(refused) == 2
        for trainer in trainers:
            served = (await fleet.table()).runs[trainer.run].current
            assert (served is None) == (trainer.run in refused)


async def _unanswered(fleet: WholeFleet, *names: str) -> list[str]:
    """Which versions some replica does not answer for, asked past the router."""
    found = []
    for replica in fleet.replicas.values():
        for name in names:
            body = {"model": name, "prompt": [1, 2], "max_tokens": 1}
            if (await fleet.post("/v1/completions", body, url=replica.url)).status != 200:
                found.append(f"{replica.name} {name}")
    return found


async def test_s24_a_version_in_use_is_not_pushed_out_by_newer_ones(config: Config, tmp_path: Path) -> None:
    """A request that outlives its window holds its version, and with it a place; what comes next waits for it."""
    async with whole_fleet(
        config, tmp_path, latency=Latency(decode_tokens_per_s=10), max_loras=3, max_cpu_loras=3
    ) as fleet:
        trainer = await fleet.trainer()
        first = await fleet.promoted(trainer)
        slow = asyncio.create_task(fleet.complete(first, max_tokens=40, ignore_eos=True))
        await wait_until(lambda: any(r.sim.engine.running for r in fleet.replicas.values()))
        await fleet.promoted(trainer)
        await fleet.promoted(trainer)
        waiting = await fleet.publish(trainer)  # three are held, and a load would evict one of them
        while not slow.done():
            assert all(first in replica.listed() for replica in fleet.replicas.values())
            assert all(len(replica.listed()) <= 3 for replica in fleet.replicas.values())
            await asyncio.sleep(0.05)
        answer = await slow
        assert (answer.status, answer.json["model"]) == (200, first)
        assert (await fleet.outcome(waiting)).state == "current"


# 25: never unloaded


@pytest.mark.timeout(240)
async def test_s25_two_hundred_publications_leave_a_bounded_number_everywhere(fleet: WholeFleet) -> None:
    trainer = await fleet.trainer()
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, *(len(replica.sim.engine.registry.listed()) for replica in fleet.replicas.values()))
            await asyncio.sleep(0.01)

    watching = asyncio.create_task(watch())
    publications = [await fleet.publish(trainer) for _ in range(200)]
    outcomes = [await fleet.outcome(publication) for publication in publications]
    watching.cancel()
    assert {outcome.state for outcome in outcomes} <= {"current", "superseded"}
    assert outcomes[-1].state == "current"
    # the window, the one on its way in and one on its way out; a canary
    assert most <= 2 + 1 + 1 + 1
    table = await fleet.settled()
    for replica in fleet.replicas.values():
        await wait_until(lambda replica=replica: replica.staged() == set(table.versions), timeout_s=20)  # type: ignore[misc]
        assert len(replica.sim.engine.list_loras()) <= fleet.engine.registered_limit
