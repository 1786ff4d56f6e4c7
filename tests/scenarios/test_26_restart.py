"""Rows 26 to 28: a trainer, an engine or everything is started anew."""

from __future__ import annotations

import asyncio
from itertools import permutations
from pathlib import Path

import pytest
from msgspec.structs import replace

from adaptersync.trainer.answers import Answer, Verdict, judge
from adaptersync_core.config import Config
from adaptersync_core.errors import Fenced
from adaptersync_tools.demo.trl_calls import ScriptedTRL
from support.starting import PARTS, start_part
from support.wait import wait_until
from support.whole_fleet import WholeFleet, whole_fleet

# 26: a trainer resumes from an older checkpoint and re-issues a version with other bytes


async def test_s26_a_resumed_trainer_goes_on_in_a_new_epoch_with_the_next_number(fleet: WholeFleet) -> None:
    first = await fleet.trainer()
    names = [await fleet.promoted(first) for _ in range(4)]
    second = await fleet.trainer()
    assert (first.epoch, second.epoch) == (1, 2)
    again = await fleet.publish(second)  # "v4" of the resumed trainer, with other bytes
    assert (again.seq, again.manifest.epoch) == (5, 2)
    assert (await fleet.outcome(again)).state == "current"
    with pytest.raises(Fenced, match="newer trainer"):
        await fleet.publish(first)
    told = [event.version for event in await fleet.events("adapter.published")]
    assert told == [*names, again.adapter_id]
    answer = await fleet.complete("run")
    assert answer.json["model"] == again.adapter_id


async def test_s26_what_the_old_trainer_had_on_its_way_is_not_promoted(fleet: WholeFleet) -> None:
    first = await fleet.trainer()
    current = await fleet.promoted(first)
    for replica in fleet.replicas.values():
        replica.faults(delay_load_s=1.5)
    late = await fleet.publish(first)
    await wait_until(lambda: _in_table(fleet, late.adapter_id), timeout_s=20)
    second = await fleet.trainer()
    outcome = await fleet.outcome(late)
    assert outcome.state == "superseded"
    assert "epoch 2" in outcome.reason
    assert await fleet.current() == current
    for replica in fleet.replicas.values():
        replica.faults(delay_load_s=0.0)
    name = await fleet.promoted(second)
    await wait_until(lambda: _serves(fleet, name), timeout_s=20)
    assert not await fleet.events("version.promoted", late.adapter_id)


async def test_s26_a_rollout_of_the_old_trainer_is_refused_once_the_newer_has_promoted(fleet: WholeFleet) -> None:
    """Until then what was current is. Its rollout process hears that the version is gone, never another's words."""
    first = await fleet.trainer()
    await fleet.promoted(first)
    second = await fleet.trainer()
    answer = await fleet.complete("run@v1")
    assert (answer.status, answer.json["model"]) == (200, await fleet.current())
    name = await fleet.promoted(second)
    old = await fleet.registry.find_seq("run", 1)
    assert old is not None
    await wait_until(lambda: _retired(fleet, old), timeout_s=20)
    (retiring,) = await fleet.events("version.retiring", old)
    assert retiring.reason == "of trainer epoch 1, which 2 replaced"
    answer = await fleet.complete("run@v1")
    assert (answer.status, "version is retired" in answer.message) == (410, True)
    asked = Answer(status=answer.status, reason=answer.message)
    # the old trainer's publisher takes no version of another epoch for its own: nothing to go over to
    await wait_until(lambda: first.current_seq is None)
    assert judge(asked, run="run", asked=1, promoted=0) is Verdict.RETRY
    assert await fleet.current() == name


async def _retired(fleet: WholeFleet, name: str) -> bool:
    record = await fleet.registry.version(name)
    return record is not None and record.state == "retired"


async def _in_table(fleet: WholeFleet, name: str) -> bool:
    return name in (await fleet.table()).versions


async def test_s26_unmodified_trl_resumes_from_an_older_checkpoint(fleet: WholeFleet) -> None:
    """It calls its fourth version `trl-policy-v4` again, and must neither die nor be served the old one."""
    async with fleet.relay() as url:
        trl = ScriptedTRL(url)
        await trl.construct()
        for _ in range(4):
            await trl.sync(fleet.adapter())
        old = await fleet.current()
        resumed = ScriptedTRL(url, version=3)
        await resumed.construct()
        name = await resumed.sync(fleet.adapter())
        assert name == "trl-policy-v4"
        status, headers, _ = await resumed.rollout(name, [1, 2, 3])
        assert status == 200
        assert headers["x-adaptersync-version"] == await fleet.current() != old


# 27: an engine restarts with an empty registry and is still in rotation


