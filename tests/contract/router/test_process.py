"""The router as a process: it stops in order, and never blocks its loop."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import aiohttp
import pytest
from blockbuster import blockbuster_ctx

from adaptersync_core.errors import StoreError
from support.router_fleet import V1, Fleet, free_port, router_process
from support.unclosed import nothing_unclosed
from support.wait import wait_until


async def test_a_stop_lets_requests_in_flight_end(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    port = free_port()
    fleet.url = f"http://127.0.0.1:{port}"
    with router_process(fleet, port) as process:
        await wait_until(lambda: _healthy(fleet), timeout_s=20.0)
        for replica in fleet.replicas.values():
            replica.gate.clear()
        waiting = asyncio.create_task(fleet.complete(V1))
        await wait_until(lambda: sum(replica.in_flight for replica in fleet.replicas.values()) == 1)
        process.send_signal(signal.SIGTERM)
        await wait_until(lambda: _closed(port), what="the port is closed")
        assert not waiting.done()
        for replica in fleet.replicas.values():
            replica.gate.set()
        assert (await waiting).status == 200
        assert await asyncio.to_thread(process.wait, 10.0) == 0
    assert len(await fleet.rows(1)) == 1
    assert await fleet.control.command("ZCARD", fleet.keys.routers) == 0
    assert await fleet.cache.command("EXISTS", fleet.keys.inflight) == 0


async def test_a_router_killed_with_requests_in_flight_gives_them_back(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    port = free_port()
    for replica in fleet.replicas.values():
        replica.gate.clear()
    async with fleet.router() as survivor:
        with router_process(fleet, port) as process:
            fleet.url = f"http://127.0.0.1:{port}"
            await wait_until(lambda: _healthy(fleet), timeout_s=20.0)
            lost = [asyncio.create_task(fleet.complete(V1)) for _ in range(3)]
            mine = asyncio.create_task(fleet.complete(V1, url=survivor))
            await wait_until(lambda: _counted(fleet, 4))
            process.kill()
            failed = await asyncio.gather(*lost, return_exceptions=True)
            assert all(isinstance(error, aiohttp.ClientError) for error in failed)
        await wait_until(lambda: _counted(fleet, 1), timeout_s=15.0)
        for replica in fleet.replicas.values():
            replica.gate.set()
        assert (await mine).status == 200


async def test_the_loop_is_never_blocked(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    chat = {"model": "run-a", "messages": [{"role": "user", "content": "x" * 5000}], "stream": True}
    async with fleet.router():
        with blockbuster_ctx() as blockbuster:  # starting may read files, serving may not
            for function in blockbuster.functions.values():  # the Redis client reads its version for each connection
                function.can_block_in("redis/driver_info.py", "__post_init__")
            assert (await fleet.complete("run-a", list(range(2000)))).status == 200
            assert (await fleet.post("/v1/chat/completions", chat)).status == 200
            assert (await fleet.complete("nobody")).status == 404
            assert (await fleet.get("/v1/models")).status == 200
            assert (await fleet.get("/metrics")).status == 200
            await fleet.table({V1: "current"})
            await fleet.rows(3)


async def _healthy(fleet: Fleet) -> bool:
    try:
        return (await fleet.get("/health")).status == 200
    except aiohttp.ClientError:
        return False


async def _counted(fleet: Fleet, count: int) -> bool:
    counts = await fleet.counts()
    return sum(value for name, value in counts.items() if "|" not in name) == count


async def _closed(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return True
    writer.close()
    return False


async def test_a_router_that_cannot_begin_leaves_nothing_open(fleet: Fleet, tmp_path: Path) -> None:
    place = tmp_path / "spool"
    place.write_text("no directory")
    with nothing_unclosed(), pytest.raises(StoreError, match="spool cannot be made"):
        async with fleet.router(spool_path=str(place)):
            pass
