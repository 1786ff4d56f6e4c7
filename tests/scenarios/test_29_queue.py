"""Rows 29 and 30: what waits in a queue grows old, and what is asked for is not yet, or no longer, there."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from adaptersync.trainer.answers import Answer as Reply
from adaptersync.trainer.answers import Verdict, judge
from adaptersync_core.config import Config
from adaptersync_core.records import Request
from adaptersync_tools.demo.trl_calls import ScriptedTRL
from support.wait import wait_until
from support.whole_fleet import WholeFleet, whole_fleet

# 29: staleness is what a sample has when it is consumed; see also the loss of stale samples in unit/trainer/test_trl.py


async def test_s29_every_row_says_what_its_age_can_be_told_from(fleet: WholeFleet) -> None:
    """A sample that waited is judged by the promotions since its version's, whenever that is asked."""
    trainer = await fleet.trainer()
    names = [await fleet.promoted(trainer)]
    await fleet.complete("run")
    for _ in range(3):
        names.append(await fleet.promoted(trainer))
    await fleet.complete("run")
    await wait_until(lambda: _rows(fleet, 2), timeout_s=20)
    promoted = [event.version for event in await fleet.events("version.promoted")]
    assert promoted == names
    ages = [len(promoted) - 1 - promoted.index(row["version"]) for row in await fleet.rows()]
    assert ages == [3, 0]
    assert [row["digest"][:12] for row in await fleet.rows()] == [names[0][-12:], names[-1][-12:]]


async def _rows(fleet: WholeFleet, count: int) -> bool:
    return len(await fleet.rows()) >= count


@pytest.mark.parametrize("asked", [1, 2])
@pytest.mark.parametrize("served", [1, 2, 3])
def test_s29_an_answer_is_trained_on_only_as_the_version_it_was_asked_for(asked: int, served: int) -> None:
    """However long it took: what it is tagged with is what wrote it."""
    reply = Reply(status=200, served=f"run-v{served}-0123456789ab")
    verdict = judge(reply, run="run", asked=asked, promoted=3)
    assert verdict == (Verdict.TAKE if asked == served else Verdict.MISMATCH)


# 30: asked for before it is promoted, or after it retired


@pytest.mark.parametrize("how", ["id", "number"])
async def test_s30_a_version_on_its_way_is_waited_for(fleet: WholeFleet, how: str) -> None:
    trainer = await fleet.trainer()
    await fleet.promoted(trainer)
    for replica in fleet.replicas.values():
        replica.faults(delay_load_s=1.0)
    publication = await fleet.publish(trainer)
    asked = publication.adapter_id if how == "id" else f"run@v{publication.seq}"
    answer = await fleet.complete(asked)
    assert (answer.status, answer.json["model"]) == (200, publication.adapter_id)


async def test_s30_the_wait_is_bounded_and_says_when_to_come_again(config: Config, tmp_path: Path) -> None:
    settings = replace(config, router=replace(config.router, hold_s=0.5))
    async with whole_fleet(settings, tmp_path) as fleet:
        trainer = await fleet.trainer()
        await fleet.promoted(trainer)
        for replica in fleet.replicas.values():
            replica.faults(delay_load_s=8.0)
        publication = await fleet.publish(trainer)
        began = time.monotonic()
        answer = await fleet.complete(publication.adapter_id)
        assert time.monotonic() - began < 6
        assert answer.status == 503
        assert answer.headers["retry-after"]
        assert "not yet current" in answer.message


@pytest.mark.parametrize("fate", ["retired", "voided", "superseded", "rolled_back"])
@pytest.mark.parametrize("how", ["id", "number"])
async def test_s30_a_version_that_is_gone_is_refused_at_once_with_its_reason(
    fleet: WholeFleet, fate: str, how: str
) -> None:
    trainer = await fleet.trainer()
    names = [await fleet.promoted(trainer) for _ in range(2)]
    match fate:
        case "retired":
            gone = names[0]
            for _ in range(2):
                await fleet.promoted(trainer)
            await wait_until(lambda: _record(fleet, gone, "retired"), timeout_s=20)
        case "voided":
            gone = names[1]
            await fleet.registry.request(Request(kind="rollback", run="run", reason="speaks in riddles"))
            await wait_until(lambda: _record(fleet, gone, "voided"), timeout_s=20)
        case "superseded":
            for replica in fleet.replicas.values():
                replica.faults(delay_load_s=1.0)
            publications = [await fleet.publish(trainer) for _ in range(3)]
            gone = publications[1].adapter_id
            assert (await fleet.outcome(publications[1])).state == "superseded"
        case _:
            for replica in fleet.replicas.values():
                replica.faults(fail_loads=1)
            gone = (publication := await fleet.publish(trainer)).adapter_id
            assert (await fleet.outcome(publication)).state == "rolled_back"
    await wait_until(lambda: _router_is_up_to_date(fleet), timeout_s=20)
    asked = gone if how == "id" else f"run@v{gone.split('-v')[1].split('-')[0]}"
    began = time.monotonic()
    answer = await fleet.complete(asked)
    assert time.monotonic() - began < 5  # not the 20 s it would be held
    assert answer.status == (410 if fate in ("retired", "voided") else 409)
    said = {"retired": "reti", "voided": "riddles", "superseded": "before it was staged", "rolled_back": "ordered by"}
    assert said[fate] in answer.message


async def _router_is_up_to_date(fleet: WholeFleet) -> bool:
    seen = (await fleet.get("/health")).json["table"]["generation"]
    return bool(seen == (await fleet.table()).generation)


async def _record(fleet: WholeFleet, name: str, state: str) -> bool:
    record = await fleet.registry.version(name)
    return record is not None and record.state == state


async def test_s30_trl_behind_the_relay_meets_no_dead_end(fleet: WholeFleet) -> None:
    """It asks for old names long after, as its retries do, and never gets a 4xx."""
    async with fleet.relay() as url:
        trl = ScriptedTRL(url)
        await trl.construct()
        names = [await trl.sync(fleet.adapter()) for _ in range(5)]
        await fleet.settled()
        window = (await fleet.table()).window("run")
        for name in names:
            status, headers, _ = await trl.rollout(name, [1, 2, 3])
            assert status == 200
            assert headers["x-adaptersync-version"] in window
        stale = await trl.rollout(names[0], [1, 2, 3])
        assert stale[1]["x-adaptersync-version"] == window[-1]  # the oldest that is still there


async def test_s30_a_version_the_fleet_cannot_take_in_time_is_stood_in_for(config: Config, tmp_path: Path) -> None:
    async with whole_fleet(config, tmp_path) as fleet, fleet.relay(promotion_timeout_s=0.5) as url:
        trl = ScriptedTRL(url)
        await trl.construct()
        for replica in fleet.replicas.values():
            replica.faults(delay_load_s=0.0)
        first = await _patient(trl, fleet)
        for replica in fleet.replicas.values():
            replica.faults(delay_load_s=4.0)
        before = await fleet.current()
        name = await trl.sync(fleet.adapter())
        status, headers, _ = await trl.rollout(name, [1, 2, 3])
        assert (status, headers["x-adaptersync-version"]) == (200, before)
        assert first != name


async def _patient(trl: ScriptedTRL, fleet: WholeFleet) -> str:
    """The first version has nothing to stand in for it: on a busy machine it may need another try."""
    for _ in range(20):
        try:
            return await trl.sync(fleet.adapter())
        except Exception:
            trl.version -= 1
            await asyncio.sleep(0.5)
    raise AssertionError("the first version never came")
