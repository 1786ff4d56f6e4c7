"""Each service as systemd starts it: READY when it serves and not before, signs of life while its loop turns."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import pytest
from msgspec.structs import replace

from adaptersync.agent import app as agent_app
from adaptersync.coordinator import app as coordinator_app
from adaptersync_core.config import Config, CoordinatorSection, RedisSection, StoreSection, variable
from adaptersync_core.notify import Notifier
from adaptersync_tools import replica as replica_tool
from adaptersync_tools.demo.synthetic import write_base_model
from adaptersync_tools.servers import RedisServer, Role
from support.notices import Notices, service
from support.wait import wait_until, wait_until_sync

pytestmark = pytest.mark.timeout(120)

WATCHDOG_S = 2.0
PORTS = 3


@pytest.fixture
def redis_kind() -> str:
    """One is enough: what is tested is no command of the server's."""
    return "redis7"


@pytest.fixture
def settings(redis_url: str, tmp_path: Path) -> dict[str, str]:
    return environment_of(redis_url, tmp_path)


def environment_of(url: str, directory: Path, **more: object) -> dict[str, str]:
    (directory / "store").mkdir(exist_ok=True)
    chosen = {
        "redis.control_url": url,
        "store.path": directory / "store",
        "router.spool_path": directory / "spool",
        "router.spool_bytes": 1 << 20,
        "router.kept_bytes": 1 << 20,
        "coordinator.tick_s": 0.1,
        "agent.heartbeat_s": 0.2,
        "agent.stage_path": directory / "staged",
        "engine.run_path": directory / "run",
        "engine.kind": "simulated",
        "engine.drain_s": 5,
        **more,
    }
    return {variable(name): str(value) for name, value in chosen.items()}


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in listeners]


def ends_well(process: subprocess.Popen[bytes], notices: Notices) -> None:
    """Asked to stop, it says so before it has ended, and nobody but itself has said anything."""
    process.send_signal(signal.SIGTERM)
    notices.wait("STOPPING=1")
    assert process.wait(20.0) == 0
    assert {notice.process for notice in notices.heard} == {process.pid}
    assert notices.count("READY=1") == 1


