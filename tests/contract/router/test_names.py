"""Versions on their way in are waited for, those on their way out are refused with their reason."""

from __future__ import annotations

import asyncio

import pytest

from adaptersync.router import admission
from support.router_fleet import V1, V2, V3, Fleet
from support.tables import version_name
from support.wait import wait_until


async def _held(fleet: Fleet) -> int:
    return int((await fleet.get("/health")).json["held"])


@pytest.mark.parametrize("state", ["published", "staging", "ready"])
async def test_a_request_for_a_coming_version_is_held_until_it_is_current(fleet: Fleet, state: str) -> None:
    if state == "published":
        await fleet.tables.announce(V2)
        await fleet.tables.write({V1: "current"}, fleet.urls)
    else:
        await fleet.tables.write({V1: "current", V2: state}, fleet.urls)  # type: ignore[dict-item]
    async with fleet.router():
        waiting = [asyncio.create_task(fleet.complete(name)) for name in (V2, "run-a@v2")]
        await wait_until(lambda: _is_held(fleet, 2))
        assert not any(task.done() for task in waiting)
        await fleet.table({V1: "retained", V2: "current"})
        for answer in await asyncio.wait_for(asyncio.gather(*waiting), timeout=5.0):
            assert (answer.status, answer.headers["x-adaptersync-version"]) == (200, V2)
        rows = await fleet.rows(2)
        assert all(float(row["hold_s"]) > 0 for row in rows)
        assert await _held(fleet) == 0


async def test_the_first_version_of_a_run_is_waited_for_by_its_alias(fleet: Fleet) -> None:
    await fleet.tables.announce(V1)
    await fleet.tables.write({}, fleet.urls)
    async with fleet.router():
        waiting = asyncio.create_task(fleet.complete("run-a"))
        await wait_until(lambda: _is_held(fleet, 1))
        await fleet.table({V1: "staging"})
        assert not waiting.done()
        await fleet.table({V1: "current"})
        assert (await asyncio.wait_for(waiting, timeout=5.0)).headers["x-adaptersync-version"] == V1


async def test_holding_ends_with_a_word_when_to_come_back(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "staging"}, fleet.urls)
    async with fleet.router(hold_s=0.2):
        answer = await fleet.complete(V1)
        assert answer.status == 503
        assert int(answer.headers["Retry-After"]) >= 1
        assert "staging" in answer.message
        (row,) = await fleet.rows(1)
        assert (row["outcome"], row["status"]) == ("refused", "503")


async def test_only_so_many_are_held(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "staging"}, fleet.urls)
    async with fleet.router(held_requests=1):
        waiting = asyncio.create_task(fleet.complete(V1))
        await wait_until(lambda: _is_held(fleet, 1))
        assert (await fleet.complete(V1)).status == 503
        await fleet.table({V1: "current"})
        assert (await asyncio.wait_for(waiting, timeout=5.0)).status == 200


async def test_a_held_version_that_is_given_up_is_refused_with_the_reason(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current", V2: "staging"}, fleet.urls)
    async with fleet.router():
        waiting = asyncio.create_task(fleet.complete(V2))
        await wait_until(lambda: _is_held(fleet, 1))
        await fleet.tables.record(V2, "rolled_back", "rank 64 is over the limit")
        await fleet.table({V1: "current"})
        answer = await asyncio.wait_for(waiting, timeout=5.0)
        assert answer.status == 409
        assert "rank 64 is over the limit" in answer.message


@pytest.mark.parametrize(
    ("state", "status"),
    [("superseded", 409), ("rolled_back", 409), ("retiring", 410), ("retired", 410), ("voided", 410)],
)
async def test_versions_that_are_gone_are_refused_with_their_reason(fleet: Fleet, state: str, status: int) -> None:
    await fleet.tables.record(V1, state, "because of this")
    await fleet.tables.write({V2: "current"}, fleet.urls)
    async with fleet.router():
        for name in (V1, "run-a@v1"):
            answer = await fleet.complete(name)
            assert answer.status == status
            assert state in answer.message
            assert "because of this" in answer.message
        assert not any(replica.seen for replica in fleet.replicas.values())


async def test_a_retiring_version_of_the_table_is_refused(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "retiring", V2: "current"}, fleet.urls)
    async with fleet.router():
        assert (await fleet.complete(V1)).status == 410
        await fleet.tables.record(V1, "retiring", "left the window")
        await fleet.table({V1: "retiring", V2: "current"})
        assert "left the window" in (await fleet.complete(V1)).message


