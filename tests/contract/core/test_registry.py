"""What is read back of everything that was written, and of what cannot be read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from adaptersync_core.errors import ControlError
from adaptersync_core.records import Ack, Decision, ReplicaReport, Request, _warn
from adaptersync_core.registry import PUBLICATIONS_AT_ONCE, Registry
from adaptersync_core.sightings import Sightings
from adaptersync_core.table import RunEntry, Table
from support.artifacts import manifest_of, small_adapter
from support.world import manifest, name_of

REPORT = ReplicaReport(
    url="http://r1",
    base_model="base",
    engine_epoch="1.25",
    max_loras=4,
    max_cpu_loras=4,
    max_lora_rank=16,
    block_size=16,
)


async def test_an_empty_server_is_an_empty_fleet(registry: Registry) -> None:
    fleet = await registry.fleet()
    assert fleet.table == Table()
    assert not fleet.runs
    assert not fleet.replicas
    assert fleet.now > 1_700_000_000
    assert await registry.table() == Table()
    assert await registry.manifest("run-v1-0123456789ab") is None
    assert await registry.version("run-v1-0123456789ab") is None
    assert await registry.runs() == []
    assert await registry.published("run") == []


async def test_only_publications_that_were_not_considered_are_read_and_not_too_many(registry: Registry) -> None:
    await registry.begin_run("run", nonce="n", max_staleness=1, trainer="t")
    for seq in range(1, PUBLICATIONS_AT_ONCE + 4):
        await registry.publish(manifest("run", seq), published_at=1)
    fleet = await registry.fleet()
    assert [one.seq for one in fleet.published["run"]] == list(range(1, PUBLICATIONS_AT_ONCE + 2))
    lease = await registry.lead("c", "c", lease_s=30)
    table = Table(generation=1, runs={"run": RunEntry(epoch=1, max_staleness=1, considered=65)})
    await registry.decide(Decision(table=table), lease, alive_s=5)
    assert [one.seq for one in (await registry.fleet()).published["run"]] == [66, 67]
    assert await registry.find_seq("run", 66) == name_of("run", 66)


async def test_of_what_was_published_so_much_is_kept_and_whatever_waits(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adaptersync_core.registry.PUBLISHED_KEPT", 3)

    async def kept(considered: int) -> list[int]:
        await registry.forget_published("run", considered)
        return [seq for _, seq in await registry.published("run")]

    await registry.begin_run("run", nonce="n", max_staleness=1, trainer="t")
    for seq in (1, 2):
        await registry.publish(manifest("run", seq), published_at=1)
    assert await kept(2) == [1, 2]
    for seq in (3, 5, 6, 8):
        await registry.publish(manifest("run", seq), published_at=1)
    assert await kept(2) == [2, 3, 5, 6, 8]
    assert await kept(8) == [5, 6, 8]


async def test_a_look_reads_only_who_spoke_since_the_last(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    look = registry._look

    async def noted(keys: Sequence[str]) -> list[dict[str, str]]:
        asked.extend(keys[::2])
        return await look(keys)

    monkeypatch.setattr(registry, "_look", noted)
    sightings, name = Sightings(), name_of("run", 1)

    async def spoke(*replicas: str) -> None:
        """What the next look reads, and that it sees what a first one would."""
        await asyncio.sleep(0.002)  # the server dates by the millisecond, and reads again what is of this very one
        asked.clear()
        fleet = await registry.fleet(sightings)
        assert asked == [registry.keys.replica(replica) for replica in replicas]
        fresh = await registry.fleet()
        assert fleet.acks == fresh.acks
        assert {name: seen.report for name, seen in fleet.replicas.items()} == {
            name: seen.report for name, seen in fresh.replicas.items()
        }

    await registry.report_replica("r1", REPORT)
    await registry.report_replica("r2", REPORT)
    await spoke("r1", "r2")
    await spoke()
    await registry.ack("r2", name, Ack(accepted=True, engine_epoch="1.25"))
    await spoke("r2")
    await registry.forget_acks("r2", [name])
    await spoke("r2")
    await registry.report_replica("r1", replace(REPORT, draining=True))
    await spoke("r1")
    await registry.client.command("ZREM", registry.keys.replicas, "r2")
    await registry.client.command("DEL", registry.keys.replica("r2"))
    await spoke()


async def test_an_ack_does_not_enter_a_replica_that_never_reported(registry: Registry) -> None:
    await registry.ack("r1", name_of("run", 1), Ack(accepted=True, engine_epoch="1.25"))
    await registry.forget_acks("r1", [name_of("run", 1)])
    assert await registry.client.command("EXISTS", registry.keys.replicas) == 0


async def test_what_cannot_be_read_is_left_out_and_does_not_stop_the_rest(
    registry: Registry, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another release, or somebody with redis-cli, wrote it: the group goes on without that record."""
    _warn.cache_clear()  # it warns once a process, and this test runs on two servers
    write = registry.client.command
    keys = registry.keys
    good = manifest_of(small_adapter(tmp_path / "a"), seq=2)
    await registry.begin_run("run", nonce="n", max_staleness=1, trainer="t")
    await registry.publish(good, published_at=1)
    await registry.report_replica("r1", REPORT)
    ack = Ack(accepted=True, engine_epoch="1")
    await registry.ack("r1", good.adapter_id, ack)

    await write("SET", keys.manifest("run-v1-0123456789ab"), '{"run": 5}', "EX", 60)
    await write("ZADD", keys.published("run"), 1, "run-v1-0123456789ab", 3, "run-v3-0123456789ab")
    await write("ZADD", keys.replicas, 10**13, "r2", 10**13, "r3", 10**13, "r4", 10**13, "r5")
    await write("HSET", keys.replica("r2"), "heartbeat_ms", 1, "url", "x")
    await write("HSET", keys.replica("r4"), "url", "not said when")
    await write("HSET", keys.replica("r5"), "heartbeat_ms", b"\xff", "url", b"\xfe")
    for name in ("r2", "r4", "r5"):
        await write("EXPIRE", keys.replica(name), 60)
    await write("HSET", keys.acks("r1"), "run-v1-0123456789ab", "not JSON")
    await write("HSET", keys.requests, "q", "[]")
    await write("ZADD", keys.routers, 10**13, "g1", 10**13, "g2")
    await write("HSET", keys.router("g1"), "generation", "many")
    await write("HSET", keys.router("g2"), "generation", 0)
    for name in ("g1", "g2"):
        await write("EXPIRE", keys.router(name), 60)
    await write("SADD", keys.runs, "other")
    await write("HSET", keys.run("other"), "epoch", "x")

    fleet = await registry.fleet()
    assert fleet.published == {"run": (good,), "other": ()}
    assert list(fleet.replicas) == ["r1"]
    assert fleet.acks["r1"] == {good.adapter_id: ack}
    assert list(fleet.runs) == ["run"]
    assert [name for name, router in fleet.routers.items() if router.may_serve] == []
    assert fleet.requests == {"q": Request(kind="unreadable", run="")}
    assert await registry.manifest("run-v1-0123456789ab") is None
    for name in ("run-v1-0123456789ab", "r2", "r4", "r5", "g1", "other", "a request"):
        assert f"record of {name} is left out" in caplog.text


async def test_a_table_or_a_fate_that_cannot_be_read_is_an_error_of_ours(registry: Registry) -> None:
    """Loops go on after those; nothing could be decided or served from half a table."""
    await registry.client.command("SET", registry.keys.table, '{"generation": "many"}')
    with pytest.raises(ControlError, match="table cannot be read"):
        await registry.table()
    with pytest.raises(ControlError, match="table cannot be read"):
        await registry.fleet()
    await registry.client.command("HSET", registry.keys.version("run-v1-0123456789ab"), "state", "x", "at", "noon")
    await registry.client.command("EXPIRE", registry.keys.version("run-v1-0123456789ab"), 60)
    with pytest.raises(ControlError, match="record cannot be read"):
        await registry.version("run-v1-0123456789ab")


async def test_a_field_of_a_later_release_is_ignored(registry: Registry) -> None:
    await registry.report_replica("r1", REPORT)
    await registry.client.command("HSET", registry.keys.replica("r1"), "new_field", "[1, {", "other", "text")
    assert (await registry.fleet()).replicas["r1"].report == REPORT
