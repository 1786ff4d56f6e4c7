"""Rows of what goes wrong in the field, for an unmodified TRL: the calls are TRL's own, all behind them is real.

What the relay does where the fleet cannot take a version is in test_unmodified_trl.py; a whole training, with a real
TRL, in test_trained_through.py.
"""

from __future__ import annotations

import asyncio
import errno
import os
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from adaptersync_core import store as store_module
from adaptersync_core.config import Config
from adaptersync_core.events import ReplicaAcked
from adaptersync_core.manifest import CONFIG_FILE, WEIGHTS_FILE
from adaptersync_core.records import Request
from adaptersync_tools.demo.trl_calls import ScriptedTRL, TrainingDied
from support.starting import PARTS, start_part
from support.wait import wait_until
from support.whole_fleet import WholeFleet, whole_fleet

WORDS = [1, 2, 3]


async def begun(url: str) -> ScriptedTRL:
    trl = ScriptedTRL(url)
    await trl.construct()
    return trl


async def served(trl: ScriptedTRL, name: str) -> tuple[str, str]:
    """The version that answered for a name, and what it is marked as a substitute for."""
    status, headers, body = await trl.rollout(name, WORDS)
    assert status == 200, body
    return headers["x-adaptersync-version"], headers.get("x-adaptersync-substituted", "")


# 5: the same weights again, or weights that change nothing; TRL's first version is always of this kind


@pytest.mark.parametrize("what", ["again", "zero"])
async def test_s05_what_changes_nothing_is_a_version_like_any_other(fleet: WholeFleet, what: str) -> None:
    async with fleet.relay() as url:
        trl = await begun(url)
        source = fleet.adapter()
        first, _ = await served(trl, await trl.sync(source))
        second, marked = await served(trl, await trl.sync(source if what == "again" else fleet.adapter(scale=0.0)))
        assert (second == await fleet.current() != first, marked) == (True, "")
        noop = {event.version: event.noop for event in await fleet.events("adapter.published")}
        assert (bool(noop[first]), bool(noop[second])) == (False, True)
        third, marked = await served(trl, await trl.sync(fleet.adapter()))
        assert (third == await fleet.current(), marked) == (True, "")


# 10: the label moves before replicas have the version


async def test_s10_trl_hears_of_a_version_after_every_replica_has_it(fleet: WholeFleet) -> None:
    """Its load is not answered before, and until then it asks for the one before. Who asks early is served that."""
    async with fleet.relay() as url:
        trl = await begun(url)
        before = await trl.sync(fleet.adapter())
        old = await fleet.current()
        fleet[1].faults(delay_load_s=1.5)
        loading = asyncio.create_task(trl.sync(fleet.adapter()))
        await wait_until(lambda: said(fleet, 1), timeout_s=20)
        assert await served(trl, before) == (old, "")
        assert await served(trl, "trl-policy-v2") == (old, "trl-policy-v2")
        assert not loading.done()
        name = await loading
        new = await fleet.current()
        assert await served(trl, name) == (new, "")
        ((promoted, _),) = await fleet.timed_events("version.promoted", str(new))
        acks = [(at, event.replica) for at, event in await fleet.timed_events("replica.acked", str(new))]
        assert {replica for _, replica in acks} == set(fleet.replicas)
        assert max(at for at, _ in acks) <= promoted


async def said(fleet: WholeFleet, replicas: int) -> bool:
    """Whether so many have said that they have the version which is on its way."""
    candidate = (await fleet.table()).candidate("run")
    acks = await fleet.events("replica.acked", candidate) if candidate else []
    return len([ack for ack in acks if isinstance(ack, ReplicaAcked) and ack.accepted]) == replicas


# 16: a save fails half way and nobody notices


