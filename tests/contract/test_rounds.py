"""Rounds of housekeeping on a real server and a real store."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from msgspec.structs import replace
from rq import Queue
from rq.serializers import JSONSerializer

from adaptersync.jobs.rounds import tidy, verify
from adaptersync.trainer import AdapterPublisher
from adaptersync_core.config import Config, JobsSection, load_config
from adaptersync_core.errors import ControlUnavailable, StoreError
from adaptersync_core.keys import Keys
from adaptersync_core.queue import queue_name, verification_id
from adaptersync_core.records import Decision
from adaptersync_core.redis import RedisClient, rq_connection
from adaptersync_core.registry import Registry
from adaptersync_core.store import STAGING_S
from adaptersync_core.table import LiveState, LiveVersion, RunEntry, Table
from support.adapters import make_adapter

STATES: tuple[LiveState, ...] = ("current", "staging")


@pytest.fixture
def config(redis_url: str, cache_url: str, tmp_path: Path) -> Config:
    return load_config(
        environment={
            "ADAPTERSYNC_REDIS__CONTROL_URL": redis_url,
            "ADAPTERSYNC_REDIS__CACHE_URL": cache_url,
            "ADAPTERSYNC_STORE__PATH": str(tmp_path / "store"),
        }
    )


@pytest.mark.foreign_keys(reason="rq's own")
async def test_what_is_served_is_read_again_and_once_however_often_that_is_asked(
    config: Config, tmp_path: Path
) -> None:
    with AdapterPublisher(config, run="run") as publisher:
        names = [publisher.publish(make_adapter(tmp_path / f"a{n}", seed=n)).adapter_id for n in (1, 2)]
    client = RedisClient(config.redis.control_url, name="test")
    registry = Registry(client, Keys(config.group.name))
    lease = await registry.lead("c", "c", lease_s=30)
    live = {
        name: LiveVersion(
            run="run",
            seq=seq,
            epoch=1,
            digest=name.rpartition("-")[2],
            state=state,
            published_at=1,
            since=time.time(),
            changed_in=1,
        )
        for seq, (name, state) in enumerate(zip(names, STATES, strict=True), 1)
    }
    table = Table(generation=1, runs={"run": RunEntry(epoch=1, max_staleness=1)}, versions=live)
    await registry.decide(Decision(table=table), lease, alive_s=5)
    await client.close()
    for _ in range(2):
        assert await verify(config) == "asked for 1 verifications"
    with rq_connection(config.redis.control_url) as connection:
        queue = Queue(queue_name(config.group.name), connection=connection, serializer=JSONSerializer)
        assert queue.job_ids == [verification_id(config.group.name, names[0])]


async def test_a_round_without_redis_says_so(config: Config, tmp_path: Path) -> None:
    away = load_config(environment={}, overrides={"redis.control_url": "redis://127.0.0.1:1/0"})
    with pytest.raises(ControlUnavailable):
        await verify(away)


def test_what_a_killed_publisher_left_goes_and_what_is_on_its_way_stays(config: Config, tmp_path: Path) -> None:
    with AdapterPublisher(config, run="run") as publisher:
        name = publisher.publish(make_adapter(tmp_path / "a")).adapter_id
    store = Path(config.store.path)
    for left, age_s in (("old", STAGING_S + 60), ("new", 0)):
        directory = store / "run" / f".staging-{left}"
        directory.mkdir()
        os.utime(directory, (time.time() - age_s,) * 2)
    for _ in range(2):
        assert tidy(config) == "tidied 1 runs"
        assert sorted(path.name for path in (store / "run").iterdir()) == [".staging-new", name]


def test_what_a_killed_export_left_goes(config: Config, tmp_path: Path) -> None:
    exports = tmp_path / "exports"
    for left, age_s in (("old", STAGING_S + 60), ("new", 0)):
        (exports / f".export-{left}").mkdir(parents=True)
        os.utime(exports / f".export-{left}", (time.time() - age_s,) * 2)
    Path(config.store.path).mkdir()
    assert tidy(replace(config, jobs=JobsSection(export_path=str(exports)))) == "tidied 0 runs and 1 exports"
    assert [path.name for path in exports.iterdir()] == [".export-new"]


def test_a_store_that_is_away_says_so(config: Config) -> None:
    with pytest.raises(StoreError, match="cannot be tidied"):
        tidy(config)
