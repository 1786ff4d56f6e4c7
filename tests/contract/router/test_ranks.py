"""Replicas of several ranks: each rank is chosen for itself, and whatever fails is the whole replica's."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from adaptersync.router.ownership import Ownership
from adaptersync.router.policy import Choice
from support.router_fleet import V1, Answer, Fleet, Servers
from support.wait import wait_until

RANK = "x-data-parallel-rank"
RANKS: Mapping[str, Any] = {"replica-0": {"ranks": 2}}


async def ask(fleet: Fleet, number: int, **headers: str) -> Answer:
    """A prompt of its own, four blocks."""
    prompt = [1000 * number + place for place in range(64)]
    return await fleet.post("/v1/completions", {"model": "run-a", "prompt": prompt}, headers=headers)


def seen(fleet: Fleet, replica: str) -> list[str | None]:
    """Which ranks it was told to use."""
    return [each.headers.get(RANK) for each in fleet.replicas[replica].seen]


async def test_the_chosen_rank_is_what_the_replica_is_told_and_the_row_says(fleet: Fleet) -> None:
    await fleet.table({V1: "current"}, members=RANKS)
    async with fleet.router():
        for number in range(9):
            assert (await ask(fleet, number)).status == 200
        rows = await fleet.rows(9)
        ranked = [row["rank"] for row in rows if row["replica"] == "replica-0"]
        assert set(ranked) == {"0", "1"}
        assert seen(fleet, "replica-0") == ranked
        assert set(seen(fleet, "replica-1")) == {None}
        assert {row.get("rank") for row in rows if row["replica"] == "replica-1"} == {None}
        again = [(await ask(fleet, number)).status for number in range(9)]
        assert again == [200] * 9
        twice = await fleet.rows(18)
        assert [(row["replica"], row.get("rank")) for row in twice[9:]] == [
            (row["replica"], row.get("rank")) for row in rows
        ]
        assert {row["routing"] for row in twice[9:]} == {"affinity"}


@pytest.mark.parametrize("members", [{}, RANKS], ids=["plain", "ranks"])
async def test_a_clients_own_choice_of_a_rank_is_dropped(fleet: Fleet, members: Mapping[str, Any]) -> None:
    await fleet.table({V1: "current"}, members=members)
    async with fleet.router():
        for number in range(9):
            await ask(fleet, number, **{"X-Data-Parallel-Rank": "7"})
        assert (await fleet.post("/tokenize", {"model": "run-a", "prompt": "a"}, headers={RANK: "7"})).status == 200
    ranks = {*seen(fleet, "replica-0"), *seen(fleet, "replica-1")}
    assert ranks == ({None, "0", "1"} if members else {None})


@pytest.mark.parametrize(("status", "why"), [(500, "status_500"), (429, "full")])
async def test_what_fails_at_one_rank_is_tried_at_another_replica(fleet: Fleet, status: int, why: str) -> None:
    """Not at another rank of the same: three are candidates, of two replicas."""
    await fleet.table({V1: "current"}, members=RANKS)
    async with fleet.router():
        first = await ask(fleet, 0)
        number = 0
        while first.headers["x-adaptersync-replica"] != "replica-0":
            number += 1
            first = await ask(fleet, number)
        fleet.replicas["replica-0"].fail = [status] * 9
        asked = len(seen(fleet, "replica-0"))
        answer = await ask(fleet, number)
        assert (answer.status, answer.headers["x-adaptersync-replica"]) == (200, "replica-1")
        assert len(seen(fleet, "replica-0")) == asked + 1
        row = (await fleet.rows(number + 2))[-1]
        assert (row["tried"], row["attempts"], row.get("rank")) == (f"replica-0 {why}", "2", None)


async def test_a_replica_that_is_left_out_is_left_out_with_all_its_ranks(fleet: Fleet) -> None:
    await fleet.table({V1: "current"}, members=RANKS)
    await fleet.replicas["replica-0"].stop()
    async with fleet.router():
        for number in range(9):
            assert (await ask(fleet, number)).status == 200
        rows = await fleet.rows(9)
        assert {row["replica"] for row in rows} == {"replica-1"}
        assert sum(int(row["attempts"]) - 1 for row in rows) == 1
        health = (await fleet.get("/health")).json["replicas"]
        assert {name: each["circuit"] for name, each in health.items()} == {"replica-0": "open", "replica-1": "closed"}


async def test_what_is_in_flight_is_told_by_replica_and_counted_by_rank(fleet: Fleet) -> None:
    await fleet.table({V1: "current"}, members=RANKS)
    for replica in fleet.replicas.values():
        replica.gate.clear()
    async with fleet.router(spill=0):
        running = [asyncio.create_task(ask(fleet, number)) for number in range(6)]
        await wait_until(lambda: sum(each.in_flight for each in fleet.replicas.values()) == 6, what="all to run")
        counts = {name: count for name, count in (await fleet.counts()).items() if "|" not in name}
        assert counts == {"replica-0/0": 2, "replica-0/1": 2, "replica-1": 2}
        health = (await fleet.get("/health")).json["replicas"]
        assert {name: each["in_flight"] for name, each in health.items()} == {"replica-0": 4, "replica-1": 2}
        metrics = (await fleet.get("/metrics")).body.decode()
        assert 'adaptersync_router_inflight{replica="replica-0"} 4.0' in metrics
        assert "replica-0/" not in metrics
        for replica in fleet.replicas.values():
            replica.gate.set()
        await asyncio.gather(*running)
        assert Counter(seen(fleet, "replica-0")) == {"0": 2, "1": 2}


async def test_a_session_stays_on_its_rank(fleet: Fleet) -> None:
    await fleet.table({V1: "current"}, members=RANKS)
    async with fleet.router():
        for session in range(6):
            for turn in range(4):
                await ask(fleet, 10 * session + turn, **{"x-session-id": str(session)})
        rows = await fleet.rows(24)
    homes: dict[str, set[tuple[str, str | None]]] = {}
    for row in rows:
        homes.setdefault(row["session"], set()).add((row["replica"], row.get("rank")))
    assert [len(each) for each in homes.values()] == [1] * 6
    assert len({home for each in homes.values() for home in each}) == 3


async def test_whoever_asks_why_is_told_of_ranks(fleet: Fleet) -> None:
    await fleet.table({V1: "current"}, members=RANKS)
    async with fleet.router():
        for number in range(9):
            answer = await ask(fleet, number, **{"x-adaptersync-explain": "1"})
            told = json.loads(answer.headers["x-adaptersync-explain"])
            assert [*told["candidates"]] == ["replica-0/0", "replica-0/1", "replica-1"]
            assert told["replica"] == answer.headers["x-adaptersync-replica"]
            row = (await fleet.rows(number + 1))[-1]
            assert str(told.get("rank")) == row.get("rank", "None")


async def test_without_the_cache_server_prompts_still_have_a_rank(own_fleet: Fleet, servers: Servers) -> None:
    await own_fleet.table({V1: "current"}, members=RANKS)
    servers.cache.stop()
    async with own_fleet.router():
        for _ in range(2):
            for number in range(12):
                assert (await ask(own_fleet, number)).status == 200
        rows = await own_fleet.rows(24)
    where = [(row["replica"], row.get("rank")) for row in rows]
    assert where[:12] == where[12:]
    assert set(where) == {("replica-0", "0"), ("replica-0", "1"), ("replica-1", None)}


async def test_a_rank_that_left_while_it_was_chosen_is_not_asked(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    await fleet.table({V1: "current"}, members=RANKS)
    choose, left = Ownership.choose, asyncio.Event()

    async def slow(*asked: Any, **more: Any) -> Choice:
        choice = await choose(*asked, **more)
        if choice.replica == "replica-0/1" and not left.is_set():
            left.set()
            await fleet.table({V1: "current"})
        return choice

    monkeypatch.setattr(Ownership, "choose", slow)
    async with fleet.router():
        number = 0
        while not left.is_set():
            number += 1
            answer = await ask(fleet, number)
            assert answer.status == 200
        row = (await fleet.rows(number))[-1]
        assert (row["replica"], row["tried"], row.get("rank")) == ("replica-1", "replica-0 gone", None)
        assert "1" not in seen(fleet, "replica-0")
