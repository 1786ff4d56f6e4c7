"""Every script keeps its promise on both servers, and once more when its reply was lost, and lost again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from adaptersync_core.errors import Conflict, ControlError, Fenced, Forgotten, NameInvalid, NameTaken
from adaptersync_core.events import ReplicaState, VersionPromoted, from_fields
from adaptersync_core.manifest import Manifest
from adaptersync_core.records import (
    Ack,
    Decision,
    Leadership,
    Need,
    Request,
    RouterReport,
    VersionRecord,
)
from adaptersync_core.registry import OPEN_REQUESTS, Registry
from adaptersync_core.table import LiveVersion, Member, RunEntry, Table
from support.artifacts import REPORT, manifest_of, small_adapter
from support.asking import begin, events, insist, kinds

ALIVE_S = 5.0


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return manifest_of(small_adapter(tmp_path / "a"))


# reserve


async def test_numbers_are_never_given_twice(registry: Registry) -> None:
    await begin(registry)
    given = [await registry.reserve("run", epoch=1, nonce=f"n{number}") for number in range(5)]
    await begin(registry, "another")
    given.append(await registry.reserve("run", epoch=2, nonce="n0"))
    assert given == [1, 2, 3, 4, 5, 6]


async def test_reserve_repeated_is_one_number(registry: Registry, lossy: Registry) -> None:
    await begin(registry)
    assert await insist(lambda: lossy.reserve("run", epoch=1, nonce="n")) == (1, 2)
    assert await registry.reserve("run", epoch=1, nonce="m") == 2


async def test_a_redis_that_lost_a_number_does_not_give_it_again(registry: Registry) -> None:
    await begin(registry)
    assert await registry.reserve("run", epoch=1, nonce="x", latest=7) == 8


async def test_a_redis_that_lost_a_run_goes_on_above_what_the_store_has(registry: Registry) -> None:
    begun = await registry.begin_run("run", nonce="n", max_staleness=1, trainer="host", stored=(4, 9))
    assert begun == (5, 9)
    assert await registry.reserve("run", epoch=5, nonce="x") == 10


async def test_an_end_is_said_once_and_by_the_present_trainer_and_taken_back_by_the_next(registry: Registry) -> None:
    await begin(registry, "a")
    await begin(registry, "b")
    assert not await registry.end_run("run", epoch=1)
    assert await registry.end_run("run", epoch=2)
    assert not await registry.end_run("run", epoch=2)
    assert (await registry.fleet()).runs["run"].ended_at > 0
    await begin(registry, "c")
    assert (await registry.fleet()).runs["run"].ended_at == 0
    assert await kinds(registry) == {"run.began": 3, "run.ended": 1}


async def test_an_operator_ends_a_run_whose_trainer_fell_silent(registry: Registry, lossy: Registry) -> None:
    await begin(registry, "a")
    with pytest.raises(Conflict, match="trainer of this run lives"):
        await registry.close_run("run", reason="node lost", alive_s=30)
    assert not (await registry.fleet()).runs["run"].ended_at
    await asyncio.sleep(0.05)
    assert await insist(lambda: lossy.close_run("run", reason="node lost", alive_s=0.04)) == (False, 2)
    assert not await registry.close_run("run", reason="once more", alive_s=0)
    record = (await registry.fleet()).runs["run"]
    assert (record.ended_at > 0, record.ended_by) == (True, "node lost")
    assert await kinds(registry) == {"run.began": 1, "run.ended": 1}


async def test_a_trainer_that_says_that_it_lives_is_not_ended_by_mistake(registry: Registry) -> None:
    await begin(registry, "a")
    await asyncio.sleep(0.05)
    assert await registry.beat("run", epoch=1, trainer="a")
    with pytest.raises(Conflict, match="use --force"):
        await registry.close_run("run", reason="", alive_s=0.04)
    await begin(registry, "b")
    assert not await registry.beat("run", epoch=1, trainer="a")


async def test_an_unknown_run_cannot_be_ended(registry: Registry) -> None:
    with pytest.raises(NameInvalid, match="known runs: none"):
        await registry.close_run("nobody", reason="", alive_s=0)


async def test_the_trainer_of_a_run_that_was_ended_is_told_and_the_next_one_goes_on(
    registry: Registry, manifest: Manifest
) -> None:
    await begin(registry, "a")
    seq = await registry.reserve("run", epoch=1, nonce="x")
    await registry.close_run("run", reason="node lost", alive_s=0)
    for late in (
        registry.reserve("run", epoch=1, nonce="y"),
        registry.publish(replace(manifest, run="run", epoch=1, seq=seq), published_at=1.0, trainer="a"),
    ):
        with pytest.raises(Fenced, match="an operator ended this run: node lost"):
            await late
    await begin(registry, "b")
    assert (await registry.fleet()).runs["run"].ended_by == ""
    assert await registry.reserve("run", epoch=2, nonce="z") == 2


async def test_an_older_trainer_gets_no_number(registry: Registry) -> None:
    await begin(registry, "a")
    await begin(registry, "b")
    with pytest.raises(Fenced, match="newer trainer") as refusal:
        await registry.reserve("run", epoch=1, nonce="n")
    assert (refusal.value.ids["epoch"], refusal.value.ids["present"]) == (1, 2)
    assert await registry.reserve("run", epoch=2, nonce="n") == 1


async def test_a_run_that_never_began_gives_no_number(registry: Registry) -> None:
    with pytest.raises(Forgotten):
        await registry.reserve("nowhere", epoch=1, nonce="n")
    assert await registry.client.command("EXISTS", registry.keys.run("nowhere")) == 0


# publish


async def test_what_was_announced_is_known_to_all(registry: Registry, manifest: Manifest) -> None:
    await begin(registry)
    await registry.reserve("run", epoch=1, nonce="n")
    await registry.publish(manifest, published_at=12.5)
    assert await registry.manifest(manifest.adapter_id) == manifest
    assert await registry.published("run") == [(manifest.adapter_id, 1)]
    assert await registry.find_seq("run", 1) == manifest.adapter_id
    assert await registry.find_seq("run", 2) is None
    assert await registry.version(manifest.adapter_id) == VersionRecord(state="published")
    assert (await registry.fleet()).published == {"run": (manifest,)}
    told = (await events(registry))[-1]
    assert told["version"] == manifest.adapter_id
    assert (told["published_at"], told["noop"], told["size"]) == ("12.5", "false", str(manifest.size))


async def test_publish_repeated_is_one_version(registry: Registry, lossy: Registry, manifest: Manifest) -> None:
    await begin(registry)
    assert await insist(lambda: lossy.publish(manifest, published_at=1)) == (None, 2)
    assert await kinds(registry) == {"run.began": 1, "adapter.published": 1}
    await begin(registry, "newer")
    await registry.publish(manifest, published_at=1)  # it was announced in time


async def test_an_older_trainer_announces_nothing(registry: Registry, manifest: Manifest) -> None:
    await begin(registry, "a")
    await begin(registry, "b")
    with pytest.raises(Fenced):
        await registry.publish(manifest, published_at=1)
    assert await registry.manifest(manifest.adapter_id) is None
    assert await registry.published("run") == []
    assert "adapter.published" not in await kinds(registry)


async def test_a_name_stands_for_one_manifest(registry: Registry, manifest: Manifest) -> None:
    await begin(registry)
    await registry.publish(manifest, published_at=1)
    with pytest.raises(NameTaken) as refusal:
        await registry.publish(replace(manifest, created_at=1.0), published_at=1)
    assert refusal.value.ids["version"] == manifest.adapter_id
    assert await registry.manifest(manifest.adapter_id) == manifest


# report


async def test_a_report_is_the_whole_of_what_is_observed(registry: Registry) -> None:
    full = replace(REPORT, loaded=("run-v1-0123456789ab",), draining=True, engine="vllm 0.32", host="ä")
    await registry.report_replica("r1", full)
    assert (await registry.fleet()).replicas["r1"].report == full
    at = await registry.report_replica("r1", REPORT)
    fleet = await registry.fleet()
    assert fleet.replicas["r1"].report == REPORT  # nothing of the one before is left
    assert 0 <= fleet.replicas["r1"].age_s < 5
    assert abs(at - fleet.now) < 5


async def test_report_repeated_is_one_replica(registry: Registry, lossy: Registry) -> None:
    _, lost = await insist(lambda: lossy.report_replica("r1", REPORT))
    assert lost == 2
    assert list((await registry.fleet()).replicas) == ["r1"]
    assert await kinds(registry) == {}  # a heartbeat is no event


async def test_a_router_reports_and_leaves(registry: Registry) -> None:
    report = RouterReport(
        generation=7, incarnation="one", max_age_s=20.0, url="http://g1", inflight={"run-v1-0123456789ab": 2}
    )
    await registry.report_router("g1", report)
    (seen,) = (await registry.fleet()).routers.values()
    assert seen.report == report
    assert 0 <= seen.age_s < 5
    await registry.forget_router("g1")
    assert (await registry.fleet()).routers == {}


async def test_who_said_nothing_for_long_leaves_the_index(registry: Registry) -> None:
    await registry.client.command("ZADD", registry.keys.replicas, 1, "long-gone")
    await registry.report_replica("r1", REPORT)
    assert await registry.client.command("ZRANGE", registry.keys.replicas, 0, -1) == ["r1"]


# ack


ACCEPTED = Ack(accepted=True, engine_epoch=REPORT.engine_epoch, phases={"staged_s": 0.5, "loaded_s": 1.25})
REFUSED = Ack(accepted=False, engine_epoch=REPORT.engine_epoch, reason="rank 32 is above the engine's 16\nsecond line")


async def test_an_ack_is_news_once(registry: Registry) -> None:
    name = "run-v1-0123456789ab"
    assert await registry.ack("r1", name, REFUSED)
    assert not await registry.ack("r1", name, REFUSED)
    assert await registry.acks("r1") == {name: REFUSED}
    assert await registry.ack("r1", name, ACCEPTED)
    assert await registry.acks("r1") == {name: ACCEPTED}
    assert [(told["accepted"], told.get("loaded_s")) for told in await events(registry)] == [
        ("false", None),
        ("true", "1.25"),
    ]
    await registry.forget_acks("r1", [name])
    assert await registry.acks("r1") == {}
    await registry.forget_acks("r1", [])


async def test_ack_repeated_is_one_event(registry: Registry, lossy: Registry) -> None:
    answer, lost = await insist(lambda: lossy.ack("r1", "run-v1-0123456789ab", ACCEPTED))
    assert (answer, lost) == (False, 2)
    assert await kinds(registry) == {"replica.acked": 1}


# decide


VERSION = LiveVersion(
    run="run", seq=1, epoch=1, digest="0" * 64, state="current", published_at=1.5, since=2.5, changed_in=1
)
NAME = "run-v1-000000000000"


def decision(generation: int = 1, **more: Any) -> Decision:
    return Decision(
        table=Table(
            incarnation="abc",
            generation=generation,
            written_at=3.5,
            runs={"run": RunEntry(epoch=1, max_staleness=1, considered=1, current=NAME)},
            versions={NAME: VERSION},
            members={"r1": Member(state="ready", url="http://r1", engine_epoch="1", since=1.0, block_size=16)},
        ),
        records={NAME: VersionRecord(state="current", reason="", generation=generation, at=3.5)},
        events=(VersionPromoted(version=NAME, generation=generation, replicas="r1"),),
        **more,
    )


async def leading(registry: Registry) -> Leadership:
    return await registry.lead("c1", "c1", lease_s=30)


async def test_a_decision_is_written_whole(registry: Registry) -> None:
    lease = await leading(registry)
    request = await registry.request(Request(kind="rollback", run="run"))
    made = decision(answered=(request,))
    await registry.decide(made, lease, alive_s=ALIVE_S)
    assert await registry.table() == made.table
    assert await registry.version(NAME) == made.records[NAME]
    assert (await registry.fleet()).requests == {}
    assert (await registry.lead("c1", "c1", lease_s=30)).generation == 1
    assert from_fields((await events(registry))[-1]) == made.events[0]


async def test_a_record_keeps_when_each_state_was_entered_first(registry: Registry) -> None:
    lease = await leading(registry)
    await registry.decide(decision(), lease, alive_s=ALIVE_S)
    for generation, state, at in ((2, "retained", 6.0), (3, "current", 7.0), (4, "voided", 9.0)):  # 3: rolled back to
        record = VersionRecord(state=state, reason="why", generation=generation, at=at)
        await registry.decide(replace(decision(generation), records={NAME: record}), lease, alive_s=ALIVE_S)
    kept = await registry.client.command("HGETALL", registry.keys.version(NAME))
    assert (kept["state"], kept["at"]) == ("voided", "9.0")
    assert [kept[f"{state}_at"] for state in ("current", "retained", "voided")] == ["3.5", "6.0", "9.0"]


async def test_decide_repeated_is_one_decision(registry: Registry, lossy: Registry) -> None:
    """The one that repeats learns that the fleet moved on, reads again, and finds its own decision."""
    lease = await leading(registry)
    with pytest.raises(Conflict, match="moved 1"):
        await insist(lambda: lossy.decide(decision(), lease, alive_s=ALIVE_S))
    assert (await registry.table()).generation == 1
    assert await kinds(registry) == {"coordinator.elected": 1, "version.promoted": 1}


async def nothing_written(registry: Registry, generation: int = 0) -> None:
    assert (await registry.table()).generation == generation
    assert (await registry.lead("c9", "c9", lease_s=1)).token == 0 or generation == 0
    assert "version.promoted" not in await kinds(registry)
    assert await registry.client.command("EXISTS", registry.keys.version(NAME)) == 0


async def test_a_former_leader_writes_nothing(registry: Registry) -> None:
    old = await registry.lead("c1", "c1", lease_s=0)
    await registry.lead("c2", "c2", lease_s=30)
    with pytest.raises(Fenced, match="another coordinator leads"):
        await registry.decide(decision(), old, alive_s=ALIVE_S)
    await nothing_written(registry)


async def test_a_leader_of_a_control_state_that_was_lost_writes_nothing(registry: Registry) -> None:
    """After a flush tokens begin at 1 again, so the token alone would let a former leader through."""
    old = await leading(registry)
    await registry.client.command("DEL", registry.keys.control)
    again = await registry.lead("c2", "c2", lease_s=30)
    assert (again.token, again.incarnation != old.incarnation) == (old.token, True)
    with pytest.raises(Fenced, match="another coordinator leads"):
        await registry.decide(decision(), old, alive_s=ALIVE_S)
    await nothing_written(registry)


async def test_without_a_control_state_nothing_is_written(registry: Registry) -> None:
    with pytest.raises(Fenced):
        await registry.decide(
            decision(), Leadership(token=1, generation=0, incarnation="", leader="c1"), alive_s=ALIVE_S
        )
    assert (await registry.table()).generation == 0


@pytest.mark.parametrize("generation", [0, 2, 3])
async def test_a_decision_from_another_generation_is_not_written(registry: Registry, generation: int) -> None:
    lease = await leading(registry)
    with pytest.raises(Conflict, match="moved 0"):
        await registry.decide(decision(generation), lease, alive_s=ALIVE_S)
    await nothing_written(registry)


NEED = Need(replica="r1", version=NAME, engine_epoch=REPORT.engine_epoch)


async def test_a_decision_that_needs_acks_finds_them(registry: Registry) -> None:
    lease = await leading(registry)
    await registry.report_replica("r1", REPORT)
    await registry.ack("r1", NAME, ACCEPTED)
    await registry.decide(decision(needs=(NEED,)), lease, alive_s=ALIVE_S)
    assert (await registry.table()).generation == 1


async def no_report(registry: Registry) -> None:
    await registry.ack("r1", NAME, ACCEPTED)


async def stale_heartbeat(registry: Registry) -> None:
    await registry.report_replica("r1", REPORT)
    await registry.ack("r1", NAME, ACCEPTED)
    now = (await registry.client.command("TIME"))[0]
    stale = (int(now) - ALIVE_S - 1) * 1000
    await registry.client.command("HSET", registry.keys.replica("r1"), "heartbeat_ms", int(stale))


async def restarted_engine(registry: Registry) -> None:
    await registry.ack("r1", NAME, ACCEPTED)
    await registry.report_replica("r1", replace(REPORT, engine_epoch="1700000001.25"))


async def no_ack(registry: Registry) -> None:
    await registry.report_replica("r1", REPORT)


async def refused(registry: Registry) -> None:
    await registry.report_replica("r1", REPORT)
    await registry.ack("r1", NAME, REFUSED)


async def ack_of_another_life(registry: Registry) -> None:
    await registry.report_replica("r1", REPORT)
    await registry.ack("r1", NAME, replace(ACCEPTED, engine_epoch="1"))


async def ack_of_another_version(registry: Registry) -> None:
    await registry.report_replica("r1", REPORT)
    await registry.ack("r1", "run-v2-000000000000", ACCEPTED)


async def ack_of_another_replica(registry: Registry) -> None:
    await registry.report_replica("r1", REPORT)
    await registry.ack("r2", NAME, ACCEPTED)


@pytest.mark.parametrize(
    ("prepare", "word"),
    [
        (no_report, "silent"),
        (stale_heartbeat, "silent"),
        (restarted_engine, "silent"),
        (no_ack, "unacked"),
        (refused, "unacked"),
        (ack_of_another_life, "unacked"),
        (ack_of_another_version, "unacked"),
        (ack_of_another_replica, "unacked"),
    ],
)
async def test_a_decision_whose_needs_are_not_met_writes_nothing(
    registry: Registry, prepare: Callable[[Registry], Awaitable[None]], word: str
) -> None:
    lease = await leading(registry)
    request = await registry.request(Request(kind="rollback", run="run"))
    await registry.report_replica("r0", REPORT)
    await registry.ack("r0", NAME, ACCEPTED)
    await prepare(registry)
    needs = (replace(NEED, replica="r0"), NEED)  # the first is met
    with pytest.raises(Conflict, match=f"{word} .*r1") as refusal:
        await registry.decide(decision(needs=needs, answered=(request,)), lease, alive_s=ALIVE_S)
    assert refusal.value.retryable
    await nothing_written(registry)
    assert list((await registry.fleet()).requests) == [request]


async def test_a_decision_over_a_large_fleet_is_one_script(registry: Registry) -> None:
    """256 replicas, each with acks for eight versions, and a table to match."""
    lease = await leading(registry)
    names = [f"run-v{seq}-000000000000" for seq in range(1, 9)]
    needs = []
    for number in range(256):
        replica = f"r{number}"
        await registry.report_replica(replica, REPORT)
        acks = {name: msgspec.json.encode(ACCEPTED).decode() for name in names}
        await registry.client.command("HSET", registry.keys.acks(replica), *(x for pair in acks.items() for x in pair))
        await registry.client.command("EXPIRE", registry.keys.acks(replica), 60)
        needs += [replace(NEED, replica=replica, version=name) for name in names]
    member = decision().table.members["r1"]
    large = decision(needs=tuple(needs))
    large = replace(
        large,
        table=replace(large.table, members={f"r{number}": member for number in range(256)}),
        events=tuple(ReplicaState(replica=f"r{number}", state="ready", generation=1) for number in range(256)),
    )
    await registry.decide(large, lease, alive_s=60)
    assert len((await registry.table()).members) == 256
    assert (await kinds(registry))["replica.state"] == 256


# request


async def test_requests_are_bounded_and_a_known_one_is_no_second(registry: Registry) -> None:
    ask = Request(kind="rollback", run="run", reason="wrong language")
    ids = [await registry.request(ask) for _ in range(OPEN_REQUESTS)]
    with pytest.raises(ControlError, match="too many open requests"):
        await registry.request(ask)
    assert await registry.request(ask, request_id=ids[0]) == ids[0]
    assert (await registry.fleet()).requests == dict.fromkeys(ids, ask)


async def test_requests_of_whoever_does_not_ask_for_room_are_read_in_parts(registry: Registry) -> None:
    ask = msgspec.json.encode(Request(kind="rollback", run="run")).decode()
    await registry.client.command(
        "HSET", registry.keys.requests, *(text for number in range(500) for text in (f"q{number}", ask))
    )
    seen: set[str] = set()
    while found := (await registry.fleet()).requests:
        assert len(found) <= OPEN_REQUESTS
        assert not seen & found.keys()
        seen |= found.keys()
        await registry.client.command("HDEL", registry.keys.requests, *found)
    assert len(seen) == 500


async def test_request_repeated_with_its_id_is_one(registry: Registry, lossy: Registry) -> None:
    ask = Request(kind="rollback", run="run")
    assert await insist(lambda: lossy.request(ask, request_id="rollback-1")) == ("rollback-1", 2)
    assert (await registry.fleet()).requests == {"rollback-1": ask}
