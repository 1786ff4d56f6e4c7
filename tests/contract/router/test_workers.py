"""A router of several processes, as its command starts it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from adaptersync.router.workers import reserved
from adaptersync_core.errors import ConfigError
from adaptersync_core.events import ReplicaAcked, to_fields
from support.router_fleet import V1, Fleet
from support.wait import wait_until


@dataclass
class Workers:
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def urls(self) -> list[str]:
        """Where workers said that they serve."""
        return re.findall(r"serving on (\S+)", self.log.read_text())

    def pids(self) -> set[int]:
        pid = self.process.pid
        return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


@contextlib.asynccontextmanager
async def workers(fleet: Fleet, tmp_path: Path, *, count: int = 2, exit_code: int = 0) -> AsyncIterator[Workers]:
    log = tmp_path / "log"
    process = _start(fleet, log, count)
    try:
        it = Workers(process, log)
        await wait_until(lambda: len(it.urls) == count, timeout_s=30.0)
        fleet.url = it.urls[0]
        yield it
    finally:
        fleet.url = ""
        process.terminate()
        try:
            assert await asyncio.to_thread(process.wait, 20.0) == exit_code, log.read_text()
        finally:
            process.kill()


def _start(fleet: Fleet, log: Path, count: int) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(_command("--workers", str(count), "--port", "0"), stderr=output, env=_env(fleet))


def _command(*options: str) -> list[str]:
    return [sys.executable, "-m", "adaptersync_tools.cli", "router", *options]


def _env(fleet: Fleet) -> dict[str, str]:
    settings = {
        "GROUP__NAME": "test",
        "REDIS__CONTROL_URL": fleet.control_url,
        "REDIS__CACHE_URL": fleet.cache_url,
        **{f"ROUTER__{name.upper()}": str(value) for name, value in fleet.settings.items()},
    }
    return os.environ | {f"ADAPTERSYNC_{name}": value for name, value in settings.items()}


async def _complete(fleet: Fleet, count: int) -> None:
    """Each on a connection of its own, so that all workers get some."""
    kept = fleet.session
    try:
        for _ in range(count):
            async with aiohttp.ClientSession() as fleet.session:
                assert (await fleet.complete(V1)).status == 200
    finally:
        fleet.session = kept


async def _figures(fleet: Fleet) -> dict[str, float]:
    """Counters and histograms, of whichever worker answers."""
    async with aiohttp.ClientSession() as session, session.get(fleet.url + "/metrics") as answer:
        assert answer.status == 200
        lines = (await answer.text()).splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    kinds = ("_total{", "_total ", "_bucket{", "_count{", "_count ", "_sum ")
    return {name: float(value) for name, value in pairs if any(kind in f"{name} " for kind in kinds)}


ACKED = ReplicaAcked(version=V1, replica="replica-0", engine_epoch="1", accepted=True, loaded_s=0.5)
LOADED = 'adaptersync_router_replica_phase_seconds_count{phase="loaded",replica="replica-0"}'
SERVED = 'adaptersync_router_requests_total{outcome="ok",status="200"}'


async def test_workers_share_a_free_port_and_any_of_them_tells_what_all_counted(fleet: Fleet, tmp_path: Path) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with workers(fleet, tmp_path) as it:
        assert len(set(it.urls)) == 1
        await _complete(fleet, 20)
        assert len({row["router"] for row in await fleet.rows(20)}) == 2
        await fleet.control.command("XADD", fleet.keys.events, "*", *to_fields(ACKED))  # which both could hear of

        async def all_told() -> bool:
            told = [await _figures(fleet) for _ in range(8)]
            return all(each[SERVED] == 20 and each.get(LOADED, 0) == 1 for each in told)

        await wait_until(all_told, timeout_s=10.0)
        assert "Traceback" not in it.log.read_text()
    assert await fleet.control.command("ZCARD", fleet.keys.routers) == 0


async def test_what_was_told_never_goes_down_when_a_worker_is_killed_and_replaced(fleet: Fleet, tmp_path: Path) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with workers(fleet, tmp_path) as it:
        for round_ in range(1, 4):
            await _complete(fleet, 10)

            async def all_told(count: int = 10 * round_) -> bool:
                return all([(await _figures(fleet))[SERVED] == count for _ in range(8)])

            await wait_until(all_told, timeout_s=10.0)  # who is killed takes along what it had not told
            told = [await _figures(fleet) for _ in range(8)]
            before = {name: max(each.get(name, 0.0) for each in told) for name in told[0]}
            victim = min(it.pids())
            os.kill(victim, signal.SIGKILL)
            await wait_until(lambda round_=round_: len(it.urls) == 2 + round_, timeout_s=20.0)  # type: ignore[misc]
            assert victim not in it.pids()
            assert len(it.pids()) == 2
            for _ in range(8):
                after = await _figures(fleet)
                assert not {name for name, value in before.items() if after.get(name, 0.0) < value}
        assert before[SERVED] == 30
        assert before["adaptersync_router_ledger_written_total"] > 0
        log = it.log.read_text()
        assert "Traceback" not in log
        assert log.count("SIGKILL; another takes its place") == 3


async def test_a_stop_lets_the_requests_of_all_workers_end(fleet: Fleet, tmp_path: Path) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with workers(fleet, tmp_path) as it:
        for replica in fleet.replicas.values():
            replica.gate.clear()
        async with contextlib.AsyncExitStack() as stack:
            kept, asking = fleet.session, []
            for _ in range(8):
                fleet.session = await stack.enter_async_context(aiohttp.ClientSession())
                asking.append(asyncio.create_task(fleet.complete(V1)))
                await asyncio.sleep(0)
            fleet.session = kept
            await wait_until(lambda: sum(replica.in_flight for replica in fleet.replicas.values()) == 8)
            it.process.send_signal(signal.SIGTERM)
            await wait_until(lambda: it.log.read_text().count("waiting for requests in flight") == 2)
            for replica in fleet.replicas.values():
                replica.gate.set()
            assert [(await each).status for each in asking] == [200] * 8
        assert await asyncio.to_thread(it.process.wait, 20.0) == 0
    assert len({row["router"] for row in await fleet.rows(8)}) == 2


async def _refused(fleet: Fleet, *options: str) -> tuple[int, list[str]]:
    """Exit code, and what was said."""
    done = await asyncio.to_thread(
        subprocess.run, _command(*options), capture_output=True, text=True, timeout=40.0, env=_env(fleet), check=False
    )
    return done.returncode, done.stderr.splitlines()


@pytest.mark.parametrize("count", ["1", "2"])
async def test_a_port_that_is_taken_is_one_line_and_no_router(fleet: Fleet, count: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, (line,) = await _refused(fleet, "--workers", count, "--port", str(port))
    assert code == ConfigError.exit_code
    assert "cannot listen: Address already in use" in line
    assert str(port) in line


@pytest.mark.parametrize("count", ["1", "2"])
async def test_no_other_router_gets_a_part_of_the_connections(fleet: Fleet, tmp_path: Path, count: str) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with workers(fleet, tmp_path):
        port = fleet.url.rpartition(":")[2]
        code, (line,) = await _refused(fleet, "--workers", count, "--port", port)
        assert code == ConfigError.exit_code
        assert "cannot listen: Address already in use" in line


async def test_a_port_is_free_again_when_its_router_was_killed_though_requests_still_end(
    fleet: Fleet, tmp_path: Path
) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with workers(fleet, tmp_path, exit_code=-signal.SIGKILL) as it:
        port = int(fleet.url.rpartition(":")[2])
        for replica in fleet.replicas.values():
            replica.gate.clear()
        asking = asyncio.create_task(fleet.complete(V1))
        await wait_until(lambda: sum(replica.in_flight for replica in fleet.replicas.values()) == 1)
        it.process.kill()
        await wait_until(lambda: it.log.read_text().count("waiting for requests in flight") == 2)
        with reserved("127.0.0.1", port) as ours:
            assert ours.port == port
        for replica in fleet.replicas.values():
            replica.gate.set()
        assert (await asking).status == 200


@pytest.mark.parametrize("count", ["0", "-1", "65"])
async def test_so_many_workers_are_no_setting(fleet: Fleet, count: str) -> None:
    code, (line,) = await _refused(fleet, "--workers", count)
    assert code == ConfigError.exit_code
    assert f"(key=router.workers value={count})" in line


async def test_a_router_none_of_whose_workers_can_begin_ends_with_the_reason(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    fleet.spool = tmp_path / "file" / "spool" / "test"
    code, lines = await _refused(fleet, "--workers", "2", "--port", "0")
    assert code == 1
    assert [line for line in lines if "spool cannot be made" in line]
    assert [line for line in lines if "that is too often, stopping" in line]
    assert not [line for line in lines if "Traceback" in line]
