"""Bounds of the settings reach what they bound, and what is decided is counted."""

from __future__ import annotations

import asyncio

from support.router_fleet import V1, Fleet
from support.wait import wait_until


async def test_a_head_has_its_bound(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router(head_bytes=2048) as url:
        asked = {"model": V1, "prompt": [1]}
        for size, status in ((1024, 200), (2048, 431)):
            async with fleet.session.post(
                url + "/v1/completions", json=asked, headers={"x-filler": "x" * size}
            ) as answer:
                assert answer.status == status


async def test_blocks_have_their_bounds_in_a_request_and_in_a_version(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router(blocks={"per_request": 4, "per_version": 6}):
        for number in range(8):
            assert (await fleet.complete(V1, [number] * 128)).status == 200  # of eight blocks each
            assert 4 <= await fleet.cache.command("HLEN", fleet.keys.owned(V1)) <= 6
        assert {row["blocks"] for row in await fleet.rows(8)} == {"4"}


async def test_a_choice_is_one_call_and_ends_are_told_together(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    replicas = fleet.replicas.values()
    for replica in replicas:
        replica.gate.clear()

    async def scripts() -> int:
        return int((await fleet.cache.command("INFO", "commandstats"))["cmdstat_evalsha"]["calls"])

    async with fleet.router():
        before = await scripts()
        asking = asyncio.gather(*(fleet.complete(V1, [number] * 64) for number in range(60)))
        await wait_until(lambda: sum(replica.in_flight for replica in replicas) == 60)
        for replica in replicas:
            replica.gate.set()
        assert {answer.status for answer in await asking} == {200}
        await wait_until(lambda: _nothing_counted(fleet))
        assert (
            60 <= await scripts() - before < 90
        )  # 120 where each end is told alone; counts of what is there among them


async def _nothing_counted(fleet: Fleet) -> bool:
    return not any((await fleet.counts()).values())


async def test_choices_waits_and_first_tokens_are_counted(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        for stream in (False, True):
            answer = await fleet.complete(V1, [1] * 64, stream=stream)
        by = f'replica="{answer.headers["x-adaptersync-replica"]}"', f'version="{V1}"'
        counted = (await fleet.get("/metrics")).body.decode().splitlines()
        assert {
            f"adaptersync_router_{line}"
            for line in (
                "route_seconds_count 2.0",
                "hold_seconds_count 2.0",
                f'routed_total{{{by[0]},routing="cold",{by[1]}}} 1.0',
                f'routed_total{{{by[0]},routing="affinity",{by[1]}}} 1.0',
                f"first_token_seconds_count{{{by[0]},{by[1]}}} 1.0",
            )
        } <= set(counted)
