"""Somebody who may add to a stream gave an entry the highest id: what is refused, what `status` says, what mends it."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from adaptersync.coordinator.observer import look
from adaptersync_core.config import Config
from adaptersync_core.errors import ControlError
from adaptersync_core.events import ReplicaState
from adaptersync_core.records import Ack, Decision, VersionRecord
from adaptersync_core.registry import Registry
from adaptersync_core.streams import ahead
from adaptersync_core.table import Member, Table
from support.artifacts import REPORT, manifest_of, small_adapter
from support.asking import begin, events
from support.source import REPOSITORY

HIGHEST = "18446744073709551615-18446744073709551615"
REFUSED = r"last possible ID.*TROUBLESHOOTING.md, A stream that is ahead of the clock"


async def exhaust(registry: Registry, stream: str) -> None:
    await registry.client.command("XADD", stream, HIGHEST, "type", "x")


async def everything(registry: Registry) -> dict[str, Any]:
    """All keys and their values."""
    found = {}
    for name in sorted(await registry.client.command("KEYS", "*")):
        kind = await registry.client.command("TYPE", name)
        read = {"hash": "HGETALL", "string": "GET", "set": "SMEMBERS", "stream": "XLEN"}.get(kind, "ZRANGE")
        found[name] = await registry.client.command(read, name, *(("0", "-1") if kind == "zset" else ()))
    return found


async def test_what_cannot_be_told_is_not_done_and_is_done_later(registry: Registry, tmp_path: Path) -> None:
    """Scripts tell before they do: who asks again once the stream is mended gets all of it, and once."""
    manifest = manifest_of(small_adapter(tmp_path / "a"))
    await begin(registry)
    lease = await registry.lead("c1", "c1", lease_s=30)
    await registry.report_replica("r1", REPORT)
    await registry.client.command("HSET", registry.keys.requests, "q", "{}")
    member = Member(state="ready", url="http://r1", engine_epoch="1", since=1.0, block_size=16)
    decision = Decision(
        table=Table(incarnation="c1", generation=1, written_at=3.5, members={"r1": member}),
        records={manifest.adapter_id: VersionRecord(state="current", generation=1, at=3.5)},
        events=(ReplicaState(replica="r1", state="ready", generation=1),),
        answered=("q",),
    )
    calls: list[Callable[[], Awaitable[Any]]] = [
        lambda: registry.ack("r1", manifest.adapter_id, Ack(accepted=True, engine_epoch=REPORT.engine_epoch)),
        lambda: registry.publish(manifest, published_at=1.0),
        lambda: registry.verified(manifest.adapter_id, ok=True, reason=""),
        lambda: registry.decide(decision, lease, alive_s=60),
        lambda: registry.close_run("run", reason="over", alive_s=0),
        lambda: begin(registry, "another"),
        lambda: registry.end_run("run", epoch=2),
        lambda: registry.lead("c1", "c2", lease_s=30, former="c1"),
    ]
    for call in calls:
        await exhaust(registry, registry.keys.events)
        before = await everything(registry)
        with pytest.raises(ControlError, match=REFUSED):
            await call()
        assert await everything(registry) == before
        await registry.client.command("DEL", registry.keys.events)
        await call()
        assert len(await events(registry)) == 1


async def mend(registry: Registry, stream: str) -> None:
    """As deploy/TROUBLESHOOTING.md has it."""
    document = (REPOSITORY / "deploy" / "TROUBLESHOOTING.md").read_text()
    found = re.search(r"```lua\n(.*?)```", document, re.DOTALL)
    assert found is not None
    await registry.client.command("EVAL", found[1], 2, stream, f"{stream}-mended")


@pytest.mark.parametrize("name", ["events", "rollouts", "fates"])
async def test_status_names_what_is_ahead_and_the_document_mends_it(registry: Registry, name: str) -> None:
    client, stream = registry.client, getattr(registry.keys, name)
    assert await ahead(client, registry.keys) == []
    kept = [await client.command("XADD", stream, "*", "type", f"kept-{number}") for number in range(3)]
    later = int(kept[-1].partition("-")[0]) + 86_400_000
    await client.command("XADD", stream, f"{later}-0", "type", "forged")
    await client.command("XADD", stream, "*", "type", "after it")
    assert await ahead(client, registry.keys) == [name]
    await exhaust(registry, stream)
    _, view = await look(registry, Config())
    (problem,) = [each for each in view.problems if "ahead" in each]
    assert re.search(f"stream {name} is ahead of the clock.*A stream that is ahead of the clock", problem)

    await mend(registry, stream)
    assert await ahead(client, registry.keys) == []
    assert [entry for entry, _ in await client.command("XRANGE", stream, "-", "+")] == kept
    await client.command("XADD", stream, "*", "type", "goes on")
    assert await client.command("EXISTS", f"{stream}-mended") == 0


async def test_a_stream_of_nothing_else_is_mended_too(registry: Registry) -> None:
    await exhaust(registry, registry.keys.events)
    await mend(registry, registry.keys.events)
    await begin(registry)
    assert len(await events(registry)) == 1
