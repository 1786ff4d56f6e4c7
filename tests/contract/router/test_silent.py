"""Requests at a replica of which the table says that it does not answer, or no longer is what was asked."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from adaptersync.router import attempts
from adaptersync.router.request import Request
from support.router_fleet import V1, V2, Answer, Fleet
from support.upstreams import Upstream
from support.wait import wait_until

SAID = "silent: no heartbeat for 3.1 s"
KEPT = {"reason": SAID, "silent": True}  # ready, since the floor is reached
SILENT = {"state": "ejected", "reason": SAID, "silent": True}
LONG = list(range(64))  # four blocks: whoever had it first is asked again


async def _asked(fleet: Fleet, **fields: Any) -> tuple[asyncio.Task[Answer], Upstream, Upstream]:
    """A request that waits at one replica, which one it is, and which one it is not."""
    for replica in fleet.replicas.values():
        replica.gate.clear()
    asking = asyncio.create_task(fleet.complete("run-a", LONG, **fields))
    await wait_until(lambda: sum(replica.in_flight for replica in fleet.replicas.values()) == 1)
    one, other = sorted(fleet.replicas.values(), key=lambda replica: -replica.in_flight)
    other.gate.set()
    return asking, one, other


@pytest.mark.parametrize(
    "change",
    [SILENT, KEPT, {"state": "joining", "engine_epoch": "another life"}],
    ids=["silent", "kept at the floor", "restarted"],
)
async def test_what_waits_at_a_replica_that_will_not_answer_is_sent_elsewhere(
    fleet: Fleet, change: dict[str, Any]
) -> None:
    """Under the version it was admitted for, although another is current by now."""
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        asking, silent, other = await _asked(fleet)
        await fleet.table({V1: "retained", V2: "current"}, members={silent.name: change})
        answer = await asyncio.wait_for(asking, 5)
        assert (answer.status, answer.json["model"]) == (200, V1)
        assert answer.headers["x-adaptersync-version"] == V1
        assert answer.headers["x-adaptersync-replica"] == other.name
        await wait_until(lambda: silent.aborted == 1)
        (row,) = await fleet.rows(1)
        assert (row["outcome"], row["version"], row["replica"]) == ("ok", V1, other.name)
        assert (row["attempts"], row["tried"]) == ("2", f"{silent.name} silent")
        assert row["engine_epoch"] == f"{other.name}-life-1"
        retried = f'retries_total{{reason="silent",replica="{silent.name}"}} 1.0'
        assert retried in (await fleet.get("/metrics")).body.decode()
        await wait_until(lambda: _idle(fleet))


@pytest.mark.parametrize(
    ("versions", "change"),
    [
        ({V1: "current"}, {"state": "draining", "reason": "asked by its agent"}),
        ({V1: "current"}, {"state": "ejected", "reason": "refused something"}),
        ({V1: "retiring", V2: "current"}, {}),
        ({V1: "current"}, None),
    ],
    ids=["draining", "ejected for a refusal", "version retires", "drained and gone"],
)
async def test_what_will_be_answered_is_left_alone(
    fleet: Fleet, versions: dict[str, Any], change: dict[str, Any] | None
) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        asking, busy, other = await _asked(fleet)
        if change is None:
            await fleet.table(versions, members={busy.name: {"state": "draining"}})
            await fleet.table(versions, urls={other.name: other.url})
        else:
            await fleet.table(versions, members={busy.name: change})
        busy.gate.set()
        answer = await asking
        assert (answer.status, answer.headers["x-adaptersync-replica"]) == (200, busy.name)
        assert (len(busy.seen), len(other.seen)) == (1, 0)
        (row,) = await fleet.rows(1)
        assert (row["attempts"], row.get("tried")) == ("1", None)


async def test_with_nobody_else_the_client_hears_why(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        asking, _, _ = await _asked(fleet)
        await fleet.table({V1: "current"}, members=dict.fromkeys(fleet.replicas, SILENT))
        answer = await asyncio.wait_for(asking, 5)
        assert (answer.status, "no heartbeat for 3.1 s" in answer.message) == (503, True)
        assert "Retry-After" in answer.headers
        (row,) = await fleet.rows(1)
        assert (row["outcome"], row["attempts"]) == ("upstream_error", "1")


async def test_replicas_that_fall_silent_one_after_another_are_each_asked_once(fleet: Fleet) -> None:
    """Although those before are back by then."""
    await fleet.tables.write({V1: "current"}, fleet.urls)
    for replica in fleet.replicas.values():
        replica.gate.clear()
    async with fleet.router():
        asking = asyncio.create_task(fleet.complete(V1))
        for _ in fleet.replicas:
            await wait_until(lambda: any(replica.in_flight for replica in fleet.replicas.values()))
            (busy,) = [replica for replica in fleet.replicas.values() if replica.in_flight]
            await fleet.table({V1: "current"}, members={busy.name: SILENT})
            await wait_until(lambda: not busy.in_flight)  # noqa: B023
        answer = await asyncio.wait_for(asking, 5)
        assert answer.status == 503
        assert [len(replica.seen) for replica in fleet.replicas.values()] == [1, 1]


async def test_one_that_is_kept_at_the_floor_is_asked_when_nobody_else_is_left(fleet: Fleet) -> None:
    first, second = fleet.replicas.values()
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        assert (await fleet.complete(V1, LONG)).status == 200  # who had it first would be asked again
        silent, other = (first, second) if first.seen else (second, first)
        await fleet.table({V1: "current"}, members={silent.name: KEPT})
        for prompt in (LONG, [1], [2], [3], [4], [5]):
            answer = await fleet.complete(V1, prompt)
            assert (answer.status, answer.headers["x-adaptersync-replica"]) == (200, other.name)
        await fleet.table({V1: "current"}, urls={silent.name: silent.url}, members={silent.name: KEPT})
        answer = await fleet.complete(V1, LONG)
        assert (answer.status, answer.headers["x-adaptersync-replica"]) == (200, silent.name)
        await fleet.table({V1: "current"})
        await fleet.rows(8)


async def test_a_router_that_starts_later_knows_who_is_silent(fleet: Fleet) -> None:
    silent, other = fleet.replicas
    await fleet.tables.write({V1: "current"}, fleet.urls, members={silent: KEPT})
    async with fleet.router():
        for number in range(6):
            answer = await fleet.complete(V1, [number])
            assert (answer.status, answer.headers["x-adaptersync-replica"]) == (200, other)


async def test_what_waits_where_nobody_else_could_answer_is_left_alone(fleet: Fleet) -> None:
    """It may have lost its agent only."""
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        asking, busy, _ = await _asked(fleet)
        await fleet.table({V1: "current"}, members=dict.fromkeys(fleet.replicas, KEPT))
        busy.gate.set()
        answer = await asyncio.wait_for(asking, 5)
        assert (answer.status, answer.headers["x-adaptersync-replica"]) == (200, busy.name)
        (row,) = await fleet.rows(1)
        assert (row["attempts"], row.get("tried")) == ("1", None)


async def test_a_router_that_has_only_silent_replicas_is_degraded_and_up(fleet: Fleet) -> None:
    """Every router reads the same of them: a balancer that takes this one away gains nothing."""
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        first, second = fleet.replicas
        for silent, status in ((first,), "ok"), ((first, second), "degraded"), ((), "ok"):
            await fleet.table({V1: "current"}, members=dict.fromkeys(silent, KEPT))
            health = await fleet.get("/health")
            assert (health.status, health.json["status"]) == (200, status)
            assert health.json["reason"] == (f"no ready replica is heard of: {SAID}" if status == "degraded" else "")
            assert (await fleet.complete(V1)).status == 200
        await fleet.tables.write({V1: "current"}, {})
        await wait_until(lambda: _down(fleet))


async def _down(fleet: Fleet) -> bool:
    return (await fleet.get("/health")).status == 503


# streams


async def _stream(fleet: Fleet, url: str) -> aiohttp.ClientResponse:
    return await fleet.session.post(url + "/v1/completions", json={"model": V1, "prompt": [1], "stream": True})


async def _begun(fleet: Fleet, url: str) -> tuple[aiohttp.ClientResponse, Upstream]:
    """A stream of which one chunk has been let go, and who sends it."""
    for replica in fleet.replicas.values():
        replica.chunk_gate = asyncio.Semaphore(1)
    answer = await _stream(fleet, url)
    (sender,) = [replica for replica in fleet.replicas.values() if replica.seen]
    return answer, sender


async def test_a_stream_that_has_not_begun_is_sent_elsewhere(fleet: Fleet) -> None:
    """A replica says 200 before it has anything to say."""
    await fleet.tables.write({V1: "current"}, fleet.urls)
    for replica in fleet.replicas.values():
        replica.chunk_gate = asyncio.Semaphore(0)
    async with fleet.router() as url:
        asking = asyncio.create_task(_stream(fleet, url))
        await wait_until(lambda: sum(replica.in_flight for replica in fleet.replicas.values()) == 1)
        silent, other = sorted(fleet.replicas.values(), key=lambda replica: -replica.in_flight)
        other.chunk_gate = asyncio.Semaphore(1000)
        await fleet.table({V1: "current"}, members={silent.name: SILENT})
        answer = await asyncio.wait_for(asking, 5)
        assert answer.headers["x-adaptersync-replica"] == other.name
        assert (await answer.content.read()).endswith(b"data: [DONE]\n\n")
        (row,) = await fleet.rows(1)
        assert (row["outcome"], row["tried"]) == ("ok", f"{silent.name} silent")


async def test_a_stream_that_began_and_stands_still_ends_with_an_error(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "STILL_S", 0.1)
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router() as url:
        answer, silent = await _begun(fleet, url)
        async with answer:
            assert await answer.content.readany() == b"data: one\n\n"
            await fleet.table({V1: "current"}, members={silent.name: SILENT})
            with pytest.raises(aiohttp.ClientPayloadError):
                await asyncio.wait_for(answer.content.read(), 5)
        (row,) = await fleet.rows(1)
        assert (row["outcome"], row["attempts"], row["replica"]) == ("upstream_error", "1", silent.name)
        assert row["reason"] == f"{silent.name}: silent: no heartbeat for 3.1 s"
        assert sum(len(replica.seen) for replica in fleet.replicas.values()) == 1


async def test_a_stream_whose_head_is_on_its_way_is_not_cut_off_for_that(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else can be asked any more, and it has not stood still."""
    writing, go = asyncio.Event(), asyncio.Event()
    write = Request.write

    async def slow(self: Request, piece: bytes) -> None:
        writing.set()
        await go.wait()
        await write(self, piece)

    monkeypatch.setattr(Request, "write", slow)
    await fleet.tables.write({V1: "current"}, fleet.urls)
    for replica in fleet.replicas.values():
        replica.chunk_gate = asyncio.Semaphore(1)  # more of it is to come
    async with fleet.router() as url:
        asking = asyncio.create_task(_stream(fleet, url))
        await writing.wait()
        (sender,) = [replica for replica in fleet.replicas.values() if replica.seen]
        await fleet.table({V1: "current"}, members={sender.name: SILENT})
        go.set()
        for _ in sender.chunks:
            sender.chunk_gate.release()
        answer = await asyncio.wait_for(asking, 5)
        assert answer.headers["x-adaptersync-replica"] == sender.name
        assert (await answer.content.read()).endswith(b"data: [DONE]\n\n")
        (row,) = await fleet.rows(1)
        assert (row["outcome"], row["attempts"]) == ("ok", "1")


async def test_a_stream_that_goes_on_is_left_alone(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the agent of its replica is dead."""
    monkeypatch.setattr(attempts, "STILL_S", 1.0)
    await fleet.tables.write({V1: "current"}, fleet.urls)
    for replica in fleet.replicas.values():
        replica.chunks = [b"data: %d\n\n" % number for number in range(8)]
    async with fleet.router() as url:
        answer, alive = await _begun(fleet, url)
        assert await answer.content.readany() == b"data: 0\n\n"
        await fleet.table({V1: "current"}, members={alive.name: SILENT})
        for number in range(1, 8):  # longer than it may stand still, all in all
            await asyncio.sleep(0.25)
            alive.chunk_gate.release()
            assert await answer.content.readany() == b"data: %d\n\n" % number
        assert await answer.content.read() == b""
        (row,) = await fleet.rows(1)
        assert (row["outcome"], row["attempts"]) == ("ok", "1")


async def _idle(fleet: Fleet) -> bool:
    return not await fleet.counts()