def test_a_coordinator_is_ready_when_it_can_decide(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    settings = environment_of(f"redis://127.0.0.1:{port}/0", tmp_path)
    with Notices(watchdog_s=WATCHDOG_S) as notices, service(notices, "coordinator", environment=settings) as process:
        notices.wait("STATUS=will try again")
        notices.wait("EXTEND_TIMEOUT_USEC")
        assert notices.count("READY=1") == 0
        with RedisServer(Role.CONTROL, tmp_path / "redis", port=port):
            notices.wait("READY=1")
            notices.wait("STATUS=leads with token 1")
            notices.wait("WATCHDOG=1", times=3)
            ends_well(process, notices)


def test_one_that_stands_by_is_ready_too(settings: dict[str, str]) -> None:
    with (
        Notices() as first,
        Notices() as second,
        service(first, "coordinator", "--name", "c-1", environment=settings),
    ):
        first.wait("STATUS=leads")
        with service(second, "coordinator", "--name", "c-2", environment=settings) as process:
            second.wait("READY=1")
            second.wait("STATUS=stands by: c-1 leads")
            ends_well(process, second)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_router_is_ready_when_all_of_it_vouches_for_a_table(settings: dict[str, str], workers: int) -> None:
    (port,) = free_ports(1)
    options = ("--port", str(port), "--workers", str(workers))
    with (
        Notices(watchdog_s=WATCHDOG_S) as notices,
        service(notices, "router", *options, environment=settings) as process,
        Notices() as others,
    ):
        wait_until_sync(lambda: answer(port) == 503, timeout_s=30.0, what="it listens, without a table")
        notices.wait("EXTEND_TIMEOUT_USEC")
        assert notices.count("READY=1") == 0
        with service(others, "coordinator", environment=settings):
            notices.wait("READY=1")
            notices.wait("WATCHDOG=1", times=3)
            ends_well(process, notices)


def answer(port: int) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answered:
            return int(answered.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@pytest.mark.foreign_keys(reason="rq's own")
def test_a_worker_is_ready_when_it_looks_for_jobs(settings: dict[str, str]) -> None:
    with Notices(watchdog_s=WATCHDOG_S) as notices, service(notices, "worker", environment=settings) as process:
        notices.wait("READY=1")
        notices.wait("WATCHDOG=1", times=3)
        ends_well(process, notices)


def test_a_worker_without_redis_was_never_ready(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    settings = environment_of(f"redis://127.0.0.1:{port}/0", tmp_path)
    with Notices() as notices, service(notices, "worker", environment=settings) as process:
        assert process.wait(30.0) == 69
        assert notices.count("READY=1") == 0


@pytest.fixture
def replica(redis_url: str, tmp_path: Path) -> Iterator[tuple[Notices, subprocess.Popen[bytes], dict[str, str]]]:
    port, events, replay = free_ports(PORTS)
    model = write_base_model(tmp_path / "model")
    ports = {"engine.port": port, "engine.events_port": events, "engine.replay_port": replay, "engine.model": model}
    slow = "--latency '{\"decode_tokens_per_s\": 10}'"
    settings = environment_of(redis_url, tmp_path, **ports, **{"engine.arguments": slow})
    (tmp_path / "run" / "0").mkdir(parents=True)
    with Notices(watchdog_s=WATCHDOG_S) as notices, service(notices, "replica", "0", environment=settings) as process:
        yield notices, process, settings


Replica = tuple[Notices, subprocess.Popen[bytes], dict[str, str]]


def test_a_replica_is_ready_when_its_engine_answers_and_takes_it_along(replica: Replica) -> None:
    notices, process, settings = replica
    port = int(settings[variable("engine.port")])
    notices.wait("READY=1")
    assert answer(port) == 200
    notices.wait("WATCHDOG=1", times=3)
    (engine,) = children(process.pid)
    environment = Path(f"/proc/{engine}/environ").read_bytes()
    assert b"NOTIFY_SOCKET" not in environment
    assert b"WATCHDOG" not in environment
    ends_well(process, notices)
    assert answer(port) == 0


def test_a_stop_lets_requests_in_flight_end(replica: Replica) -> None:
    notices, process, settings = replica
    notices.wait("READY=1")
    url = f"http://127.0.0.1:{settings[variable('engine.port')]}"
    asked = orjson.dumps({"model": "base", "prompt": [1, 2, 3], "max_tokens": 20})
    request = urllib.request.Request(f"{url}/v1/completions", asked, {"content-type": "application/json"})  # noqa: S310
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(lambda: urllib.request.urlopen(request, timeout=30).status)  # noqa: S310
        wait_until_sync(lambda: b"num_requests_running{" in running(url), timeout_s=10.0)
        process.send_signal(signal.SIGTERM)
        notices.wait("STATUS=waits for requests in flight")
        assert not waiting.done()
        assert waiting.result() == 200
        assert process.wait(20.0) == 0


def running(url: str) -> bytes:
    """The line of its metrics, unless it is zero."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as answered:  # noqa: S310
        found = [line for line in answered.read().splitlines() if line.startswith(b"vllm:num_requests_running{")]
    return b"".join(line for line in found if not line.endswith(b" 0.0"))


def test_an_engine_that_hangs_gives_no_sign_of_life(replica: Replica) -> None:
    notices, process, _ = replica
    notices.wait("WATCHDOG=1")
    (engine,) = children(process.pid)
    os.kill(engine, signal.SIGSTOP)
    assert notices.silent_for("WATCHDOG=1", 1.5 * WATCHDOG_S)


def test_an_engine_that_ends_ends_the_service_with_a_failure(replica: Replica) -> None:
    notices, process, _ = replica
    notices.wait("READY=1")
    (engine,) = children(process.pid)
    os.kill(engine, signal.SIGKILL)
    assert process.wait(20.0) not in (0, None)


def test_an_agent_is_ready_when_its_engine_is_in_redis(replica: Replica) -> None:
    engine, _, settings = replica
    engine.wait("READY=1")
    away = {**settings, variable("engine.port"): str(free_ports(1)[0])}
    with Notices(watchdog_s=WATCHDOG_S) as notices, service(notices, "agent", "--number", "0", environment=away):
        notices.wait("STATUS=not reported")
        notices.wait("EXTEND_TIMEOUT_USEC")
        assert notices.count("READY=1") == 0
    with (
        Notices(watchdog_s=WATCHDOG_S) as notices,
        service(notices, "agent", "--number", "0", environment=settings) as process,
    ):
        notices.wait("READY=1")
        notices.wait("WATCHDOG=1", times=3)
        ends_well(process, notices)


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


# a loop that is stuck while the process is well


@contextlib.asynccontextmanager
async def at_work(work: Any) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_a_coordinator_stuck_in_a_decision_falls_silent(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store").mkdir()
    config = Config(
        redis=RedisSection(control_url=redis_url),
        store=StoreSection(path=str(tmp_path / "store")),
        coordinator=CoordinatorSection(tick_s=0.02),
    )
    work, stuck = coordinator_app.Coordinator.work, asyncio.Event()

    async def hang(self: coordinator_app.Coordinator) -> None:
        if stuck.is_set():
            await asyncio.sleep(3600)
        await work(self)

    monkeypatch.setattr(coordinator_app.Coordinator, "work", hang)
    with Notices() as notices:
        notifier = Notifier(notices.address, watchdog_s=0.2)
        async with at_work(coordinator_app._coordinate(config, notifier)):
            await wait_until(lambda: notices.count("WATCHDOG=1") > 3, timeout_s=10.0)
            stuck.set()
            await asyncio.sleep(0.2)
            before = notices.count("WATCHDOG=1")
            await asyncio.sleep(0.6)
            assert notices.count("WATCHDOG=1") == before


@pytest.mark.parametrize("loop", ["observe", "reconcile"])
async def test_an_agent_of_which_one_loop_is_stuck_falls_silent(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    config = Config(redis=RedisSection(control_url=redis_url))
    agent_section = replace(
        config.agent, engine_url="http://127.0.0.1:9", heartbeat_s=0.02, stage_path=str(tmp_path), kv_events="off"
    )
    config = replace(config, agent=agent_section)

    async def hang(self: agent_app.Agent) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr("adaptersync_core.notify.EXTENSION_S", 0.2)
    with Notices() as notices:
        async with at_work(agent_app._stand_beside(config, None, Notifier(notices.address))):
            await wait_until(lambda: notices.count("EXTEND") > 3, timeout_s=10.0)
    monkeypatch.setattr(agent_app.Agent, loop, hang)
    with Notices() as notices:
        async with at_work(agent_app._stand_beside(config, None, Notifier(notices.address))):
            await asyncio.sleep(0.6)
            assert notices.count("EXTEND") == 0


async def test_the_word_of_an_engine_counts_and_not_that_somebody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it starts it need not answer; later it must."""
    monkeypatch.setattr(replica_tool, "LOOK_S", 0.02)
    (port,) = free_ports(1)
    with Notices() as notices:
        notifier = Notifier(notices.address, watchdog_s=0.1)
        async with at_work(replica_tool._watch(f"http://127.0.0.1:{port}", notifier)):
            await wait_until(lambda: notices.count("EXTEND_TIMEOUT_USEC") == 1)
            notifier.ready()
            await wait_until(lambda: notices.count("STATUS=no answer") == 1)
            await asyncio.sleep(0.3)
        assert notices.count("WATCHDOG=1") == 0