@pytest.mark.parametrize("what", ["no weights", "half of the weights", "half of the settings", "nothing"])
async def test_s16_half_of_an_adapter_ends_the_training_with_the_reason_and_is_no_version(
    fleet: WholeFleet, what: str
) -> None:
    async with fleet.relay() as url:
        trl = await begun(url)
        name = await trl.sync(fleet.adapter())
        old = await fleet.current()
        source = fleet.adapter()
        match what:
            case "no weights":
                (source / WEIGHTS_FILE).unlink()
            case "half of the weights":
                os.truncate(source / WEIGHTS_FILE, (source / WEIGHTS_FILE).stat().st_size // 2)
            case "half of the settings":
                os.truncate(source / CONFIG_FILE, 20)
            case _:
                source = source / "nowhere"
        with pytest.raises(TrainingDied, match=r"501 .*(adapter|file)"):
            await trl.sync(source)
        assert [path.name for path in (fleet.directory / "store" / "run").iterdir()] == [old]
        assert len(await fleet.events("adapter.published")) == 1
        assert await served(trl, name) == (old, "")


# 23: a failed send leaves a cached export, which goes out the next time


async def test_s23_each_name_is_of_the_bytes_that_were_there_when_it_was_loaded(
    fleet: WholeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where TRL writes every version into the same directory, and every other one cannot be stored."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    place = fleet.directory / "the-one-directory"
    async with fleet.relay() as url:
        trl = await begun(url)
        for step in range(1, 6):
            source = fleet.adapter()
            wanted = (source / WEIGHTS_FILE).read_bytes()
            place.mkdir(exist_ok=True)
            for file in source.iterdir():
                (place / file.name).write_bytes(file.read_bytes())
            with monkeypatch.context() as patch:
                if step % 2 == 0:
                    patch.setattr(store_module, "copy_verified", full)
                name = await trl.sync(place)
            version, marked = await served(trl, name)
            assert marked == (name if step % 2 == 0 else "")
            stored = (fleet.store.directory(version) / WEIGHTS_FILE).read_bytes()
            assert (stored == wanted) == (step % 2 == 1)
        assert len(await fleet.events("version.promoted")) == 3


# 28: trainer and fleet restart, and each waits for the other


@pytest.mark.parametrize("order", [order for order in permutations(PARTS) if order[-1] != "trainer"][::4], ids="-".join)
async def test_s28_trl_waits_for_what_starts_after_it(config: Config, tmp_path: Path, order: tuple[str, ...]) -> None:
    """TRL asks a server for its health until it is well, and then all it needs to know is there."""
    settings = replace(config, router=replace(config.router, port=free_port()))
    async with whole_fleet(settings, tmp_path, start=False) as fleet:
        fleet.url = f"http://127.0.0.1:{settings.router.port}"
        async with fleet.relay() as url:
            training: asyncio.Task[tuple[str, str]] | None = None
            for part in order:
                if part == "trainer":
                    training = asyncio.create_task(first_rollout(url, fleet))
                    await asyncio.sleep(0.2)  # it asks, and nothing is there
                    assert not training.done()
                else:
                    await start_part(fleet, part)
            assert training is not None
            assert await asyncio.wait_for(training, 30) == (await fleet.current(), "")


@pytest.mark.parametrize("relay", ["lives", "restarts too"])
async def test_s28_trl_goes_on_with_a_fleet_that_lost_everything(config: Config, tmp_path: Path, relay: str) -> None:
    """Engines without an adapter and an emptied Redis; the trainer resumes from its checkpoint, or never noticed."""
    settings = replace(config, router=replace(config.router, port=free_port()))
    async with whole_fleet(settings, tmp_path) as fleet:
        async with fleet.relay() as url:
            trl = await begun(url)
            for _ in range(3):
                await trl.sync(fleet.adapter())
            old = await fleet.current()
            await fleet.stop_coordinator()
            for replica in fleet.replicas.values():
                await replica.stop()
            await fleet.stop_router()
            await fleet.control.command("FLUSHALL")
            fleet.start_coordinator()
            for replica in fleet.replicas.values():
                await replica.start()
            await fleet.start_router()
            if relay == "lives":
                name = await trl.sync(fleet.adapter())
                assert await served(trl, name) == (await fleet.current(), "")
                assert await fleet.current() != old
        if relay == "restarts too":
            async with fleet.relay() as url:
                resumed = ScriptedTRL(url, version=2)
                await healthy(resumed)
                await resumed.construct()
                name = await resumed.sync(fleet.adapter())
                assert name == "trl-policy-v3"
                assert await served(resumed, name) == (await fleet.current(), "")
                assert await fleet.current() != old


async def first_rollout(url: str, fleet: WholeFleet) -> tuple[str, str]:
    trl = ScriptedTRL(url)
    await healthy(trl)
    await trl.construct()
    return await served(trl, await trl.sync(fleet.adapter()))


async def healthy(trl: ScriptedTRL) -> None:
    """As TRL does before anything else, and more often."""

    async def well() -> bool:
        return (await trl._call("GET", "/health"))[0] == 200

    await wait_until(well, timeout_s=30)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# 29: staleness is what a sample has when it is consumed


async def test_s29_the_ledger_knows_how_old_what_trl_trained_on_was(fleet: WholeFleet) -> None:
    """TRL takes every sample for one of the name it asked for; what stood in for it was older, and its row says so."""
    async with fleet.relay(promotion_timeout_s=3.0) as url:
        trl = await begun(url)
        names = [await trl.sync(fleet.adapter()) for _ in range(2)]
        await fleet.registry.request(Request(kind="rollback", run="run", reason="reward fell"))
        await wait_until(lambda: voided(fleet), timeout_s=20)
        names += [await trl.sync(fleet.adapter())]
        for name in names:
            await served(trl, name)
        await wait_until(lambda: ended(fleet, 3), timeout_s=20)
        rows: list[dict[str, Any]] = [row for row in await fleet.rows() if row["outcome"] == "ok"]
        seqs = [int(row["version"].split("-v")[1].split("-")[0]) for row in rows]
        # of the second nothing is served any more: of the oldest that is
        assert [(seq, row.get("substituted", "")) for seq, row in zip(seqs, rows, strict=True)] == [
            (1, ""),
            (1, names[1]),
            (3, ""),
        ]
        promoted = [event.version for event in await fleet.events("version.promoted")]
        ages = [len(promoted) - 1 - promoted.index(row["version"]) for row in rows]
        assert ages == [2, 2, 0]  # promotions since, the voided one among them


async def voided(fleet: WholeFleet) -> bool:
    return bool(await fleet.events("version.voided"))


async def ended(fleet: WholeFleet, count: int) -> bool:
    return sum(row["outcome"] != "open" for row in await fleet.rows()) >= count
