"""Rows 13 to 18: the store shows a version late, in part, wrongly, or not at all."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from adaptersync.agent import staging as staging_module
from adaptersync_core import store as store_module
from adaptersync_core.config import Config
from adaptersync_core.errors import StoreError
from adaptersync_core.events import ReplicaAcked
from adaptersync_core.manifest import CONFIG_FILE, FILES, MANIFEST_FILE, WEIGHTS_FILE
from adaptersync_core.store import verify_files
from adaptersync_tools.simulator.scheduler import Latency
from adaptersync_tools.simulator.store import LaggingView
from support import dying
from support.artifacts import small_adapter
from support.wait import wait_until
from support.whole_fleet import WholeFleet, whole_fleet

LATE_S = 1.5


@pytest.fixture
async def mounted(config: Config, tmp_path: Path) -> AsyncIterator[WholeFleet]:
    """A fleet of three that takes its bytes from mounts alone, with a short patience for what they do not show."""
    settings = replace(
        config,
        agent=replace(config.agent, visible_timeout_s=1.0),
        redis=replace(config.redis, lane_bytes=0),
        coordinator=replace(config.coordinator, min_ready=2),
    )
    async with whole_fleet(settings, tmp_path, replicas=3) as fleet:
        yield fleet


def view(fleet: WholeFleet, number: int, **lag: Any) -> LaggingView:
    """From now on, how that replica's agent sees the store."""
    seen = LaggingView(fleet[number].mount, **lag)
    fleet.readers[fleet[number].mount] = seen
    return seen


async def new_agent(fleet: WholeFleet, number: int, **settings: float) -> None:
    """An agent opens its view of the store when it starts."""
    await fleet[number].stop_agent()
    fleet[number].start_agent(**settings)
    await fleet.ready()


async def refusal(fleet: WholeFleet, version: str, replica: str) -> str:
    """Why a replica refused a version, once it did."""
    found: list[str] = []

    async def refused() -> bool:
        found[:] = [
            event.reason
            for event in await fleet.events("replica.acked", version)
            if isinstance(event, ReplicaAcked) and event.replica == replica and not event.accepted
        ]
        return bool(found)

    await wait_until(refused, timeout_s=20, what=f"{replica} refuses {version}")
    return found[0]


# 13: looked too early, and blind for a while


@pytest.mark.parametrize("blind_s", [0.0, 30.0], ids=["late", "late and blind after a look"])
async def test_s13_a_late_mount_costs_its_delay_and_little_more(mounted: WholeFleet, blind_s: float) -> None:
    fleet = mounted
    trainer = await fleet.trainer()
    await fleet.promoted(trainer)
    seen = view(fleet, 1, visibility_delay_s=LATE_S, negative_ttl_s=blind_s)
    await new_agent(fleet, 1, visible_timeout_s=20.0)
    await asyncio.sleep(LATE_S)  # what is there already comes into view
    asked_before = set(seen.looks)
    publication = await fleet.publish(trainer)
    announced = time.monotonic()
    assert (await fleet.outcome(publication)).state == "current"
    waited_s = time.monotonic() - announced
    assert waited_s > LATE_S / 2  # the mount was waited for, nothing else had the bytes
    assert waited_s < LATE_S + 5  # a busy machine; the rule itself is in the next test
    looked = {path for path in set(seen.looks) - asked_before if publication.adapter_id not in str(path)}
    assert not looked, "an agent looks only for what was announced"


async def test_s13_blind_mounts_of_all_replicas_cost_their_delay_and_a_second(mounted: WholeFleet) -> None:
    """The first version of a run, so that nothing of its path was there; the mounts stay blind for half a minute."""
    fleet = mounted
    late_s, blind_s = 3.0, 30.0
    seen = {}
    for number in range(3):
        seen[number] = view(fleet, number, visibility_delay_s=late_s, negative_ttl_s=blind_s)
        await new_agent(fleet, number, visible_timeout_s=20.0)
    trainer = await fleet.trainer()
    publication = await fleet.publish(trainer)
    assert (await fleet.outcome(publication)).state == "current"
    acks = await fleet.events("replica.acked", publication.adapter_id)
    assert len(acks) == 3
    for event in acks:
        assert isinstance(event, ReplicaAcked)
        assert event.accepted
        assert event.visible_s is not None
        assert late_s / 2 < event.visible_s < late_s + 1
    for looked in seen.values():
        assert set(looked.looks.values()) == {1}, "no name was asked for twice"


