"""What workers ask for by the clock, on a real server: once each time, whoever asks, and also what was missed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from msgspec.structs import replace
from rq import Queue, cron_job_registry
from rq.cron import CronScheduler
from rq.serializers import JSONSerializer

from adaptersync.jobs.schedule import AHEAD_S, Schedule
from adaptersync_core.config import Config, JobsSection, RedisSection, StoreSection, load_config
from adaptersync_core.errors import ConfigError, ControlError
from adaptersync_core.keys import Keys
from adaptersync_core.queue import JOBS, ROUNDS, Jobs, job_id, queue_name
from adaptersync_core.redis import rq_connection
from adaptersync_tools.cli import main
from support.redis_servers import KINDS
from support.wait import wait_until_sync
from support.workers import start_worker

pytestmark = pytest.mark.foreign_keys("rq keeps its own")


@pytest.fixture
def redis_kind() -> str:
    """One server is enough: rq's own commands, and requests, are tried on all elsewhere."""
    return KINDS[0]


EVERY_MINUTE = "* * * * *"
RARELY = "0 0 29 2 *"


@pytest.fixture
def config(redis_url: str, tmp_path: Path) -> Config:
    (tmp_path / "store").mkdir()
    return Config(
        redis=RedisSection(control_url=redis_url),
        store=StoreSection(path=str(tmp_path / "store")),
        jobs=JobsSection(verify_cron=RARELY, retention_cron=RARELY, tidy_cron=RARELY, ledger_s=0),
    )


def schedule(config: Config, name: str = "one") -> Schedule:
    made = Schedule(config, name=name)
    made.begin()
    return made


def queued(config: Config) -> list[str]:
    with rq_connection(config.redis.control_url) as connection:
        return Queue(queue_name(config.group.name), connection=connection, serializer=JSONSerializer).job_ids


def noted(config: Config, name: str, at: float) -> None:
    with rq_connection(config.redis.control_url) as connection:
        cron_job_registry.add(f"{config.group.name}-{name}", connection, enqueue_timestamp=at)


def forget_queue(config: Config) -> None:
    with rq_connection(config.redis.control_url) as connection:
        Queue(queue_name(config.group.name), connection=connection, serializer=JSONSerializer).empty()  # type: ignore[no-untyped-call]


def test_what_came_due_while_no_worker_ran_is_asked_for_once(config: Config) -> None:
    hourly = replace(config, jobs=replace(config.jobs, retention_cron="0 * * * *"))
    noted(hourly, "retention", time.time() - 7200)
    first, second = schedule(hourly, "one"), schedule(hourly, "two")
    first.look()
    assert queued(hourly) == [job_id("retention", "default")]
    forget_queue(hourly)
    second.look()  # another worker, after the job has ended
    first.look()
    assert queued(hourly) == []
    first.end()
    second.end()


def test_what_was_never_asked_for_waits_for_its_time(config: Config) -> None:
    made = schedule(config)
    made.look()
    assert queued(config) == []
    made.end()


def test_a_note_from_the_future_is_a_wrong_clocks(config: Config) -> None:
    pytest.importorskip("pyarrow")
    config = replace(config, jobs=replace(config.jobs, ledger_s=60.0))
    noted(config, "ledger", time.time() + AHEAD_S + 1000)
    made = schedule(config)
    made.look()
    assert queued(config) == [job_id("ledger", "default")]
    made.end()


