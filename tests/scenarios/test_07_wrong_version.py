"""Rows 7 to 12: a rollout is served by another version than its name says."""

from __future__ import annotations

import asyncio
import logging
import re
from itertools import pairwise
from pathlib import Path

import aiohttp
import orjson
import pytest
from msgspec.structs import replace

from adaptersync_core.config import Config
from adaptersync_core.errors import NameTaken
from adaptersync_core.events import ReplicaAcked, VersionPromoted
from adaptersync_core.identity import parse_adapter_id
from adaptersync_core.manifest import CONFIG_FILE, WEIGHTS_FILE
from adaptersync_tools.simulator.scheduler import Latency
from support.artifacts import manifest_of, small_adapter
from support.wait import wait_until
from support.whole_fleet import PROMPT, WholeFleet, whole_fleet

ANY_VERSION = re.compile(r"(?<![\w.@-])[a-z0-9]+-v\d+(?:-[0-9a-f]+)?(?![\w-])")


async def routers_know(fleet: WholeFleet) -> None:
    """They read the table a moment after a trainer has heard of it."""
    generation = (await fleet.table()).generation

    async def told() -> bool:
        seen = (await fleet.registry.fleet()).routers.values()
        return all(each.report.generation >= generation for each in seen if each.may_serve)

    await wait_until(told, what="routers to read the table")


# 7: the same name reloaded with other bytes, and the KV cache of the old ones used again


async def test_s07_same_name_other_bytes_is_another_name(fleet: WholeFleet) -> None:
    """A trainer that writes into the same directory again and again."""
    trainer = await fleet.trainer()
    place = fleet.adapter(seed=1)
    first = await fleet.promoted(trainer, place)
    small_adapter(place, seed=2)
    second = await fleet.promoted(trainer, place)
    assert first != second
    assert parse_adapter_id(first).digest12 != parse_adapter_id(second).digest12
    for version, seed in ((first, 1), (second, 2)):
        wanted = small_adapter(fleet.directory / f"again-{seed}", seed=seed)
        stored = fleet.store.directory(version)
        assert (stored / WEIGHTS_FILE).read_bytes() == (wanted / WEIGHTS_FILE).read_bytes()


@pytest.mark.parametrize("other", ["bytes", "manifest"])
async def test_s07_a_name_that_stands_is_refused_to_anything_else(fleet: WholeFleet, other: str) -> None:
    trainer = await fleet.trainer()
    name = await fleet.promoted(trainer)
    known = await fleet.registry.manifest(name)
    assert known is not None
    forged = replace(known, step=99)
    if other == "bytes":
        impostor = manifest_of(fleet.adapter())
        forged = replace(known, files=impostor.files)
        with pytest.raises(NameTaken):
            fleet.store.publish(forged, fleet.adapter())
    with pytest.raises(NameTaken):
        await fleet.registry.publish(forged, published_at=1)
    assert await fleet.registry.manifest(name) == known
    assert (await fleet.complete("run")).headers["x-adaptersync-version"] == name