async def test_s13_nobody_looks_at_the_store_before_a_version_is_announced(mounted: WholeFleet) -> None:
    """The publisher stores first and announces then; until it has, no mount is asked for the version's path."""
    fleet = mounted
    seen = view(fleet, 1)
    await new_agent(fleet, 1)
    trainer = await fleet.trainer()
    await fleet.promoted(trainer)
    announce, may = trainer._announce, asyncio.Event()
    loop = asyncio.get_running_loop()

    async def late(publication, since) -> None:  # type: ignore[no-untyped-def]
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(may.wait(), loop))
        await announce(publication, since)

    trainer._announce = late  # type: ignore[method-assign]
    publishing = asyncio.create_task(fleet.publish(trainer))
    await wait_until(lambda: any(path.name.startswith("run-v2-") for path in (fleet.directory / "store/run").iterdir()))
    await asyncio.sleep(0.5)  # five heartbeats
    assert not [path for path in seen.looks if "run-v2-" in str(path)]
    may.set()
    publication = await publishing
    assert (await fleet.outcome(publication)).state == "current"
    assert [path for path in seen.looks if publication.adapter_id in str(path)]


# 14: one mount never shows it


async def test_s14_one_blind_mount_of_three_is_ejected_by_name_and_the_version_comes(mounted: WholeFleet) -> None:
    fleet = mounted
    trainer = await fleet.trainer()
    old = await fleet.promoted(trainer)
    view(fleet, 2, visibility_delay_s=3600)
    await new_agent(fleet, 2)
    async with fleet.traffic("run", clients=3) as served:
        publication = await fleet.publish(trainer)
        reason = await refusal(fleet, publication.adapter_id, "replica-2")
        assert "No such file" in reason
        assert "check the mount" in reason
        assert (await fleet.outcome(publication)).state == "current"
        await wait_until(lambda: served[-1].version == publication.adapter_id, timeout_s=20)
    assert {answer.answer.status for answer in served} == {200}
    assert {answer.version for answer in served} == {old, publication.adapter_id}
    table = await fleet.table()
    assert table.members["replica-2"].state != "ready"
    fleet.readers.clear()  # the mount is mended
    await fleet[2].stop_agent()
    fleet[2].start_agent()
    await fleet.ready(3)


@pytest.mark.parametrize("blind", [2, 3], ids=["most", "all"])
async def test_s14_most_mounts_blind_is_the_versions_end_and_the_old_one_serves(
    mounted: WholeFleet, blind: int
) -> None:
    fleet = mounted
    trainer = await fleet.trainer()
    old = await fleet.promoted(trainer)
    for number in range(blind):
        view(fleet, number, visibility_delay_s=3600)
        await new_agent(fleet, number)
    async with fleet.traffic("run") as served:
        outcome = await fleet.outcome(await fleet.publish(trainer))
    assert outcome.state == "rolled_back"
    # two refusals are most of three: the third may come too late to be named
    assert sum(f"replica-{number}: " in outcome.reason for number in range(blind)) >= 2
    assert {(answer.answer.status, answer.version) for answer in served} == {(200, old)}
    await fleet.ready()
    assert await fleet.current() == old
    await fleet.settled()  # who had loaded it gave it up


# 15: a marker is there, and what it marks is not


HARMS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "weights missing": (lambda place: (place / WEIGHTS_FILE).unlink(), WEIGHTS_FILE, "No such file"),
    "config missing": (lambda place: (place / CONFIG_FILE).unlink(), CONFIG_FILE, "No such file"),
    "weights truncated": (lambda place: os.truncate(place / WEIGHTS_FILE, 100), WEIGHTS_FILE, "wrong size"),
    "weights empty": (lambda place: os.truncate(place / WEIGHTS_FILE, 0), WEIGHTS_FILE, "wrong size"),
    "weights longer": (lambda place: _append(place / WEIGHTS_FILE), WEIGHTS_FILE, "wrong size"),
    "weights flipped": (lambda place: _flip(place / WEIGHTS_FILE, -1), WEIGHTS_FILE, "wrong bytes"),
    "header flipped": (lambda place: _flip(place / WEIGHTS_FILE, 9), WEIGHTS_FILE, "wrong bytes"),
    "config of another": (lambda place: _flip(place / CONFIG_FILE, 20), CONFIG_FILE, "wrong bytes"),
}