def test_a_worker_that_cannot_archive_does_not_begin(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adaptersync_core.archive.installed", lambda: False)
    schedule(config).end()
    with pytest.raises(ConfigError, match=r"needs pyarrow.*jobs\.ledger_s = 0"):
        schedule(replace(config, jobs=replace(config.jobs, ledger_s=60.0)))


def test_a_table_that_cannot_be_read_ends_no_worker(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    gate = replace(config.coordinator, gate_function="somebody:judges")
    made = schedule(replace(config, coordinator=gate))
    table = Keys(config.group.name).table
    with rq_connection(config.redis.control_url) as connection:
        connection.set(table, "{")
        with pytest.raises(ControlError, match="table cannot be read"):
            made._gates()
        connection.delete(table)
    made.end()


def test_rq_lists_the_schedule_and_its_jobs_are_json(config: Config) -> None:
    made = schedule(replace(config, jobs=replace(config.jobs, verify_cron=EVERY_MINUTE)))
    made.look()
    with rq_connection(config.redis.control_url) as connection:
        (found,) = CronScheduler.all(connection)
        assert {(job.name, job.cron) for job in found.get_jobs()} == {
            ("default-verify", EVERY_MINUTE), ("default-retention", RARELY), ("default-tidy", RARELY),
        }  # fmt: skip
        made.end()
        assert CronScheduler.all(connection) == []


def test_a_time_that_is_none_is_named(config: Config) -> None:
    with pytest.raises(ConfigError, match=r"jobs\.verify_cron"):
        schedule(replace(config, jobs=replace(config.jobs, verify_cron="99 3 * * *")))
    with pytest.raises(ConfigError, match=r"jobs\.tidy_cron"):
        load_config(environment={}, overrides={"jobs.tidy_cron": "daily"})


def test_a_redis_that_is_away_is_said_once_and_tried_again(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    made = schedule(replace(config, jobs=replace(config.jobs, verify_cron=EVERY_MINUTE)))
    away = rq_connection("redis://127.0.0.1:1/0")
    made._rq.connection, back = away, made._connection
    for _ in range(3):
        made.look()
    assert caplog.text.count("not asked for") == 1
    made._rq.connection = back
    made.look()
    made.end()


@pytest.fixture
def worker(config: Config, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = start_worker(config, log=tmp_path / "worker.log")
    yield process
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0, (tmp_path / "worker.log").read_text()


def test_a_worker_does_the_rounds_and_rq_info_and_status_show_what_became_of_them(
    config: Config,
    worker: subprocess.Popen[bytes],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ADAPTERSYNC_REDIS__CONTROL_URL", config.redis.control_url)
    monkeypatch.setenv("ADAPTERSYNC_STORE__PATH", config.store.path)
    monkeypatch.delenv("ADAPTERSYNC_CONFIG", raising=False)
    assert main(["jobs", "--ask", "verify", "--timeout", "30"]) == 0
    assert capsys.readouterr().out == "verify: asked for 0 verifications\n"
    assert main(["jobs", "--ask", "tidy", "--timeout", "30"]) == 0
    assert main(["jobs"]) == 0
    assert "retention" in capsys.readouterr().out

    # one that fails: a version that nobody knows
    version = "run-v1-0123456789ab"
    with Jobs(config) as jobs:
        assert not jobs.wait(jobs.verify(version), timeout_s=30).ok
    assert main(["jobs", "--json"]) == 1
    (failed,) = orjson.loads(capsys.readouterr().out)["failed"]
    assert (failed["function"], failed["about"]) == ("verify_version", version)
    assert "never announced" in failed["reason"]
    assert main(["status", "--json"]) == 1
    problems = orjson.loads(capsys.readouterr().out)["problems"]
    assert any(f"job verify_version of {version} failed" in problem for problem in problems)

    info = subprocess.run(
        [sys.executable, "-m", "rq.cli", "info", "--url", config.redis.control_url, "--raw"],
        capture_output=True, text=True, timeout=30, check=False, env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    assert queue_name("default") in info.stdout, info.stderr
    assert "adaptersync-" in info.stdout.replace(queue_name("default"), "")  # the worker
    wait_until_sync(lambda: queued(config) == [])


def test_every_job_is_one_that_there_is() -> None:
    for name in JOBS:
        module, _, function = name.rpartition(".")
        assert callable(getattr(__import__(module, fromlist=[function]), function))
    assert set(ROUNDS.values()) <= JOBS


def test_a_job_that_is_killed_at_any_call_is_safely_repeated(redis_url: str, tmp_path: Path) -> None:
    program = Path(__file__).parents[1] / "support" / "dying_jobs.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [sys.executable, str(program), redis_url, str(tmp_path / "store"), str(tmp_path / "exports")]
    run = subprocess.run(arguments, capture_output=True, text=True, timeout=55, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    died = [int(each) for each in run.stdout.split()]
    assert len(died) == 3
    assert min(died) >= 10, died