@pytest.mark.parametrize("agent", ["lives", "restarts too"])
async def test_s27_a_restarted_engine_serves_nothing_until_it_holds_the_window_again(
    fleet: WholeFleet, agent: str
) -> None:
    trainer = await fleet.trainer()
    window = {await fleet.promoted(trainer) for _ in range(2)}
    before = (await fleet.table()).members["replica-0"].engine_epoch
    async with fleet.traffic(*window, "run", clients=6) as served:
        if agent == "restarts too":
            await fleet[0].stop_agent()
        await fleet[0].stop_engine()
        fleet.on_engine.append(lambda replica: replica.faults(delay_load_s=0.3))
        await fleet[0].start_engine()
        if agent == "restarts too":
            fleet[0].start_agent()
        await fleet.state("replica-0", "joining")
        assert (await fleet.table()).members["replica-0"].engine_epoch in (before, await _life(fleet))
        await fleet.ready()
        await wait_until(lambda: fleet[0].listed() == window, timeout_s=20)
        before_traffic = len(served)
        await wait_until(lambda: len(served) > before_traffic + 30, timeout_s=20)
    assert {answer.answer.status for answer in served} == {200}  # others took over, from the first failure on
    assert all(answer.version in window for answer in served)
    states = [
        (event.state, event.reason) for event in await fleet.events("replica.state") if event.replica == "replica-0"
    ]
    assert states[-2][0] == "joining"
    assert states[-1] == ("ready", "holds all that is served")
    assert (await fleet.table()).members["replica-0"].engine_epoch != before


async def _life(fleet: WholeFleet) -> str:
    seen = (await fleet.registry.fleet()).replicas["replica-0"]
    return seen.report.engine_epoch


async def test_s27_acks_of_the_last_life_count_for_nothing(fleet: WholeFleet) -> None:
    """The engine dies between its ack and another's: the version is not promoted on that word."""
    trainer = await fleet.trainer()
    await fleet.promoted(trainer)
    fleet[1].faults(delay_load_s=2.0)
    publication = await fleet.publish(trainer)
    await wait_until(lambda: _said(fleet, publication.adapter_id), timeout_s=20)
    await fleet[0].restart_engine()
    assert (await fleet.outcome(publication)).state == "current"
    table = await fleet.table()
    for name in table.ready():
        acks = await fleet.registry.acks(name)
        assert acks[publication.adapter_id].engine_epoch == table.members[name].engine_epoch
    await fleet.ready()
    assert publication.adapter_id in fleet[0].listed()


async def _said(fleet: WholeFleet, version: str) -> bool:
    return version in await fleet.registry.acks("replica-0")


# 28: trainer and fleet restart, and each waits for the other


@pytest.mark.parametrize("order", list(permutations(PARTS)), ids="-".join)
async def test_s28_any_order_of_start_comes_to_a_first_rollout(
    config: Config, tmp_path: Path, order: tuple[str, ...]
) -> None:
    async with whole_fleet(config, tmp_path, start=False) as fleet:
        publications = []
        for part in order:
            if part == "trainer":
                trainer = await fleet.trainer()
                publications.append(await fleet.publish(trainer))
            else:
                await start_part(fleet, part)
        (publication,) = publications
        assert (await fleet.outcome(publication)).state == "current"
        assert await _first_served(fleet) == publication.adapter_id


async def _first_served(fleet: WholeFleet) -> str:
    """The model of the first answer; the one after it may be refused, if a restart is noticed in between."""
    models: list[str] = []

    async def answers() -> bool:
        answer = await fleet.complete("run")
        if answer.status == 200:
            models.append(answer.json["model"])
        return bool(models)

    await wait_until(answers, timeout_s=20)
    return models[0]


@pytest.mark.parametrize("restarted", [*((part,) for part in PARTS), PARTS], ids="-".join)
async def test_s28_whatever_restarts_the_run_goes_on(fleet: WholeFleet, restarted: tuple[str, ...]) -> None:
    trainer = await fleet.trainer()
    name = await fleet.promoted(trainer)
    for part in restarted:
        match part:
            case "coordinator":
                await fleet.stop_coordinator()
            case "replicas":
                for replica in fleet.replicas.values():
                    await replica.stop()
            case "router":
                await fleet.stop_router()
            case "trainer":
                await asyncio.to_thread(trainer.close)
    for part in restarted:
        if part == "trainer":
            trainer = await fleet.trainer()
        else:
            await start_part(fleet, part)
    assert await _first_served(fleet) == name  # what was current is, until the next one
    name = await fleet.promoted(trainer)
    await wait_until(lambda: _serves(fleet, name), timeout_s=20)


async def _serves(fleet: WholeFleet, name: str) -> bool:
    answer = await fleet.complete("run")
    return answer.status == 200 and bool(answer.json["model"] == name)


@pytest.mark.parametrize("ready", [0, 1])
async def test_s28_too_small_a_fleet_promotes_nothing(config: Config, tmp_path: Path, ready: int) -> None:
    settings = replace(config, coordinator=replace(config.coordinator, min_ready=2, deadline_s=2.0))
    async with whole_fleet(settings, tmp_path, start=False) as fleet:
        fleet.start_coordinator()
        trainer = await fleet.trainer()
        for number in range(ready):
            await fleet[number].start()
        publication = await fleet.publish(trainer)
        await fleet.ready(ready)
        await asyncio.sleep(2.5)  # longer than a version may take
        assert publication.outcome is None
        assert not await fleet.events("version.")
        for number in range(ready, 2):
            await fleet[number].start()
        assert (await fleet.outcome(publication)).state == "current"
