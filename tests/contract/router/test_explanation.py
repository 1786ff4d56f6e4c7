"""Whoever asks why is told, from the numbers that the decision was made from; nobody else pays for it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from adaptersync.router import outages
from adaptersync.router.explanation import MOST, Explanation
from adaptersync.router.policy import Choice, Standing
from adaptersync_core.rollouts import Row
from support.router_fleet import V1, V2, Answer, Fleet
from support.wait import wait_until

EXPLAIN = "x-adaptersync-explain"
PROMPT = list(range(64))  # four blocks


async def ask(fleet: Fleet, model: str, prompt: list[int], **more: str) -> Answer:
    body = {"model": model, "prompt": prompt}
    return await fleet.post("/v1/completions", body, headers={EXPLAIN: "1", **more})


def told(answer: Answer) -> Any:
    return json.loads(answer.headers[EXPLAIN])


async def test_the_numbers_are_those_from_before_the_choice(fleet: Fleet) -> None:
    await fleet.table({V1: "retained", V2: "current"})
    for replica in fleet.replicas.values():
        replica.gate.clear()
    async with fleet.router(spill=2):
        running: list[asyncio.Task[Answer]] = []
        for count in range(1, 4):
            running.append(asyncio.create_task(ask(fleet, "run-a", PROMPT)))
            await wait_until(lambda n=count: sum(each.in_flight for each in fleet.replicas.values()) == n)  # type: ignore[misc]
        for replica in fleet.replicas.values():
            replica.gate.set()
        first, *others = [told(answer) for answer in await asyncio.gather(*running)]
        home = first["replica"]
        (away,) = set(fleet.replicas) - {home}
        nothing = {"owned": 0, "in_flight": 0, "promised": 0}
        assert first.pop("held_s") < 5
        assert first == {
            "asked": "run-a",
            "version": V2,
            "why": "current",
            "policy": "promise",
            "spill": 2,
            "replica": home,
            "routing": "cold",
            "weight": 1,
            "blocks": 4,
            "known": 0,
            "boilerplate": 0,
            "candidates": {home: nothing, away: nothing},
            "left_out": {},
        }
        for place, other in enumerate(others, start=1):
            assert (other["routing"], other["known"]) == ("affinity", 4)
            assert other["candidates"] == {home: {"owned": 4, "in_flight": place, "promised": 0}, away: nothing}
        assert all(EXPLAIN not in seen.headers for each in fleet.replicas.values() for seen in each.seen)
        assert EXPLAIN not in (await fleet.complete("run-a", PROMPT)).headers


async def test_why_it_is_this_version(fleet: Fleet) -> None:
    await fleet.table({V1: "current"})
    async with fleet.router():
        session = {"x-session-id": "a"}
        assert told(await ask(fleet, "run-a", PROMPT, **session))["why"] == "current"
        await fleet.table({V1: "retained", V2: "current"})
        kept = told(await ask(fleet, "run-a", PROMPT, **session))
        assert (kept["why"], kept["version"], kept["routing"]) == ("session", V1, "session")
        assert told(await ask(fleet, V1, PROMPT))["why"] == "by name"
        assert told(await ask(fleet, "run-a@v2", PROMPT))["why"] == "by number"
        assert told(await ask(fleet, "base", PROMPT))["why"] == "base model"


async def test_who_was_left_out_and_who_was_asked_before(fleet: Fleet) -> None:
    await fleet.table({V1: "current"})
    async with fleet.router():
        home = told(await ask(fleet, V1, PROMPT))["replica"]
        (other,) = set(fleet.replicas) - {home}
        fleet.replicas[home].holds = set()
        moved = told(await ask(fleet, V1, PROMPT))
        assert (moved["replica"], moved["before"]) == (other, [f"{home} missing_version"])
        assert told(await ask(fleet, V1, PROMPT))["left_out"] == {home: "missing version"}
        members = {home: {"state": "ejected", "reason": "engine is gone"}, other: {"state": "draining"}}
        await fleet.table({V2: "current"}, members=members)
        refused = await ask(fleet, V2, PROMPT)
        assert refused.status == 503
        assert told(refused)["left_out"] == {home: "ejected: engine is gone", other: "draining: "}


async def test_by_expected_it_is_told_how_soon_each_would_answer_and_who_is_sooner_is_asked(fleet: Fleet) -> None:
    await fleet.table({V1: "current"})
    slow, fast = fleet.replicas
    await fleet.cache.command("HSET", fleet.keys.queues, f"{slow}|", 100, f"{fast}|", 200)
    async with fleet.router(policy="expected"):
        first = told(await ask(fleet, V1, PROMPT))
        assert first["replica"] == fast
        assert [first["candidates"][name]["prefill_s"] for name in (slow, fast)] == [0.64, 0.32]
        assert first["candidates"][fast]["wait_s"] == 0
        (until,) = await fleet.cache.command("HMGET", fleet.keys.queues, fast)
        await fleet.cache.command("HSET", fleet.keys.queues, fast, int(until) + 60_000_000)
        second = told(await ask(fleet, V1, PROMPT))
        assert (second["replica"], second["routing"]) == (slow, "spill")
        assert 50 < second["candidates"][fast]["wait_s"] < 61
        assert second["candidates"][fast]["prefill_s"] == 0
        text = told(await ask(fleet, V1, "some words " * 40))  # type: ignore[arg-type]
        assert text["candidates"][slow]["prefill_s"] == text["blocks"] * 4 / 100  # tokens are about four bytes
        assert await fleet.cache.command("TTL", fleet.keys.queues) > 0


async def test_whose_circuit_is_open_and_who_finds_out_if_it_is_back(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outages, "SHORTEST_S", 1.0)
    await fleet.table({V1: "current"})
    async with fleet.router():
        home = told(await ask(fleet, V1, PROMPT))["replica"]
        (other,) = set(fleet.replicas) - {home}
        fleet.replicas[home].fail = [500] * 3
        for number in range(100):
            if fleet.replicas[home].fail:
                assert (await fleet.complete(V1, [number] * 64)).status == 200
        out = told(await ask(fleet, V1, PROMPT))
        assert (out["replica"], out["left_out"]) == (other, {home: "circuit open"})
        await wait_until(lambda: _half_open(fleet, home))
        back = told(await ask(fleet, V1, PROMPT))
        assert (back["replica"], back["left_out"]) == (home, {other: "another is tried"})
        assert told(await ask(fleet, V1, PROMPT))["left_out"] == {}


async def _half_open(fleet: Fleet, replica: str) -> bool:
    return bool((await fleet.get("/health")).json["replicas"][replica]["circuit"] == "half open")


def test_a_line_is_bounded_and_plain_whatever_it_tells() -> None:
    standings = tuple(Standing(replica=f"r{place:063}", owned=1, inflight=2) for place in range(MOST + 3))
    explanation = Explanation(
        policy="promise",
        spill=8,
        choice=Choice(replica="r0", outcome="cold", owned=0, standings=standings),
        left_out={f"r{place:063}": "é\r\n" * 500 for place in range(100, 105 + MOST)},
    )
    row = Row(request_id="a", router="b", path="/", asked="é\n\x7f\r" * 32, outcome="ok", started_at=0.0)
    line = explanation.line(row)
    assert len(line) < 8190  # what clients take in one line
    assert all(32 <= byte < 127 for byte in line)
    read = json.loads(line)
    assert (len(read["candidates"]), read["candidates_more"], read["left_out_more"]) == (MOST, 3, 5)
