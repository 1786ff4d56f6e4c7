"""Everything full: who has too much to do says so, and when to come back."""

from __future__ import annotations

import asyncio

import pytest

from support.router_fleet import V1, Answer, Fleet
from support.wait import wait_until

LONG = list(range(64))  # four blocks: whoever had it first is asked again


@pytest.mark.parametrize("status", [429, 503])
async def test_a_full_replica_is_replaced_and_has_not_failed(fleet: Fleet, status: int) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        await fleet.complete(V1, LONG)
        (owner,) = [replica for replica in fleet.replicas.values() if replica.seen]
        owner.fail, owner.retry_after = [status] * 4, "7"
        for _ in range(4):
            owner_asked = len(owner.seen)
            answer = await fleet.complete(V1, LONG)
            assert (answer.status, answer.headers.get("Retry-After")) == (200, None)
            owner.fail = [status] if len(owner.seen) > owner_asked else []
        health = (await fleet.get("/health")).json
        assert {each["circuit"] for each in health["replicas"].values()} == {"closed"}
        assert f'retries_total{{reason="full",replica="{owner.name}"}}' in (await fleet.get("/metrics")).body.decode()


@pytest.mark.parametrize(
    ("says", "told"),
    [(("7", "30"), "30"), (("30", "7"), "30"), (("7", "86400"), "60"), (("7", "soon"), "7"), (("", ""), "1")],
)
@pytest.mark.parametrize("status", [429, 503])
async def test_when_all_are_full_the_client_hears_the_longest_time(
    fleet: Fleet, status: int, says: tuple[str, str], told: str
) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    for replica, said in zip(fleet.replicas.values(), says, strict=True):
        replica.fail, replica.retry_after = [status], said
    async with fleet.router():
        answer = await fleet.complete(V1)
        assert answer.status == status
        assert "EngineCore" in answer.message  # the last replica's own words
        if "soon" not in says:
            assert answer.headers.getall("Retry-After", []) == [told]  # type: ignore[attr-defined]
        else:
            assert answer.headers["Retry-After"] == told
        assert [len(replica.seen) for replica in fleet.replicas.values()] == [1, 1]
        (row,) = await fleet.rows(1)
        assert (row["attempts"], row["status"]) == ("2", str(status))


async def test_no_more_than_so_many_are_in_flight(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    for replica in fleet.replicas.values():
        replica.gate.clear()
    async with fleet.router(max_inflight=2):
        asking = [asyncio.create_task(fleet.complete(V1)) for _ in range(2)]
        await wait_until(lambda: sum(replica.in_flight for replica in fleet.replicas.values()) == 2)
        _says_when(await fleet.complete(V1), "router is full")
        for replica in fleet.replicas.values():
            replica.gate.set()
        assert {answer.status for answer in await asyncio.gather(*asking)} == {200}
        assert (await fleet.complete(V1)).status == 200


async def test_no_more_than_so_many_bytes_are_in_flight(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    for replica in fleet.replicas.values():
        replica.gate.clear()
    async with fleet.router(inflight_bytes=4096):
        asking = asyncio.create_task(fleet.complete(V1, [1] * 1024))
        await wait_until(lambda: sum(replica.in_flight for replica in fleet.replicas.values()) == 1)
        async with asyncio.timeout(10):  # no replica would answer it
            _says_when(await fleet.complete(V1, [1] * 1024), "router is full")
        for replica in fleet.replicas.values():
            replica.gate.set()
        assert (await asking).status == 200
        assert (await fleet.complete(V1, [1] * 1024)).status == 200


async def test_no_more_than_so_many_are_held_for_a_version_that_was_lost(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    for replica in fleet.replicas.values():
        replica.holds = set()
    async with fleet.router(held_requests=1, hold_s=1.0):
        held = asyncio.create_task(fleet.complete(V1))
        await wait_until(lambda: _held(fleet))
        _says_when(await fleet.complete(V1), "no more requests can be held")
        _says_when(await held, "did not become so in time")


async def test_no_more_than_so_many_clients_are_connected(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router(connections=1) as url:
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        _says_when(await fleet.get("/v1/models"), "no more connections can be open")
        writer.close()
        await wait_until(lambda: _serves(fleet))


async def test_no_more_than_so_much_is_received_at_once(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router(arriving_bytes=1024):
        _says_when(await fleet.complete(V1, [1] * 4096), "too much is being received")
        assert (await fleet.complete(V1)).status == 200


def _says_when(answer: Answer, reason: str) -> None:
    assert answer.status == 503
    assert answer.headers["Retry-After"] == "1"
    error = answer.json["error"]
    assert reason in error["message"]
    assert (error["type"], error["code"]) == ("overloaded_error", "unroutable")


async def _held(fleet: Fleet) -> bool:
    return bool((await fleet.get("/health")).json["held"])


async def _serves(fleet: Fleet) -> bool:
    return (await fleet.complete(V1)).status == 200
