"""Replicas that fail again and again, and requests that make them fail."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import aiohttp
import pytest

from adaptersync.router import outages
from adaptersync.router.connection import NoRoom
from adaptersync.router.connections import Connections
from support.raw_server import RawServer, Script, Talk, raw_server
from support.router_fleet import V1, Answer, Fleet, free_port
from support.upstreams import Upstream, upstream
from support.wait import wait_until

LONG = list(range(64))  # four blocks: whoever had it first is asked again


async def _circuit(fleet: Fleet, replica: Upstream) -> str:
    return str((await fleet.get("/health")).json["replicas"][replica.name]["circuit"])


async def _owner(fleet: Fleet) -> tuple[Upstream, Upstream]:
    """Who is asked for the long prompt, and who is not."""
    assert (await fleet.complete(V1, LONG)).status == 200
    owner, other = sorted(fleet.replicas.values(), key=lambda replica: -len(replica.seen))
    return owner, other


async def _break(fleet: Fleet, sick: Upstream) -> None:
    """Three failures in a row, of which no client hears."""
    sick.fail = [500] * 3
    for number in range(100):
        if not sick.fail:
            break
        assert await _circuit(fleet, sick) == "closed"
        assert (await fleet.complete(V1, [number] * 64)).status == 200  # one that nobody has had
    assert not sick.fail


@contextlib.asynccontextmanager
async def _broken(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, *, shortest_s: float
) -> AsyncIterator[tuple[Upstream, Upstream]]:
    """One that is left out, for so long at first, and the other, behind a router."""
    monkeypatch.setattr(outages, "SHORTEST_S", shortest_s)
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        sick, well = await _owner(fleet)
        await _break(fleet, sick)
        yield sick, well


@contextlib.asynccontextmanager
async def _only(fleet: Fleet, **settings: Any) -> AsyncIterator[Upstream]:
    """There is one replica behind a router."""
    await fleet.tables.write({V1: "current"}, {"replica-0": fleet.urls["replica-0"]})
    async with fleet.router(**settings):
        yield fleet.replicas["replica-0"]


@contextlib.asynccontextmanager
async def _four(fleet: Fleet, script: Script) -> AsyncIterator[list[RawServer]]:
    """That follow a script, behind a router."""
    async with contextlib.AsyncExitStack() as stack:
        raws = [await stack.enter_async_context(raw_server(script)) for _ in range(4)]
        await fleet.tables.write({V1: "current"}, {f"replica-{place}": raw.url for place, raw in enumerate(raws)})
        await stack.enter_async_context(fleet.router())
        yield raws


async def test_three_failures_in_a_row_leave_a_replica_out_and_an_answer_takes_it_back(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _broken(fleet, monkeypatch, shortest_s=0.5) as (sick, well):
        health = await fleet.get("/health")
        assert health.status == 200  # the other serves
        said = health.json["replicas"][sick.name]
        assert said["circuit"] == "open"
        assert said["reason"].endswith("replica answered 500")
        text = (await fleet.get("/metrics")).body.decode()
        assert f'router_circuit{{replica="{sick.name}"}} 2.0' in text
        assert f'router_circuit{{replica="{well.name}"}} 0.0' in text
        sick.gate.clear()
        await wait_until(lambda: _is(fleet, sick, "half open"))
        asking = [asyncio.create_task(fleet.complete(V1, LONG)) for _ in range(8)]
        await wait_until(lambda: sum(each.done() for each in asking) == 7)
        assert sick.in_flight == 1  # one of them tries it
        sick.gate.set()
        assert {answer.status for answer in await asyncio.gather(*asking)} == {200}
        assert await _circuit(fleet, sick) == "closed"
        assert [answer.headers["x-adaptersync-replica"] for answer in map(asyncio.Task.result, asking)].count(
            sick.name
        ) == 1


async def _promises(fleet: Fleet) -> dict[str, str]:
    return dict(await fleet.cache.command("HGETALL", fleet.keys.promises(V1)))


async def test_who_is_left_out_or_tried_changes_nothing_of_what_is_expected(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is in flight at one replica: that is no word on the others."""
    async with _broken(fleet, monkeypatch, shortest_s=1.0) as (sick, well):
        await wait_until(lambda: _quiet(fleet))
        before = await _promises(fleet)
        assert any(field.startswith(":") for field in before)
        answer = await fleet.complete(V1, [777] * 64)
        assert answer.headers["x-adaptersync-replica"] == well.name
        after = await _promises(fleet)
        assert {field for field in before if field[0] == ":"} < set(after)
        await wait_until(lambda: _is(fleet, sick, "half open"))
        await wait_until(lambda: _quiet(fleet))
        for prompt in (LONG, [777] * 64, [888] * 64):
            sick.fail = [429]  # which leaves the circuit as it is; so the other is asked next, and expects what it may
            answer = await fleet.complete(V1, prompt)
            assert (answer.status, sick.fail) == (200, [])
            assert answer.headers["x-adaptersync-replica"] == well.name
            assert set(after) <= set(await _promises(fleet))
        trials = await _promises(fleet)
        answer = await fleet.complete(V1, [999] * 64)  # and this one stays where it is tried
        assert answer.headers["x-adaptersync-replica"] == sick.name
        assert await _promises(fleet) == trials


