"""Replicas that lost a version they should hold: clients hear nothing of it, operators do."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import pytest

from adaptersync_core.records import Ack, ReplicaReport
from adaptersync_core.registry import Registry
from support.router_fleet import V1, V2, Fleet
from support.upstreams import Upstream
from support.wait import wait_until

NUMBERS = itertools.count(1000)
LONG = list(range(64))  # four blocks: whoever had it first is asked again


async def _say(fleet: Fleet, replica: Upstream, *loaded: str, accepts: str = "") -> None:
    """As its agent does with each heartbeat, and once it has proved a version."""
    registry, life = Registry(fleet.control, fleet.keys), f"{replica.name}-life-1"
    report = ReplicaReport(
        url=replica.url, base_model="base", engine_epoch=life, max_loras=4, max_cpu_loras=4, max_lora_rank=8,
        block_size=16, loaded=loaded,
    )  # fmt: skip
    await registry.report_replica(replica.name, report)
    if accepts:
        await registry.ack(replica.name, accepts, Ack(accepted=True, engine_epoch=life))


async def _missing(fleet: Fleet) -> dict[str, list[str]]:
    """What the router has told the control server."""
    (router,) = (await Registry(fleet.control, fleet.keys).fleet()).routers.values()
    return router.report.missing


async def _told(fleet: Fleet, missing: dict[str, list[str]]) -> bool:
    return await _missing(fleet) == missing


async def _asked(fleet: Fleet, replica: Upstream) -> int:
    """How many of ten requests for the version arrive there, for prompts that nobody has had."""
    before = len(replica.seen)
    for _ in range(10):
        assert (await fleet.complete(V1, [next(NUMBERS)] * 64)).status == 200
    return len(replica.seen) - before


async def test_who_lost_a_version_is_reported_and_asked_again_once_its_agent_has_confirmed_it(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "retained", V2: "current"}, fleet.urls)
    async with fleet.router():
        await fleet.complete(V1, LONG)
        (owner,) = [replica for replica in fleet.replicas.values() if replica.seen]
        await _say(fleet, owner, V1, V2, accepts=V1)  # of before
        owner.holds = {V2}
        assert (await fleet.complete(V1, LONG)).status == 200
        await wait_until(lambda: _told(fleet, {owner.name: [V1]}))
        assert (await fleet.get("/health")).json["replicas"][owner.name]["missing"] == [V1]
        assert await _asked(fleet, owner) == 0
        owner.holds = None
        # neither a new table, nor what its agent said before it looked, nor that it is loaded and not yet proved
        await fleet.table({V1: "retained", V2: "current"})
        await Registry(fleet.control, fleet.keys).forget_acks(owner.name, [V1])
        await _say(fleet, owner, V1, V2)
        await asyncio.sleep(1.5)  # the router looks once a second
        assert await _asked(fleet, owner) == 0
        await _say(fleet, owner, V1, V2, accepts=V1)
        await wait_until(lambda: _told(fleet, {}), timeout_s=5)
        assert await _asked(fleet, owner) > 0


async def test_when_all_lost_it_requests_are_held_until_one_has_it_again(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    for replica in fleet.replicas.values():
        replica.holds = set()
    async with fleet.router():
        asking = [asyncio.create_task(fleet.complete(name, LONG)) for name in ("run-a", V1, V1)]
        await wait_until(lambda: _told(fleet, {name: [V1] for name in fleet.replicas}))
        await wait_until(lambda: _held(fleet, 3))
        began = time.monotonic()
        back = fleet.replicas["replica-1"]
        back.holds = None
        await asyncio.sleep(0.002)  # the server dates by the millisecond
        held_s = time.monotonic() - began
        await _say(fleet, back, V1, accepts=V1)
        answers = await asyncio.gather(*asking)
        assert {(each.status, each.headers["x-adaptersync-replica"]) for each in answers} == {(200, back.name)}
        rows = await fleet.rows(3)
        assert {(row["outcome"], row["version"], row["replica"]) for row in rows} == {("ok", V1, back.name)}
        assert all(float(row["hold_s"]) >= held_s for row in rows)
        assert await _held(fleet, 0)


async def test_a_life_of_after_has_what_it_is_ready_with(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    for replica in fleet.replicas.values():
        replica.holds = set()
    async with fleet.router():
        asking = asyncio.create_task(fleet.complete(V1, LONG))
        await wait_until(lambda: _held(fleet, 1))
        back = fleet.replicas["replica-0"]
        back.holds = None
        await fleet.table({V1: "current"}, members={back.name: {"engine_epoch": "another life"}})
        assert (await asyncio.wait_for(asking, 5)).headers["x-adaptersync-replica"] == back.name
        await wait_until(lambda: _told(fleet, {"replica-1": [V1]}))


async def test_nobody_waits_for_a_replica_that_has_left(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    for replica in fleet.replicas.values():
        replica.holds = set()
    async with fleet.router():
        asking = asyncio.create_task(fleet.complete(V1, LONG))
        await wait_until(lambda: _held(fleet, 1))
        await fleet.table({V1: "current"}, members={name: {"state": "draining"} for name in fleet.replicas})
        answer = await asyncio.wait_for(asking, 5)
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        assert (await asyncio.wait_for(fleet.complete(V1, LONG), 5)).status == 503


async def test_what_agents_say_is_read_in_one_call(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(fleet.control, fleet.keys)
    for replica in fleet.replicas.values():
        await _say(fleet, replica, V1, accepts=V1)
    calls = 0
    script = fleet.control.script

    async def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return await script(*arguments)

    monkeypatch.setattr(fleet.control, "script", counted)
    found = await registry.holdings([*fleet.replicas, "nobody"])
    assert {name: holding.versions for name, holding in found.items()} == {name: {V1} for name in fleet.replicas}
    assert calls == 1


async def _held(fleet: Fleet, count: int) -> bool:
    return bool((await fleet.get("/health")).json["held"] == count)