async def test_s07_no_version_is_answered_from_the_cache_of_another(fleet: WholeFleet) -> None:
    trainer = await fleet.trainer()
    for _ in range(3):
        name = await fleet.promoted(trainer)
        await routers_know(fleet)
        seen = []
        for _ in range(2):
            answer = await fleet.complete("run", PROMPT * 2)
            assert answer.headers["x-adaptersync-version"] == name
            seen.append(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert seen[0] == 0 < seen[1]


# 8: the engine reads the disk again at every step


async def test_s08_an_engine_reads_a_version_once_and_never_in_place(config: Config, tmp_path: Path) -> None:
    reads: list[str] = []
    bodies: list[bytes] = []

    def watch(replica) -> None:  # type: ignore[no-untyped-def]
        slots, load = replica.sim.engine._slots, replica.sim.scheduler.load
        read = slots._read

        def reading(path: str):  # type: ignore[no-untyped-def]
            reads.append(f"{replica.name} {Path(path).name}")
            return read(path)

        async def loading(name: str, path: str, **how: object) -> None:
            bodies.append(orjson.dumps({"name": name} | {"inplace": how["inplace"]}))
            await load(name, path, **how)

        slots._read = reading
        replica.sim.scheduler.load = loading

    async with whole_fleet(config, tmp_path, start=False) as fleet:
        fleet.on_engine.append(watch)
        await fleet.start()
        trainer = await fleet.trainer()
        names = [await fleet.promoted(trainer) for _ in range(2)]
        before = sorted(read for read in reads if "canary" not in read)
        assert before == sorted(f"{replica} {name}" for replica in fleet.replicas for name in names)
        for name in names:  # what is read again would be missed
            for replica in fleet.replicas:
                (tmp_path / "staged" / replica / name / WEIGHTS_FILE).rename(tmp_path / f"{replica}-{name}")
        async with fleet.traffic(*names, "run", clients=3) as served:
            await wait_until(lambda: len(served) >= 60, timeout_s=30)
        assert {answer.answer.status for answer in served} == {200}
        assert sorted(read for read in reads if "canary" not in read) == before
        assert bodies
        assert all(orjson.loads(body)["inplace"] is False for body in bodies)


# 9: loading a version makes the one before unknown to who still uses it


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_s09_sessions_pinned_to_a_version_finish_on_it(config: Config, tmp_path: Path, stream: bool) -> None:
    """Eight sessions of three turns: a promotion falls into the second, which is slow, and the last comes after it."""
    async with whole_fleet(config, tmp_path, latency=Latency(decode_tokens_per_s=20)) as fleet:
        trainer = await fleet.trainer()
        old = await fleet.promoted(trainer)
        turned, moved = asyncio.Event(), asyncio.Event()

        async def session(number: int) -> list[str]:
            versions = []
            for turn in range(3):
                if turn == 1:
                    turned.set()
                elif turn == 2:
                    await moved.wait()
                answer = await fleet.complete(
                    "run@v1", [number, turn, *PROMPT], max_tokens=12, ignore_eos=True, stream=stream
                )
                assert answer.status == 200, answer.body
                if stream:
                    lines = [line[6:] for line in answer.body.split(b"\n\n") if line]
                    assert lines[-1] == b"[DONE]"
                    versions += [orjson.loads(line)["model"] for line in lines[:-1]]
                versions.append(answer.headers["x-adaptersync-version"])
            return versions

        sessions = [asyncio.create_task(session(number)) for number in range(8)]
        await asyncio.wait_for(turned.wait(), 20)
        new = await fleet.promoted(trainer)
        await routers_know(fleet)
        assert (await fleet.complete("run")).headers["x-adaptersync-version"] == new
        moved.set()
        for versions in await asyncio.gather(*sessions):
            assert set(versions) == {old}


async def test_s09_a_request_in_flight_outlives_the_window(config: Config, tmp_path: Path) -> None:
    """Two promotions push its version out of the window; it is unloaded only when the answer is whole."""
    async with whole_fleet(config, tmp_path, latency=Latency(decode_tokens_per_s=10)) as fleet:
        trainer = await fleet.trainer()
        old = await fleet.promoted(trainer)
        slow = asyncio.create_task(fleet.complete(old, max_tokens=40, ignore_eos=True))
        await wait_until(lambda: any(r.sim.engine.running for r in fleet.replicas.values()))
        for _ in range(2):
            await fleet.promoted(trainer)
        await wait_until(lambda: _gone_from_routing(fleet, old))
        assert all(old in replica.listed() for replica in fleet.replicas.values())
        answer = await slow
        assert (answer.status, answer.json["model"]) == (200, old)
        await wait_until(lambda: not any(old in r.listed() for r in fleet.replicas.values()), timeout_s=20)


async def _gone_from_routing(fleet: WholeFleet, name: str) -> bool:
    return not (await fleet.table()).routable(name)


# 10: the label moves before replicas have the version


@pytest.mark.parametrize("late", ["load", "mount"])
async def test_s10_no_rollout_carries_a_version_before_every_ack(fleet: WholeFleet, late: str) -> None:
    trainer = await fleet.trainer()
    old = await fleet.promoted(trainer)
    if late == "load":
        fleet[1].faults(delay_load_s=1.5)
    else:
        target = fleet[1].mount.readlink()
        fleet[1].mount.unlink()
        fleet.close_lane()
    async with fleet.traffic("run", clients=4) as served:
        publication = await fleet.publish(trainer)
        if late == "mount":
            await wait_until(lambda: _acked(fleet, publication.adapter_id, "replica-0"), timeout_s=20)
            fleet[1].mount.symlink_to(target)
        assert (await fleet.outcome(publication)).state == "current"
        await wait_until(lambda: served[-1].version == publication.adapter_id, timeout_s=20)
    acks = {}
    for at, event in await fleet.timed_events("replica.acked", publication.adapter_id):
        assert isinstance(event, ReplicaAcked)
        if event.accepted:
            acks[event.replica] = at
    ((promoted, event),) = await fleet.timed_events("version.promoted", publication.adapter_id)
    assert isinstance(event, VersionPromoted)
    assert set(acks) == set(event.replicas.split()) == set(fleet.replicas)
    assert max(acks.values()) <= promoted
    assert {answer.version for answer in served} == {old, publication.adapter_id}
    for answer in served:
        if answer.version == publication.adapter_id:
            assert answer.at * 1000 >= promoted
        assert answer.answer.status == 200
    assert sum(answer.version == old for answer in served) > 10  # the old one served meanwhile


async def _acked(fleet: WholeFleet, version: str, replica: str) -> bool:
    return any(
        isinstance(event, ReplicaAcked) and event.replica == replica and event.accepted
        for event in await fleet.events("replica.acked", version)
    )


# 11: removing, then adding, leaves a gap


@pytest.mark.timeout(240)
async def test_s11_a_hundred_promotions_under_traffic_without_an_error(fleet: WholeFleet) -> None:
    trainer = await fleet.trainer()
    names = [await fleet.promoted(trainer)]
    async with fleet.traffic("run", "run", clients=4) as served:
        for _ in range(100):
            names.append(await fleet.promoted(trainer))
    assert {answer.answer.status for answer in served} == {200}
    assert len(served) > 100
    order = {name: place for place, name in enumerate(names)}
    assert {answer.version for answer in served} <= set(order)
    for answer, later in pairwise(sorted(served, key=lambda answer: answer.sent_at)):
        if later.sent_at > answer.at:  # who asks after an answer does not fall behind it
            assert order[later.version] >= order[answer.version]
    last = (await fleet.settled()).runs["run"].current
    assert last == names[-1]


# 12: one adapter, two numbers


@pytest.fixture
async def told(fleet: WholeFleet, caplog: pytest.LogCaptureFixture) -> tuple[str, dict[str, str]]:
    """The only version there ever was, and everything that anybody said of it, by who said it."""
    caplog.set_level(logging.INFO)
    trainer = await fleet.trainer()
    name = await fleet.promoted(trainer)
    answer = await fleet.complete("run")
    await wait_until(lambda: _has_rows(fleet), timeout_s=20)
    manifest = await fleet.registry.manifest(name)
    assert manifest is not None
    said = {
        "events": str(await fleet.control.read_stream(fleet.keys.events, "0")),
        "ledger": str(await fleet.rows()),
        "headers": str(dict(answer.headers)),
        "answer": answer.body.decode(),
        "models": (await fleet.get("/v1/models")).body.decode(),
        "health": (await fleet.get("/health")).body.decode(),
        "metrics": (await fleet.get("/metrics")).body.decode(),
        "log": caplog.text,
        "store": str(sorted(path.name for path in (fleet.directory / "store" / "run").iterdir())),
        "manifest": manifest.adapter_id,
    }
    for replica in fleet.replicas.values():
        async with aiohttp.ClientSession() as session, session.get(replica.url + "/v1/models") as listed:
            said[replica.name] = await listed.text()
    return name, said


async def _has_rows(fleet: WholeFleet) -> bool:
    return bool(await fleet.rows())


async def test_s12_one_id_wherever_a_version_is_spoken_of(told: tuple[str, dict[str, str]]) -> None:
    name, said = told
    for who, text in said.items():
        found = set(ANY_VERSION.findall(text))
        assert found <= {name}, who
        assert found or who in ("metrics",), f"{who} says nothing of it"
    assert CONFIG_FILE not in said["models"]