async def test_one_that_was_away_for_a_moment_is_not_left_out_until_its_first_answer_ends(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outages, "SHORTEST_S", 0.1)
    gate, port = asyncio.Event(), free_port()

    async def patient(talk: Talk) -> None:
        while await talk.request():
            await gate.wait()
            await talk.say(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    away = "replica-0"
    await fleet.tables.write({V1: "current"}, fleet.urls | {away: f"http://127.0.0.1:{port}"})
    async with fleet.router():
        for number in range(10):
            assert (await fleet.complete(V1, [number] * 64)).status == 200
            if await _circuit(fleet, fleet.replicas[away]) != "closed":
                break
        async with raw_server(patient, port=port) as back:
            await wait_until(lambda: _is(fleet, fleet.replicas[away], "half open"))
            asking = [asyncio.create_task(fleet.complete(V1, LONG))]
            await wait_until(lambda: len(back.requests) == 1)
            asking += [asyncio.create_task(fleet.complete(V1, [number] * 64)) for number in range(100, 116)]
            await wait_until(lambda: len(back.requests) > 1)
            gate.set()
            assert {answer.status for answer in await asyncio.gather(*asking)} == {200}


async def test_want_of_room_in_the_router_is_no_replicas_failure(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: object) -> NoReturn:
        raise NoRoom("[Errno 24] Too many open files")

    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        with monkeypatch.context() as patched:
            patched.setattr(Connections, "_connect", full)
            for _ in range(2):
                answer = await fleet.complete(V1)
                assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
                assert "router cannot open another connection: [Errno 24]" in answer.message
        assert {await _circuit(fleet, replica) for replica in fleet.replicas.values()} == {"closed"}
        assert (await fleet.complete(V1)).status == 200
        rows = await fleet.rows(3)
        assert [(row["outcome"], row["attempts"]) for row in rows] == [("refused", "1")] * 2 + [("ok", "1")]


async def test_a_client_that_goes_away_does_not_keep_others_from_trying(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _broken(fleet, monkeypatch, shortest_s=0.1) as (sick, _):
        await wait_until(lambda: _is(fleet, sick, "half open"))
        sick.gate.clear()
        asking = asyncio.create_task(fleet.complete(V1, LONG))
        await wait_until(lambda: sick.in_flight == 1)
        asking.cancel()
        await wait_until(lambda: sick.aborted == 1)
        sick.gate.set()
        await wait_until(lambda: _tried(fleet, sick))


async def test_nobody_is_left_out_for_the_sake_of_nobody(fleet: Fleet) -> None:
    async with _only(fleet) as sick:
        sick.fail = [500] * 5
        assert [(await fleet.complete(V1)).status for _ in range(5)] == [500] * 5
        assert (await fleet.get("/health")).status == 503
        assert (await fleet.complete(V1)).status == 200
        assert (await fleet.get("/health")).status == 200


async def test_answers_that_do_not_come_in_time_count(fleet: Fleet) -> None:
    async with _only(fleet, request_timeout_s=0.5) as frozen:
        frozen.gate.clear()
        assert [(await fleet.complete(V1)).status for _ in range(3)] == [504] * 3
        assert await _circuit(fleet, frozen) == "open"


async def test_streams_that_are_cut_count(fleet: Fleet) -> None:
    async with _only(fleet) as cutting:
        cutting.cut_after = 1
        for _ in range(3):
            with pytest.raises(aiohttp.ClientPayloadError):
                await fleet.complete(V1, stream=True)
        assert await _circuit(fleet, cutting) == "open"


# requests that end, or freeze, whoever they are sent to


@contextlib.asynccontextmanager
async def _third(fleet: Fleet) -> AsyncIterator[None]:
    async with upstream("replica-2") as third:
        fleet.replicas[third.name] = third
        yield


async def test_what_ends_engines_is_sent_to_two(fleet: Fleet) -> None:
    async def dies(talk: Talk) -> None:
        await talk.request()

    async with _four(fleet, dies) as raws:
        answer = await fleet.complete(V1)
        assert (answer.status, "did not answer to the end" in answer.message) == (503, True)
        assert sum(len(raw.requests) for raw in raws) == 2
        (row,) = await fleet.rows(1)
        assert (row["outcome"], row["attempts"]) == ("upstream_error", "2")


async def test_what_ends_engines_on_connections_that_were_kept_is_sent_to_two(fleet: Fleet) -> None:
    """The connection ends, and then nobody is there: as if it had been closed, and as if nothing had been asked."""

    async def mortal(talk: Talk) -> None:
        while b"deadly" not in await talk.request():
            await talk.say(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        talk.server.leave()

    async with _four(fleet, mortal) as raws:
        for number in range(100):
            if all(raw.present for raw in raws):
                break
            assert (await fleet.complete(V1, [number] * 64)).status == 200
        assert [raw.present for raw in raws] == [1] * 4
        answer = await fleet.complete(V1, user="deadly")
        assert (answer.status, "did not answer to the end" in answer.message) == (503, True)
        assert sum(b"deadly" in raw.requests[-1] for raw in raws) == 2
        said = (await fleet.get("/health")).json["replicas"].values()
        assert sorted(each["circuit"] for each in said) == ["closed", "closed", "open", "open"]


async def test_what_freezes_engines_is_sent_to_two(fleet: Fleet) -> None:
    async with _third(fleet):
        await fleet.tables.write({V1: "current"}, fleet.urls)
        for replica in fleet.replicas.values():
            replica.gate.clear()
        async with fleet.router():
            asking = asyncio.create_task(fleet.complete(V1))
            for _ in range(2):
                await wait_until(lambda: any(replica.in_flight for replica in fleet.replicas.values()))
                (frozen,) = [replica for replica in fleet.replicas.values() if replica.in_flight]
                change = {"state": "ejected", "reason": "silent: no heartbeat for 3.1 s", "silent": True}
                await fleet.table({V1: "current"}, members={frozen.name: change})
                await wait_until(_ended(frozen))
            answer: Answer = await asyncio.wait_for(asking, 5)
            assert answer.status == 503
            assert sorted(len(replica.seen) for replica in fleet.replicas.values()) == [0, 1, 1]


async def _quiet(fleet: Fleet) -> bool:
    return not any((await fleet.counts()).values())


def _ended(replica: Upstream) -> Callable[[], bool]:
    return lambda: not replica.in_flight


async def _is(fleet: Fleet, replica: Upstream, state: str) -> bool:
    return await _circuit(fleet, replica) == state


async def _tried(fleet: Fleet, replica: Upstream) -> bool:
    await fleet.complete(V1, LONG)
    return await _circuit(fleet, replica) == "closed"