def _append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("harm", HARMS)
async def test_s15_what_is_not_the_manifests_bytes_is_never_loaded(
    mounted: WholeFleet, harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = mounted
    trainer = await fleet.trainer()
    old = await fleet.promoted(trainer)
    rename = Path.rename
    spoil, file, why = HARMS[harm]

    def spoiled(path: Path, target: Path) -> Path:
        if path.name.startswith(".staging-"):
            spoil(path)  # between its last check and its appearance
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", spoiled)
    publication = await fleet.publish(trainer)
    outcome = await fleet.outcome(publication)
    assert outcome.state == "rolled_back"
    assert why in outcome.reason
    assert file in outcome.reason
    assert await fleet.current() == old
    for replica in fleet.replicas.values():
        assert publication.adapter_id not in replica.listed()
        assert replica.sim.calls["/v1/load_lora_adapter"] <= 2  # the canary, and the version before
    assert (await fleet.complete("run")).headers["x-adaptersync-version"] == old


@pytest.mark.parametrize("harm", ["torn", "corrupt"])
async def test_s15_one_mount_that_shows_wrong_bytes_is_that_replicas_fault(mounted: WholeFleet, harm: str) -> None:
    fleet = mounted
    trainer = await fleet.trainer()
    await fleet.promoted(trainer)
    seen = view(fleet, 0)
    await new_agent(fleet, 0)
    opened = seen.open

    def spoiled(path: Path):  # type: ignore[no-untyped-def]
        if path.name == WEIGHTS_FILE and "run-v2-" in str(path):
            seen.tear(path, 50) if harm == "torn" else seen.corrupt(path, 200)
        return opened(path)

    seen.open = spoiled  # type: ignore[method-assign]
    publication = await fleet.publish(trainer)
    assert (await fleet.outcome(publication)).state == "current"
    reason = await refusal(fleet, publication.adapter_id, "replica-0")
    assert {"torn": "wrong size", "corrupt": "wrong bytes"}[harm] in reason
    assert publication.adapter_id not in fleet[0].listed()
    assert (await fleet.table()).members["replica-0"].state != "ready"


# 16: a save fails half way and nobody notices


@pytest.mark.parametrize("call", ["write", "fsync", "rename", "mkdir"])
async def test_s16_a_failed_save_is_an_error_and_no_version(
    fleet: WholeFleet, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    trainer = await fleet.trainer()
    old = await fleet.promoted(trainer)
    told = await fleet.events()
    full = OSError(28, "No space left on device")

    def fails(*_: object, **__: object) -> None:
        raise full

    source = fleet.adapter()
    with monkeypatch.context() as patch:
        match call:
            case "write":
                patch.setattr(store_module, "copy_verified", fails)
            case "fsync":
                patch.setattr(os, "fsync", fails)
            case _:
                patch.setattr(Path, call, fails)
        with pytest.raises(StoreError, match="No space left"):
            await fleet.publish(trainer, source)
    assert [path.name for path in (fleet.directory / "store" / "run").iterdir()] == [old]
    assert await fleet.events() == told
    name = await fleet.promoted(trainer)  # and the next one goes through

    async def served() -> bool:
        return (await fleet.complete("run")).headers["x-adaptersync-version"] == name

    await wait_until(served)  # the router hears of it a moment later


async def test_s16_a_coordinator_whose_journal_could_not_be_written_goes_on_by_itself(
    fleet: WholeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = await fleet.trainer()
    await fleet.promoted(trainer)
    failed = threading.Event()

    def full(*_: object) -> None:
        failed.set()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("adaptersync.coordinator.journal._drop_torn", full)
        patch.setattr("adaptersync.coordinator.journal.write_durably", full)
        publication = await fleet.publish(trainer)
        assert await asyncio.to_thread(failed.wait, 10)
    assert (await fleet.outcome(publication)).state == "current"


async def test_s16_a_publisher_killed_anywhere_leaves_all_or_nothing(fleet: WholeFleet) -> None:
    source = small_adapter(fleet.directory / "source")
    command = [sys.executable, dying.__file__, str(fleet.directory / "dead"), str(source)]
    run = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=50, env=os.environ | {"PYTHONPATH": path()}
    )
    assert run.returncode == 0, run.stderr
    died, _ = map(int, run.stdout.split())
    assert died > 20
    assert await fleet.events("adapter.published") == []


def path() -> str:
    return os.pathsep.join(sys.path)


async def test_s16_a_full_disk_of_one_of_two_replicas_is_its_own_fault(
    fleet: WholeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the fleet refuses, and the version comes all the same; the replica is back when there is room."""
    monkeypatch.setattr(staging_module, "DISK_S", 0.5)
    trainer = await fleet.trainer()
    await fleet.promoted(trainer)
    opened = Path.open

    def full(path: Path, mode: str = "r", *more: Any, **options: Any) -> Any:
        if "w" in mode and "staged/replica-0" in str(path):
            raise OSError(28, os.strerror(28))
        return opened(path, mode, *more, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        async with fleet.traffic("run") as served:
            publication = await fleet.publish(trainer)
            reason = await refusal(fleet, publication.adapter_id, "replica-0")
            assert "No space left" in reason
            assert (await fleet.outcome(publication)).state == "current"
        assert {answer.answer.status for answer in served} == {200}
        member = (await fleet.table()).members["replica-0"]
        assert member.state == "ejected"
        assert f"cannot take {publication.adapter_id}" in member.reason
        faults = {
            event.replica: event.fault
            for event in await fleet.events("replica.acked", publication.adapter_id)
            if isinstance(event, ReplicaAcked)
        }
        assert faults == {"replica-0": "replica", "replica-1": ""}
    await fleet.ready(2)


# 17: written 0600, read by another user


@pytest.mark.parametrize("umask", [0o022, 0o077])
async def test_s17_published_files_can_be_read_by_whoever_serves(fleet: WholeFleet, umask: int) -> None:
    trainer = await fleet.trainer()
    source = fleet.adapter()
    for file in FILES:
        (source / file).chmod(0o600)
    before = os.umask(umask)
    try:
        name = await fleet.promoted(trainer, source)
    finally:
        os.umask(before)
    place = fleet.store.directory(name)
    for file in (*FILES, MANIFEST_FILE):
        assert (place / file).stat().st_mode & 0o444 == 0o444
    for directory in (place, place.parent):
        assert directory.stat().st_mode & 0o555 == 0o555


# 18: deleted while an engine may still read it


async def test_s18_files_go_only_after_unload_and_drain_on_every_replica(config: Config, tmp_path: Path) -> None:
    async with whole_fleet(config, tmp_path, latency=Latency(decode_tokens_per_s=10)) as fleet:
        trainer = await fleet.trainer()
        old = await fleet.promoted(trainer)
        slow = asyncio.create_task(fleet.complete(old, max_tokens=40, ignore_eos=True))
        await wait_until(lambda: any(r.sim.engine.running for r in fleet.replicas.values()))
        for _ in range(2):
            await fleet.promoted(trainer)
        order: list[str] = []
        while not slow.done():  # from the first moment to the last
            for replica in fleet.replicas.values():
                assert old in replica.staged(), f"{replica.name} deleted what an engine may read"
            await asyncio.sleep(0.05)
        assert (await slow).status == 200

        def watch() -> bool:
            for replica in fleet.replicas.values():
                for what, there in (("unloaded", replica.listed()), ("deleted", replica.staged())):
                    if old not in there and f"{replica.name} {what}" not in order:
                        order.append(f"{replica.name} {what}")
            return len(order) == 4

        await wait_until(watch, timeout_s=20)
        assert {entry.split()[1] for entry in order[:2]} == {"unloaded"}, order
        assert all(not r.sim.scheduler.dead.is_set() for r in fleet.replicas.values())
        verify_files(fleet.store.read_manifest(old), fleet.store.directory(old))  # the store keeps them


async def test_s18_a_replica_that_cannot_unload_keeps_everybodys_files(
    fleet: WholeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    from adaptersync_core.errors import EngineUnavailable
    from adaptersync_core.vllm import VllmClient

    unload, stuck = VllmClient.unload, fleet[1].url

    async def stubborn(self: VllmClient, name: str) -> None:
        if self.url == stuck:
            raise EngineUnavailable("no answer", engine=self.url)
        await unload(self, name)

    trainer = await fleet.trainer()
    old = await fleet.promoted(trainer)
    monkeypatch.setattr(VllmClient, "unload", stubborn)
    for _ in range(2):
        await fleet.promoted(trainer)
    await wait_until(lambda: old not in fleet[0].listed(), timeout_s=20)
    await asyncio.sleep(0.5)  # five heartbeats
    assert old in fleet[0].staged()
    assert old in fleet[1].staged()
    assert old in (await fleet.table()).versions
    monkeypatch.undo()
    await wait_until(lambda: old not in fleet[0].staged() | fleet[1].staged(), timeout_s=20)
