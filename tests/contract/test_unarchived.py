"""That nobody archives is seen without a worker, and without the store: by what Redis holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from adaptersync.coordinator.app import Coordinator
from adaptersync.coordinator.metrics import TABLE
from adaptersync.coordinator.observer import look
from adaptersync.jobs.ledger import drain
from adaptersync_core.config import Config
from adaptersync_core.metrics import Metrics
from adaptersync_core.registry import Registry
from adaptersync_core.unarchived import DRAIN_LATE_S, unarchived_s
from support.ledger import Writer, config_of, row
from support.wait import wait_until


@pytest.fixture
def config(redis_url: str, tmp_path: Path) -> Config:
    return config_of(redis_url, tmp_path / "store")


async def said(writer: Writer, config: Config) -> list[str]:
    _, view = await look(Registry(writer.client, writer.keys), config)
    return [problem for problem in view.problems if "is archived" in problem]


async def aged(writer: Writer, seconds: float) -> None:
    """A row that was written so long ago."""
    now = await writer.client.command("TIME")
    await writer.rows([row("r-1")], entry=f"{int((now[0] - seconds) * 1000)}-0")


async def test_without_a_worker_status_says_so(config: Config, writer: Writer) -> None:
    assert await said(writer, config) == []
    await aged(writer, 7200)
    (problem,) = await said(writer, config)
    assert problem.startswith("nothing of the last 2 h is archived")
    assert await said(writer, replace(config, jobs=replace(config.jobs, ledger_s=0.0))) == []


async def test_what_is_archived_and_still_there_is_no_problem(config: Config, writer: Writer) -> None:
    """The last entry stays, and Redis trims by the hundred."""
    await aged(writer, 7200)
    await drain(config)
    assert await writer.client.command("XLEN", writer.keys.rollouts) == 1
    assert await said(writer, config) == []
    assert await unarchived_s(writer.client, writer.keys, config) == 0.0
    await aged(writer, 5000)  # after that
    assert len(await said(writer, config)) == 1


async def test_what_is_late_is_counted_from_when_it_is_due(config: Config, writer: Writer) -> None:
    hourly = replace(config, jobs=replace(config.jobs, ledger_s=3600.0))
    await aged(writer, DRAIN_LATE_S + 1800)
    assert len(await said(writer, config)) == 1
    assert await said(writer, hourly) == []


def told(figures: Metrics) -> list[float]:
    families = [family for family in figures.collect() if family.name.endswith("unarchived_seconds")]
    return [sample.value for family in families for sample in family.samples]


async def test_a_leader_that_may_not_look_does_not_keep_the_alert_silent(
    config: Config, writer: Writer, caplog: pytest.LogCaptureFixture
) -> None:
    """As one whose rights are those of a release in which there was nothing to look at."""
    await writer.client.command("SET", writer.keys.archived, "refused to whoever asks for fields")
    figures = Metrics("coordinator", TABLE)
    coordinator = Coordinator(config, Registry(writer.client, writer.keys), figures)

    async def counts_on() -> bool:
        await coordinator.work()
        return max(told(figures), default=0.0) > 0.3

    try:
        await wait_until(counts_on)
        assert caplog.text.count("cannot see whether the ledger is archived") == 1
        assert await said(writer, config) == []  # for those who look on it is no news
        await writer.client.command("DEL", writer.keys.archived)
        await drain(config)
        await coordinator.work()
        assert max(told(figures)) < 0.3
    finally:
        await coordinator.close()
