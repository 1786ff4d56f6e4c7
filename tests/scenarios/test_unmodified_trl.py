"""What an unmodified TRL meets: never a dead end, and never another version without a word. Relay to ledger."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from adaptersync_core import store as store_module
from adaptersync_core.config import Config
from adaptersync_core.errors import ArtifactCorrupt
from adaptersync_core.records import Request
from adaptersync_tools.demo.trl_calls import ScriptedTRL, TrainingDied
from adaptersync_tools.simulator.scheduler import Latency
from support.wait import wait_until
from support.whole_fleet import WholeFleet, whole_fleet

WORDS = [1, 2, 3]


async def _trained(url: str, fleet: WholeFleet, syncs: int, **more: Any) -> ScriptedTRL:
    trl = ScriptedTRL(url, **more)
    await trl.construct()
    for _ in range(syncs):
        await trl.sync(fleet.adapter())
    return trl


async def _served(trl: ScriptedTRL, name: str) -> tuple[str, str]:
    """The version that answered for a name, and the name it stood in for; the body says the same version."""
    status, headers, body = await trl.rollout(name, WORDS)
    assert status == 200, body
    assert body["model"] == headers["x-adaptersync-version"]
    return headers["x-adaptersync-version"], headers.get("x-adaptersync-substituted", "")


async def _row(fleet: WholeFleet) -> dict[str, str]:
    """The row of the only rollout so far."""
    (row,) = await _ended(fleet)
    return row


async def _named(fleet: WholeFleet, seq: int) -> str:
    name = await fleet.registry.find_seq("run", seq)
    assert name is not None
    return name


# what the fleet had no room or no time for


async def test_a_version_without_room_is_stood_in_for(config: Config, tmp_path: Path) -> None:
    """Three runs serve a version each, and an engine comes back with three places."""
    async with whole_fleet(config, tmp_path, max_loras=4, max_cpu_loras=4) as fleet, fleet.relay() as url:
        trl = await _trained(url, fleet, 1)
        for other in ("other", "third"):
            await fleet.promoted(await fleet.trainer(other))
        fleet[1].engine_config = replace(fleet.engine, max_loras=3, max_cpu_loras=3)
        await fleet[1].restart_engine()
        await fleet.state("replica-1", "joining")
        await fleet.ready()
        name = await trl.sync(fleet.adapter())
        assert await _served(trl, name) == (await _named(fleet, 1), name)
        row = await _row(fleet)
        assert (row["version"], row["substituted"], row["outcome"]) == (await _named(fleet, 1), name, "ok")
        record = await fleet.registry.version(await _named(fleet, 2))
        assert record is not None
        assert (record.state, record.want) == ("rolled_back", "room")
        assert await _served(trl, "trl-policy-v1") == (await _named(fleet, 1), "")


async def test_a_version_that_takes_too_long_is_stood_in_for_also_when_it_is_served_at_last(fleet: WholeFleet) -> None:
    """One name is one version: what trains under it does not change under the trainer."""
    async with fleet.relay(promotion_timeout_s=3.0) as url:
        trl = await _trained(url, fleet, 1)
        for replica in fleet.replicas.values():
            replica.faults(delay_load_s=5.0)
        name = await trl.sync(fleet.adapter())
        assert await _served(trl, name) == (await _named(fleet, 1), name)
        assert (await _row(fleet))["substituted"] == name
        await wait_until(lambda: _current(fleet, 2), timeout_s=20)
        assert await _served(trl, name) == (await _named(fleet, 1), name)
        for replica in fleet.replicas.values():
            replica.faults(delay_load_s=0.0)
        after = await trl.sync(fleet.adapter())
        assert await _served(trl, after) == (await _named(fleet, 3), "")


async def test_a_version_the_fleet_kept_silent_about_is_stood_in_for(config: Config, tmp_path: Path) -> None:
    """Rolled back because nobody had loaded it by the deadline."""
    settings = replace(config, coordinator=replace(config.coordinator, min_ready=2, deadline_s=1.0))
    async with whole_fleet(settings, tmp_path) as fleet, fleet.relay() as url:
        trl = await _trained(url, fleet, 1)
        for replica in fleet.replicas.values():
            replica.faults(delay_load_s=4.0)
        name = await trl.sync(fleet.adapter())
        record = await fleet.registry.version(await _named(fleet, 2))
        assert record is not None
        assert (record.state, record.want) == ("rolled_back", "time")
        assert await _served(trl, name) == (await _named(fleet, 1), name)


async def test_a_version_that_could_not_be_stored_is_stood_in_for(
    fleet: WholeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing says that it is bad, and the next one may find room."""

    def full(*arguments: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with fleet.relay() as url:
        trl = await _trained(url, fleet, 0)
        with monkeypatch.context() as patch:
            patch.setattr(store_module, "copy_verified", full)
            with pytest.raises(TrainingDied, match="nothing before it: version could not be stored: No space left"):
                await trl.sync(fleet.adapter())
        await trl.sync(fleet.adapter())
        first = await fleet.current()
        assert first is not None
        with monkeypatch.context() as patch:
            patch.setattr(store_module, "copy_verified", full)
            name = await trl.sync(fleet.adapter())
        assert await _served(trl, name) == (first, name)
        assert (await _row(fleet))["substituted"] == name
        after = await trl.sync(fleet.adapter())
        assert await _served(trl, after) == (await fleet.current(), "")
        assert await fleet.current() != first


async def test_bytes_that_change_while_they_are_published_end_the_training(
    fleet: WholeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(*arguments: object, **more: object) -> None:
        raise ArtifactCorrupt("file has the wrong bytes")

    async with fleet.relay() as url:
        trl = await _trained(url, fleet, 1)
        monkeypatch.setattr(store_module, "copy_verified", changed)
        with pytest.raises(TrainingDied, match="wrong bytes"):
            await trl.sync(fleet.adapter())


async def test_a_version_that_is_bad_ends_the_training_with_the_reason(fleet: WholeFleet) -> None:
    async with fleet.relay() as url:
        trl = await _trained(url, fleet, 1)
        for replica in fleet.replicas.values():
            replica.faults(fail_loads=1)
        with pytest.raises(TrainingDied, match="the fleet refused it"):
            await trl.sync(fleet.adapter())
        assert await _served(trl, "trl-policy-v1") == (await _named(fleet, 1), "")


async def _current(fleet: WholeFleet, seq: int) -> bool:
    return await fleet.current() == await _named(fleet, seq)


# what is served no longer


async def test_a_retired_version_is_stood_in_for_by_the_oldest_of_the_window(fleet: WholeFleet) -> None:
    async with fleet.relay() as url:
        trl = await _trained(url, fleet, 4)
        await fleet.settled()
        assert await _served(trl, "trl-policy-v1") == (await _named(fleet, 3), "trl-policy-v1")
        row = await _row(fleet)
        assert (row["version"], row["substituted"]) == (await _named(fleet, 3), "trl-policy-v1")


async def test_what_the_relay_has_not_heard_of_yet_is_no_dead_end(
    fleet: WholeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router refuses a version that was withdrawn a moment ago: the relay asks anew, and TRL hears nothing."""
    monkeypatch.setattr("adaptersync.trainer.relay.LOOK_S", 3600.0)
    async with fleet.relay() as url:
        trl = await _trained(url, fleet, 2)
        assert await _served(trl, "trl-policy-v2") == (await _named(fleet, 2), "")
        await fleet.registry.request(Request(kind="rollback", run="run", reason="reward fell"))
        await wait_until(lambda: _current(fleet, 1), timeout_s=20)
        await wait_until(lambda: _refused(fleet, 2), timeout_s=20)
        assert await _served(trl, "trl-policy-v2") == (await _named(fleet, 1), "trl-policy-v2")


async def _refused(fleet: WholeFleet, seq: int) -> bool:
    return (await fleet.complete(f"run@v{seq}")).status == 410


async def test_what_is_in_flight_when_its_version_is_voided_ends_and_is_marked(config: Config, tmp_path: Path) -> None:
    async with (
        whole_fleet(config, tmp_path, latency=Latency(decode_tokens_per_s=20)) as fleet,
        fleet.relay() as url,
    ):
        trl = await _trained(url, fleet, 2)
        asking = asyncio.create_task(trl.rollout("trl-policy-v2", WORDS, max_tokens=40))
        await wait_until(lambda: any(replica.sim.engine.running for replica in fleet.replicas.values()))
        await fleet.registry.request(Request(kind="rollback", run="run", reason="reward fell"))
        await wait_until(lambda: _refused(fleet, 2), timeout_s=20)
        assert not asking.done()
        status, headers, body = await asking
        assert (status, body["model"]) == (200, await _named(fleet, 2))
        assert headers["x-adaptersync-voided"] == "1"
        request_id = headers["x-adaptersync-request-id"]
        await wait_until(lambda: _has_row(fleet, request_id), timeout_s=20)
        (row,) = [row for row in await _ended(fleet) if row["request_id"] == request_id]
        assert (row["version"], row["outcome"], row["voided"]) == (await _named(fleet, 2), "ok", "true")
        assert await _served(trl, "trl-policy-v2") == (await _named(fleet, 1), "trl-policy-v2")


async def _has_row(fleet: WholeFleet, request_id: str) -> bool:
    return any(row["request_id"] == request_id for row in await _ended(fleet))


# a trainer that began anew


async def test_names_of_a_dead_epoch_are_stale_and_said_to_be(fleet: WholeFleet) -> None:
    """The rollout process of the trainer before goes on for a while: it is served, and marked."""
    async with fleet.relay() as url:
        zombie = await _trained(url, fleet, 2)
        old = await fleet.current()
        resumed = await _trained(url, fleet, 0, version=1)
        version, marked = await _served(zombie, "trl-policy-v2")
        assert version in (await fleet.table()).versions
        assert marked == "trl-policy-v2"  # whatever serves it: no trainer of this epoch has such a name
        name = await resumed.sync(fleet.adapter())
        assert name == "trl-policy-v2"  # which is another now
        assert await fleet.current() == await _named(fleet, 3) != old
        await fleet.settled()
        assert await _served(resumed, name) == (await _named(fleet, 3), "")
        assert await _served(zombie, "trl-policy-v1") == (await _named(fleet, 3), "trl-policy-v1")
        rows = {row["substituted"]: row for row in await _ended(fleet, 3) if "substituted" in row}
        assert rows["trl-policy-v1"]["version"] == await _named(fleet, 3)


async def test_a_trainer_behind_a_relay_of_before_is_fenced(fleet: WholeFleet) -> None:
    """Trainer and relay were started anew elsewhere, and those before still live."""
    async with fleet.relay() as before:
        zombie = await _trained(before, fleet, 1)
        async with fleet.relay() as after:
            resumed = await _trained(after, fleet, 1)
            with pytest.raises(TrainingDied, match="newer trainer"):
                await zombie.sync(fleet.adapter())
            await fleet.settled()
            assert await fleet.current() == await _named(fleet, 2)
            assert await _served(zombie, "trl-policy-v1") == (await _named(fleet, 2), "trl-policy-v1")
            assert await _served(resumed, "trl-policy-v1") == (await _named(fleet, 2), "")


async def _ended(fleet: WholeFleet, count: int = 1) -> list[dict[str, str]]:
    async def ended() -> list[dict[str, str]]:
        return [row for row in await fleet.rows() if row["outcome"] != "open"]

    async def enough() -> bool:
        return len(await ended()) >= count

    await wait_until(enough, timeout_s=20)
    return await ended()