async def test_a_version_that_a_redis_set_back_does_not_know_is_held_until_it_is_put_back(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        waiting = [asyncio.create_task(fleet.complete(name)) for name in (V2, "run-a@v2")]
        await wait_until(lambda: _is_held(fleet, 2))
        await fleet.table({V1: "retained", V2: "current"})
        answers = await asyncio.wait_for(asyncio.gather(*waiting), timeout=5.0)
        assert [(answer.status, answer.headers["x-adaptersync-version"]) for answer in answers] == [(200, V2)] * 2


async def test_one_that_nobody_ever_knew_is_unknown_in_the_end(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "DOUBT_S", 0.2)
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        answer = await asyncio.wait_for(fleet.complete(V3), timeout=5.0)
        assert (answer.status, answer.json["error"]["type"]) == (404, "not_found_error")
        assert float((await fleet.rows(1))[0]["total_s"]) >= 0.2


async def test_what_nobody_knows_leaves_room_for_what_is_due(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "DOUBT_S", 40.0)
    await fleet.tables.write({V1: "current", V2: "staging"}, fleet.urls)
    async with fleet.router(held_requests=4):
        doubted = [asyncio.create_task(fleet.complete(f"run-a@v{seq}")) for seq in (91, 92)]
        await wait_until(lambda: _is_unknown_at_once(fleet, "run-a@v93"))  # when the records of those have been read
        due = [asyncio.create_task(fleet.complete(V2)) for _ in range(2)]
        await wait_until(lambda: _is_held(fleet, 4))
        await fleet.table({V1: "retained", V2: "current"})
        assert [(await each).status for each in due] == [200, 200]
        for each in doubted:
            each.cancel()


async def _is_unknown_at_once(fleet: Fleet, name: str) -> bool:
    try:
        return (await asyncio.wait_for(fleet.complete(name), timeout=1.0)).status == 404
    except TimeoutError:
        return False


@pytest.mark.parametrize("name", [V2, "run-a@v2", "nobody", "nobody@current", "No Such Form", "base-2"])
async def test_unknown_names_are_unknown(fleet: Fleet, name: str) -> None:
    await fleet.tables.write({V3: "current"}, fleet.urls)
    async with fleet.router():
        answer = await fleet.complete(name)
        assert answer.status == 404
        assert answer.json["error"]["param"] == "model"


async def test_a_retry_storm_for_what_is_gone_asks_redis_once(fleet: Fleet) -> None:
    await fleet.tables.record(V1, "retired")
    await fleet.tables.write({V2: "current"}, fleet.urls)

    async def reads() -> int:
        stats = await fleet.control.command("INFO", "commandstats")
        return int(stats.get("cmdstat_hgetall", {"calls": 0})["calls"])

    async with fleet.router():
        before = await reads()
        answers = await asyncio.gather(*(fleet.complete(V1) for _ in range(50)))
        await fleet.table({V2: "current"})  # a new table is no reason to ask again
        answers += await asyncio.gather(*(fleet.complete(V1) for _ in range(50)))
        assert {answer.status for answer in answers} == {410}
        assert await reads() - before == 1


async def test_a_version_announced_after_it_was_unknown_is_found(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "DOUBT_S", 0.2)
    late = version_name(9)
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        assert (await fleet.complete(late)).status == 404
        await fleet.table({V1: "retained", late: "current"})
        assert (await fleet.complete(late)).status == 200


async def _is_held(fleet: Fleet, count: int) -> bool:
    return await _held(fleet) == count
