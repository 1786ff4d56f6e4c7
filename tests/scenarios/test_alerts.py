"""Each alert rule, over real scrapes of a simulated fleet: silent while all is well, and firing once its fault is made.

What would last minutes is made shorter in the expression; how long a condition must hold is Prometheus's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from msgspec.structs import replace

from adaptersync.jobs.ledger import drain
from adaptersync.jobs.metrics import JobMetrics
from adaptersync_core.access import RedisUser, rules
from adaptersync_core.config import Config, TelemetrySection
from adaptersync_core.metrics import text
from adaptersync_core.queue import Jobs
from adaptersync_core.redis import rq_connection
from adaptersync_tools.observing.alerts import ALERTS
from adaptersync_tools.observing.dashboard import queries
from adaptersync_tools.observing.names import TABLES, labels, metric
from adaptersync_tools.servers import RedisServer, Role
from adaptersync_tools.up import free_ports
from support import promql
from support.promql import Scrape, Vector
from support.redis_servers import RedisServers, server_binary
from support.wait import wait_until, wait_until_sync
from support.whole_fleet import PROMPT, Replica, WholeFleet, fleet_config, whole_fleet

EXPRESSIONS = {alert.name: alert.expr for alert in ALERTS}


class Watched:
    """A fleet and what a Prometheus would scrape of it."""

    def __init__(self, fleet: WholeFleet, ports: list[int]) -> None:
        self.fleet = fleet
        self._ports = ports

    async def scrape(self) -> Scrape:
        own = [f"http://127.0.0.1:{port}" for port in self._ports]
        return await asyncio.to_thread(promql.scrape, *own, self.fleet.url)

    async def firing(self, before: Scrape, shorter: dict[str, str] | None = None) -> dict[str, Vector]:
        """Alerts whose condition holds, with their series; numbers in `shorter` are replaced in the expressions."""
        now = await self.scrape()
        found = {}
        for name, expr in EXPRESSIONS.items():
            for number, less in (shorter or {}).items():
                expr = expr.replace(number, less)
            if series := promql.value(expr, before, now):
                found[name] = series
        found.pop("AdapterSyncJobsFail", None)
        return found

    async def fires(self, name: str, before: Scrape, shorter: dict[str, str] | None = None) -> Vector:
        """Wait until it does; returns its series."""
        series: Vector = {}

        async def does() -> bool:
            nonlocal series
            series = (await self.firing(before, shorter)).get(name, {})
            return bool(series)

        await wait_until(does, timeout_s=30, what=f"{name} fires")
        return series

    async def silent(self, name: str, before: Scrape, shorter: dict[str, str] | None = None) -> None:
        """Wait until it does not fire any more."""

        async def is_so() -> bool:
            return name not in await self.firing(before, shorter)

        await wait_until(is_so, timeout_s=30, what=f"{name} does not fire")


@contextlib.asynccontextmanager
async def watched(config: Config, directory: Path, **more: Any) -> AsyncIterator[Watched]:
    coordinator, *agents = free_ports(3)
    config = replace(config, coordinator=replace(config.coordinator, metrics_port=coordinator))
    async with whole_fleet(config, directory, start=False, **more) as fleet:
        for replica, port in zip(fleet.replicas.values(), agents, strict=True):
            replica.config = replace(replica.config, agent=replace(replica.config.agent, metrics_port=port))
        await fleet.start()
        yield Watched(fleet, [coordinator, *agents])


@pytest.fixture
async def seen(config: Config, tmp_path: Path) -> AsyncIterator[Watched]:
    async with watched(config, tmp_path) as seen:
        yield seen


@pytest.fixture
def own_control(
    redis_servers: RedisServers, redis_kind: str, no_leaked_keys: None, tmp_path: Path
) -> Iterator[RedisServer]:
    """One that may be ended."""
    directory = tmp_path / "control"
    with RedisServer(Role.CONTROL, directory, binary=server_binary(redis_kind)) as server:
        yield server


def replicas(series: Vector) -> set[str]:
    return {dict(each)["replica"] for each in series}


async def test_no_alert_while_all_is_well_and_every_metric_is_there(seen: Watched) -> None:
    fleet = seen.fleet
    trainer = await fleet.trainer()
    before = await seen.scrape()
    for _ in range(3):
        version = await fleet.promoted(trainer)
        for _ in range(4):
            assert (await fleet.complete(version)).status == 200
            assert (await fleet.complete(version, stream=True)).status == 200
    await fleet.settled()
    begun = await seen.scrape()
    assert (await fleet.complete(version)).status == 200
    assert (await fleet.complete(version, stream=True)).status == 200
    assert await seen.firing(before) == {}

    now = await seen.scrape()
    rare = {"retries", "unauthorized", "missing_version", "gated_seconds", "undecided_seconds", "predicted_tokens"}
    for service in ("router", "coordinator", "agent"):
        for figure in TABLES[service]:
            name = metric(service, figure) + ("_count" if figure.kind == "histogram" else "")
            if figure.name in rare:
                continue
            assert now.get(name), f"{name} is not told by a fleet that works"
            for each in now[name]:
                assert {key for key, _ in each} == {*labels(service, figure), "instance"}, name
    unknown = {name for name in now if name.startswith("adaptersync_")} - documented()
    assert not unknown
    assert sum(now["adaptersync_coordinator_promotion_seconds_count"].values()) == 3
    assert sum(now["adaptersync_router_replica_phase_seconds_count"].values()) >= 3 * 2 * 4
    judged = now["adaptersync_agent_proofs_total"].items()
    assert {dict(each)["verdict"]: count for each, count in judged}["proved"] >= 3

    for query in queries():  # each panel that can have something has something
        asked = promql.names(query)
        if not any(name.startswith("adaptersync_worker") for name in asked) and not set(asked) & missing(rare):
            assert promql.value(query.replace("[$__rate_interval]", "[1m]"), begun, now), query


def documented() -> set[str]:
    from adaptersync_tools.observing.names import series

    return set(series())


def missing(rare: set[str]) -> set[str]:
    return {metric(service, figure) for service, table in TABLES.items() for figure in table if figure.name in rare}


async def test_no_leader(seen: Watched) -> None:
    before = await seen.scrape()
    await seen.fleet.stop_coordinator()
    assert await seen.fires("AdapterSyncNoLeader", before)


async def test_no_leader_while_the_store_is_away_and_nothing_is_told_of_a_fleet(seen: Watched) -> None:
    before = await seen.scrape()
    store = Path(seen.fleet.config.store.path)
    await asyncio.to_thread(store.rename, store.with_name("away"))
    await seen.fleet[1].stop_agent()  # there is something to decide
    assert await seen.fires("AdapterSyncNoLeader", before)
    now = await seen.scrape()
    assert list(now["adaptersync_coordinator_leading"].values()) == [0.0]
    assert "adaptersync_coordinator_members" not in now
    await asyncio.to_thread(store.with_name("away").rename, store)

    await seen.silent("AdapterSyncNoLeader", before)


async def test_a_version_is_stuck(seen: Watched) -> None:
    trainer = await seen.fleet.trainer()
    before = await seen.scrape()
    seen.fleet[1].faults(delay_load_s=5.0)
    publication = await seen.fleet.publish(trainer)
    series = await seen.fires("AdapterSyncVersionStuck", before, {"> 300": "> 1"})
    assert {dict(each)["run"] for each in series} == {"run"}
    assert (await seen.fleet.outcome(publication)).state == "current"
    await seen.silent("AdapterSyncVersionStuck", before, {"> 300": "> 1"})


async def test_what_waits_at_the_gate_is_not_stuck(config: Config, tmp_path: Path) -> None:
    gated = replace(config, coordinator=replace(config.coordinator, gate=True))
    async with watched(gated, tmp_path) as seen:
        trainer = await seen.fleet.trainer()
        before = await seen.scrape()
        await seen.fleet.publish(trainer)

        async def waits() -> bool:
            told = (await seen.scrape()).get("adaptersync_coordinator_gated_seconds", {})
            return any(value > 0.5 for value in told.values())

        await wait_until(waits, timeout_s=30)
        assert "AdapterSyncVersionStuck" not in await seen.firing(before, {"> 300": "> 0.1"})


async def test_a_replica_is_ejected_since_its_engine_does_not_answer(seen: Watched) -> None:
    before = await seen.scrape()
    seen.fleet[1].faults(frozen=True)
    assert replicas(await seen.fires("AdapterSyncReplicaEjected", before)) == {"replica-1"}
    assert replicas(await seen.fires("AdapterSyncEngineAway", before)) == {"replica-1"}


async def test_too_few_replicas_are_ready(config: Config, tmp_path: Path) -> None:
    async with watched(replace(config, coordinator=replace(config.coordinator, min_ready=2)), tmp_path) as seen:
        before = await seen.scrape()
        assert "AdapterSyncTooFewReady" not in await seen.firing(before)
        await seen.fleet[1].stop_agent()
        assert await seen.fires("AdapterSyncTooFewReady", before)


async def test_a_probe_fails(seen: Watched) -> None:
    trainer = await seen.fleet.trainer()
    await seen.fleet.promoted(trainer)
    before = await seen.scrape()
    seen.fleet[1].faults(corrupt_slot=True)
    await seen.fleet.publish(trainer)
    assert replicas(await seen.fires("AdapterSyncProbeFailed", before)) == {"replica-1"}


async def test_versions_are_rolled_back(seen: Watched) -> None:
    trainer = await seen.fleet.trainer()
    before = await seen.scrape()
    for replica in seen.fleet.replicas.values():
        replica.faults(fail_loads=100, fail_load_status=400)
    await seen.fleet.publish(trainer)
    assert await seen.fires("AdapterSyncRolledBack", before)


async def test_affinity_collapses_when_caches_forget_what_routing_counts_on(seen: Watched) -> None:
    fleet = seen.fleet
    version = await fleet.promoted(await fleet.trainer())
    prompt = PROMPT * 4
    await fleet.complete(version, prompt)
    before = await seen.scrape()
    for _ in range(4):
        assert (await fleet.complete(version, prompt)).status == 200
    rates = {"[10m]": "[1s]"}
    before_fault = await seen.scrape()
    assert promql.value("sum(adaptersync_router_predicted_tokens_total) > 100", before, before_fault)
    assert "AdapterSyncAffinityCollapse" not in await seen.firing(before, rates)
    for _ in range(4):
        forget(fleet[0])
        forget(fleet[1])
        assert (await fleet.complete(version, prompt)).status == 200
    assert "AdapterSyncAffinityCollapse" in await seen.firing(before_fault, rates)


def forget(replica: Replica) -> None:
    """What it has cached, as an engine that is short of memory does."""
    assert replica.sim.ranks.reset()


async def test_the_control_server_is_away(
    redis_servers: RedisServers, redis_kind: str, own_control: RedisServer, tmp_path: Path
) -> None:
    cache = redis_servers.url(redis_kind, Role.CACHE)
    config = fleet_config(own_control.url, cache, tmp_path)
    config = replace(config, router=replace(config.router, spool_bytes=16_384, when_spool_full="serve"))
    async with watched(config, tmp_path) as seen:
        version = await seen.fleet.promoted(await seen.fleet.trainer())
        await seen.fleet.complete(version)

        async def written() -> bool:
            return not any((await seen.scrape())["adaptersync_router_ledger_waiting"].values())

        await wait_until(written, timeout_s=30)
        own_control.kill()
        await seen.fleet.complete(version)
        before = await seen.scrape()
        assert "AdapterSyncSpoolFilling" not in await seen.firing(before)
        assert await seen.fires("AdapterSyncLedgerLag", before)
        assert await seen.fires("AdapterSyncTableOld", before, {"> 20": "> 2"})
        assert "AdapterSyncRowsLost" not in await seen.firing(before)
        for _ in range(60):
            assert (await seen.fleet.complete(version)).status == 200
        firing = await seen.firing(before)
        assert {"AdapterSyncSpoolFilling", "AdapterSyncRowsLost"} <= firing.keys()
        own_control.start()


@pytest.mark.foreign_keys("rq has its own")
def test_jobs_fail(config: Config, tmp_path: Path) -> None:
    """A worker as it runs; its figures are those of the queue."""
    (port,) = free_ports(1)
    environment = {
        **os.environ,
        "ADAPTERSYNC_GROUP__NAME": config.group.name,
        "ADAPTERSYNC_REDIS__CONTROL_URL": config.redis.control_url,
        "ADAPTERSYNC_STORE__PATH": config.store.path,
        "ADAPTERSYNC_JOBS__METRICS_PORT": str(port),
    }
    command = [sys.executable, "-m", "adaptersync_tools.cli", "worker"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as worker:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_sync(lambda: promql.scrape(url), timeout_s=30)
            before = promql.scrape(url)
            told = {name for name in before if name.startswith("adaptersync_")}
            assert told == {metric("worker", figure) for figure in TABLES["worker"]}
            assert not promql.value(EXPRESSIONS["AdapterSyncJobsFail"], before, before)
            with Jobs(config) as jobs:
                jobs.verify("nobody-v1-0123456789ab")
            fires = EXPRESSIONS["AdapterSyncJobsFail"]
            wait_until_sync(lambda: promql.value(fires, before, promql.scrape(url)), timeout_s=30)
        finally:
            worker.terminate()


async def test_the_ledger_is_not_archived(seen: Watched) -> None:
    """Nor does any worker run: the coordinator tells it."""
    pytest.importorskip("pyarrow")
    name, shorter = "AdapterSyncArchiveLag", {"max(adaptersync_coordinator_archive_late_seconds)": "1.5"}
    version = await seen.fleet.promoted(await seen.fleet.trainer())
    await seen.fleet.complete(version)
    before = await seen.scrape()
    assert set(before["adaptersync_coordinator_archive_late_seconds"].values()) == {960.0}
    assert name not in await seen.firing(before)
    await seen.fires(name, before, shorter)
    await drain(seen.fleet.config)

    async def none_waits() -> bool:
        told = (await seen.scrape()).get("adaptersync_coordinator_unarchived_seconds", {})
        return bool(told) and max(told.values()) < 1.5  # nothing told is silent, too

    await wait_until(none_waits, timeout_s=30)


def test_a_worker_tells_as_much_with_the_rights_of_its_own_user(config: Config) -> None:
    worker = RedisUser("worker", "worker-0")
    user, url = worker.user(config.group.name), config.redis.control_url
    with rq_connection(url) as admin:
        admin.execute_command("ACL", "SETUSER", user, "on", ">secret", *rules(config.group.name, worker))
        try:
            own = url.replace("redis://", f"redis://{quote(user, safe='')}:secret@")
            figures = JobMetrics(replace(config, redis=replace(config.redis, control_url=own)))
            told = promql.read(text(figures).decode(), "worker")
        finally:
            admin.execute_command("ACL", "DELUSER", user)
    assert set(told["adaptersync_worker_redis_reachable"].values()) == {1.0}
    assert len(told) == len(TABLES["worker"])


def test_every_alert_has_its_fault_here() -> None:
    source = Path(__file__).read_text()
    assert [name for name in EXPRESSIONS if f'"{name}"' not in source] == []
    assert TelemetrySection().metrics_host == "127.0.0.1"
