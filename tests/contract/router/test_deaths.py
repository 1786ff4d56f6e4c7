"""kill -9 of a router under load: every request that reached a replica, or was answered, has a row afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
from collections.abc import AsyncIterator

import aiohttp
import pytest

from adaptersync_core.rollouts import UNKNOWN, Row
from support.router_fleet import V1, Fleet, Servers, free_port, router_process
from support.wait import wait_until

CLIENTS = 24
LOAD_S = 1.0


class Load:
    """Clients that ask without pause; `answered` by request id, and how many bytes of an answer came before a cut."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._tasks: list[asyncio.Task[None]] = []
        self.answered: dict[str, int] = {}

    async def _client(self, place: int) -> None:
        url = self._fleet.url + "/v1/completions"
        body = {"model": V1, "prompt": [place], "stream": place % 3 == 0}
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with self._fleet.session.post(url, json=body) as answer:
                    self.answered[answer.headers["x-adaptersync-request-id"]] = answer.status
                    await answer.read()
            await asyncio.sleep(0)

    @contextlib.asynccontextmanager
    async def under_way(self) -> AsyncIterator[None]:
        self._tasks = [asyncio.create_task(self._client(place)) for place in range(CLIENTS)]
        try:
            yield
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)


def asked(fleet: Fleet) -> set[str]:
    """Requests that reached a replica."""
    return {seen.headers["x-request-id"] for replica in fleet.replicas.values() for seen in replica.seen}


async def dithering(fleet: Fleet) -> None:
    """Replicas hold some answers back, so that requests are in flight at any instant."""
    rng = random.Random(7)
    while True:
        for replica in fleet.replicas.values():
            replica.gate.set()
        await asyncio.sleep(rng.random() / 100)
        for replica in fleet.replicas.values():
            replica.gate.clear()
        await asyncio.sleep(rng.random() / 50)


async def _held(fleet: Fleet, dither: asyncio.Task[None]) -> None:
    """From here on replicas answer nothing, and some requests wait for them."""
    dither.cancel()
    for replica in fleet.replicas.values():
        replica.gate.clear()
    await wait_until(lambda: sum(replica.in_flight for replica in fleet.replicas.values()) > 0)


async def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    await asyncio.to_thread(process.wait)


async def _rows(fleet: Fleet) -> dict[str, Row]:
    return {row.request_id: row for row in await fleet.joined()}


async def _covered(fleet: Fleet) -> bool:
    return asked(fleet) <= (await _rows(fleet)).keys()


def _check(fleet: Fleet, load: Load, rows: dict[str, Row]) -> None:
    """Nothing is lost, and nothing is said to have ended otherwise than it did."""
    assert len(asked(fleet)) > 50
    assert asked(fleet) <= rows.keys()
    answered = {request_id for request_id, status in load.answered.items() if status == 200}
    assert answered <= rows.keys()
    assert {row.outcome for row in rows.values()} <= {"ok", UNKNOWN, "refused", "client_gone"}
    for row in rows.values():
        if row.outcome == UNKNOWN:
            assert row.reason == "router died before it ended"
            assert (row.version, row.replica) != ("", "")
        elif row.outcome == "ok":
            assert row.request_id in asked(fleet)


@pytest.mark.parametrize("turn", range(3))
async def test_a_killed_router_loses_no_row(fleet: Fleet, turn: int) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    port = free_port()
    fleet.url = f"http://127.0.0.1:{port}"
    load, dither = Load(fleet), asyncio.create_task(dithering(fleet))
    try:
        with router_process(fleet, port) as process:
            await wait_until(lambda: _healthy(fleet), timeout_s=20.0)
            async with load.under_way():
                await asyncio.sleep(LOAD_S + turn / 7)  # how long it runs is what the test is about
                await _held(fleet, dither)
                await _kill(process)
        with router_process(fleet, port):
            await wait_until(lambda: _healthy(fleet), timeout_s=20.0)
            await wait_until(lambda: _covered(fleet), timeout_s=20.0)
            await wait_until(lambda: _emptied(fleet), timeout_s=20.0)
    finally:
        dither.cancel()
    rows = await _rows(fleet)
    _check(fleet, load, rows)
    assert any(row.outcome == UNKNOWN for row in rows.values())  # some were in flight


async def test_a_router_killed_again_and_again_while_redis_is_away_loses_no_row(
    own_fleet: Fleet, servers: Servers
) -> None:
    fleet = own_fleet
    await fleet.tables.write({V1: "current"}, fleet.urls)
    port = free_port()
    fleet.url = f"http://127.0.0.1:{port}"
    load, dither = Load(fleet), asyncio.create_task(dithering(fleet))
    try:
        with router_process(fleet, port, spool_bytes=8 << 20) as process:
            await wait_until(lambda: _healthy(fleet), timeout_s=20.0)
            async with load.under_way():
                await asyncio.sleep(LOAD_S / 2)
                await asyncio.to_thread(servers.control.kill)
                await asyncio.sleep(LOAD_S)
                await _held(fleet, dither)
                await _kill(process)
        for _ in range(2):  # without Redis it has no table and serves nothing; what it found must survive it
            with router_process(fleet, port, spool_bytes=8 << 20) as process:
                await wait_until(lambda: _listens(fleet), timeout_s=20.0)
                await _kill(process)
        assert len(list(fleet.spool.glob("*.spool"))) == 1
        await asyncio.to_thread(servers.control.start)
        with router_process(fleet, port, spool_bytes=8 << 20):
            await wait_until(lambda: _covered(fleet), timeout_s=20.0)
            await wait_until(lambda: _emptied(fleet), timeout_s=20.0)
    finally:
        dither.cancel()
    rows = await _rows(fleet)
    _check(fleet, load, rows)
    assert any(row.outcome == UNKNOWN for row in rows.values())


async def test_what_a_neighbour_left_is_written_too_and_its_file_removed(fleet: Fleet) -> None:
    """Two processes share a name and a directory; one comes back, with spools of another size."""
    await fleet.tables.write({V1: "current"}, fleet.urls)
    ports = [free_port(), free_port()]
    for replica in fleet.replicas.values():
        replica.gate.clear()
    with router_process(fleet, ports[0]) as one, router_process(fleet, ports[1]) as two:
        asking = []
        for port in ports:
            fleet.url = f"http://127.0.0.1:{port}"
            await wait_until(lambda: _healthy(fleet), timeout_s=20.0)
            asking.append(asyncio.create_task(fleet.complete(V1, url=fleet.url)))
        await wait_until(lambda: sum(replica.in_flight for replica in fleet.replicas.values()) == 2)
        for process in (one, two):
            await _kill(process)
        await asyncio.gather(*asking, return_exceptions=True)
    assert len(list(fleet.spool.glob("*.spool"))) == 2
    async with fleet.router(spool_bytes=2 << 20):
        rows = await fleet.rows(2)
        assert {row["outcome"] for row in rows} == {UNKNOWN}
        assert {row["request_id"] for row in rows} == asked(fleet)
        await wait_until(lambda: len(list(fleet.spool.glob("*.spool"))) == 1)


async def _healthy(fleet: Fleet) -> bool:
    try:
        return (await fleet.get("/health")).status == 200
    except aiohttp.ClientError:
        return False


async def _listens(fleet: Fleet) -> bool:
    with contextlib.suppress(aiohttp.ClientError):
        return bool((await fleet.get("/health")).json["ledger"]["waiting"])
    return False


async def _emptied(fleet: Fleet) -> bool:
    ledger = (await fleet.get("/health")).json["ledger"]
    return bool(ledger["waiting"] == 0 and ledger["spool_bytes"] == 0)
