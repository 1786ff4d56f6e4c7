"""A ledger that Redis lost is written again by the routers that wrote it, as far as they keep it."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from support.router_fleet import V1, Fleet, Servers, free_port, router_process
from support.wait import wait_until


async def served(fleet: Fleet, count: int) -> set[str]:
    answers = [await fleet.complete(V1) for _ in range(count)]
    assert {answer.status for answer in answers} == {200}
    return {answer.headers["x-adaptersync-request-id"] for answer in answers}


async def recorded(fleet: Fleet, ids: set[str]) -> None:
    async def all_are() -> bool:
        return ids <= {row.request_id for row in await fleet.joined() if row.outcome == "ok"}

    await wait_until(all_are, timeout_s=20.0, what=f"rows of {len(ids)} requests")


async def test_an_emptied_ledger_is_written_again(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        before = await served(fleet, 300)  # more than one look-up
        await recorded(fleet, before)
        await fleet.control.command("DEL", fleet.keys.rollouts)
        await recorded(fleet, before)  # nobody asks anything meanwhile
        after = await served(fleet, 3)
        await recorded(fleet, before | after)
        assert (await fleet.get("/health")).json["ledger"]["rewritten"] == 300
    entries = [entry["request_id"] for entry in await fleet.entries()]
    assert len(entries) == len(set(entries)) == 303


async def test_only_what_a_ledger_lacks_is_written_again(own_fleet: Fleet, servers: Servers, tmp_path: Path) -> None:
    fleet = own_fleet
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        kept = await served(fleet, 5)
        await recorded(fleet, kept)
        shutil.copytree(servers.control.directory, tmp_path / "copy")
        lost = await served(fleet, 7)
        await recorded(fleet, lost)
        await asyncio.to_thread(servers.control.stop)
        _put_back(tmp_path / "copy", servers.control.directory)
        await asyncio.to_thread(servers.control.start)
        await recorded(fleet, kept | lost)
    entries = [entry["request_id"] for entry in await fleet.entries()]
    assert len(entries) == len(set(entries)) == 12


async def test_what_a_router_that_died_had_handed_over_is_written_again_by_the_next(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    port = free_port()
    fleet.url = f"http://127.0.0.1:{port}"
    with router_process(fleet, port):
        await wait_until(lambda: _healthy(fleet), timeout_s=20.0)
        rows = await served(fleet, 5)
        await recorded(fleet, rows)
    await fleet.control.command("DEL", fleet.keys.rollouts)
    async with fleet.router():
        await recorded(fleet, rows)


async def test_what_an_operator_trimmed_away_stays_away_and_what_was_lost_since_does_not(
    own_fleet: Fleet, servers: Servers, tmp_path: Path
) -> None:
    fleet = own_fleet
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        old = await served(fleet, 5)
        await recorded(fleet, old)
        kept = await served(fleet, 3)
        await recorded(fleet, kept)
        await fleet.control.command("XTRIM", fleet.keys.rollouts, "MAXLEN", 3)
        shutil.copytree(servers.control.directory, tmp_path / "copy")
    async with fleet.router():
        lost = await served(fleet, 2)
        await recorded(fleet, lost)
        await asyncio.to_thread(servers.control.stop)
        _put_back(tmp_path / "copy", servers.control.directory)
        await asyncio.to_thread(servers.control.start)
        await recorded(fleet, kept | lost)
    assert {entry["request_id"] for entry in await fleet.entries()} == kept | lost
    async with fleet.router():  # nor of a stream that was trimmed to nothing
        await fleet.control.command("XTRIM", fleet.keys.rollouts, "MAXLEN", 0)
        new = await served(fleet, 2)
        await recorded(fleet, new)
        assert {entry["request_id"] for entry in await fleet.entries()} == new
    async with fleet.router():
        last = await served(fleet, 1)
        await recorded(fleet, last)
        assert {entry["request_id"] for entry in await fleet.entries()} == new | last
        assert (await fleet.get("/health")).json["ledger"]["rewritten"] == 0


async def test_routers_of_two_groups_on_one_host_leave_each_others_rows_alone(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        await recorded(fleet, await served(fleet, 1))
    kept = list(fleet.spool.glob("kept/*.spool"))
    assert len(kept) == 1
    content = kept[0].read_bytes()
    async with fleet.router(group="other"):
        await wait_until((fleet.spool.parent / "other").is_dir)
    assert kept[0].read_bytes() == content


def _put_back(copy: Path, directory: Path) -> None:
    shutil.rmtree(directory / "appendonlydir")
    shutil.copytree(copy / "appendonlydir", directory / "appendonlydir")


async def _healthy(fleet: Fleet) -> bool:
    try:
        return (await fleet.get("/health")).status == 200
    except OSError:
        return False
