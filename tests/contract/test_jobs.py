"""Deep verification on real servers: as a function, as an rq job, and as the command waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rq.scripts
from rq import Callback, Queue
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

from adaptersync.jobs import verify as verify_module
from adaptersync.jobs.app import ListedJob, PatientWorker
from adaptersync.jobs.verify import verify
from adaptersync.trainer import AdapterPublisher
from adaptersync_core.archive import Archive
from adaptersync_core.config import Config, load_config
from adaptersync_core.errors import ControlError
from adaptersync_core.events import VersionVerified, from_fields
from adaptersync_core.keys import Keys
from adaptersync_core.manifest import Manifest
from adaptersync_core.queue import VERIFY, Jobs, queue_name, verification_id, workers_key
from adaptersync_core.redis import RedisClient, rq_connection
from adaptersync_core.registry import Registry
from adaptersync_core.store import ArtifactStore, verify_files
from support.adapters import make_adapter
from support.wait import wait_until_sync


@pytest.fixture
def config(redis_url: str, cache_url: str, tmp_path: Path) -> Config:
    return load_config(
        environment={
            "ADAPTERSYNC_REDIS__CONTROL_URL": redis_url,
            "ADAPTERSYNC_REDIS__CACHE_URL": cache_url,
            "ADAPTERSYNC_STORE__PATH": str(tmp_path / "store"),
        }
    )


@pytest.fixture
def version(config: Config, tmp_path: Path) -> str:
    with AdapterPublisher(config, run="a.run") as publisher:
        return publisher.publish(make_adapter(tmp_path / "adapter")).adapter_id


def weights(config: Config, version: str) -> Path:
    return Path(config.store.path) / "a.run" / version / "adapter_model.safetensors"


def corrupt(path: Path) -> None:
    """Change one byte in the middle of the tensors; the size stays."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


async def verdicts(config: Config) -> list[VersionVerified]:
    client = RedisClient(config.redis.control_url, name="test")
    try:
        entries = await client.read_stream(Keys(config.group.name).events, "0", count=1000)
    finally:
        await client.close()
    return [event for _, fields in entries if isinstance(event := from_fields(fields), VersionVerified)]


async def test_a_stored_version_is_verified_once_however_often_it_is_asked(config: Config, version: str) -> None:
    for _ in range(3):
        verdict = await verify(config, version)
        assert verdict is not None
        assert verdict.ok
    assert await verdicts(config) == [VersionVerified(version=version, ok=True)]
    client = RedisClient(config.redis.control_url, name="test")
    registry = Registry(client, Keys(config.group.name))
    ((_, record),) = await registry.records([version])
    known = await registry.version(version)
    await client.close()
    assert record["verified_ok"] == "true"
    assert float(record["verified_at"]) > 1e9
    assert known is not None
    assert known.state == "published"


async def test_one_wrong_byte_is_found_and_named(config: Config, version: str) -> None:
    assert (verdict := await verify(config, version)) is not None
    assert verdict.ok
    corrupt(weights(config, version))
    assert (verdict := await verify(config, version)) is not None
    assert not verdict.ok
    assert "wrong bytes" in verdict.reason
    assert "adapter_model.safetensors" in verdict.reason
    assert [(event.ok, event.reason) for event in await verdicts(config)] == [(True, ""), (False, verdict.reason)]


async def test_a_manifest_that_was_changed_is_found(config: Config, version: str) -> None:
    manifest = weights(config, version).parent / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"epoch": 1', '"epoch": 2'))
    assert (verdict := await verify(config, version)) is not None
    assert verdict.reason == "stored manifest is not the announced one"


@pytest.mark.parametrize("content", ["{", None])
async def test_a_manifest_that_cannot_be_read_is_a_verdict(config: Config, version: str, content: str | None) -> None:
    manifest = weights(config, version).parent / "manifest.json"
    manifest.unlink() if content is None else manifest.write_text(content)
    assert (verdict := await verify(config, version)) is not None
    assert "manifest cannot be read" in verdict.reason
    assert [event.ok for event in await verdicts(config)] == [False]


async def test_a_version_that_vanished_is_found(config: Config, version: str) -> None:
    directory = weights(config, version).parent
    directory.rename(directory.with_name("elsewhere"))
    assert (verdict := await verify(config, version)) is not None
    assert verdict.reason == f"store has no {version}"


async def test_a_mount_that_is_late_is_waited_for_and_not_looked_at(config: Config, version: str) -> None:
    """A promotion by the fast lane is faster than many a mount; what is late must not be called gone."""
    store = Path(config.store.path)
    hidden = store.with_name("late")
    await asyncio.to_thread(store.rename, hidden)
    await asyncio.to_thread(store.mkdir)
    verifying = asyncio.create_task(verify(config, version))
    await asyncio.sleep(0.5)  # some looks; nothing is to happen, so there is nothing to wait for
    assert not verifying.done()
    assert await verdicts(config) == []
    await asyncio.to_thread(_show, hidden, store)
    verdict = await verifying
    assert verdict is not None
    assert verdict.ok, verdict.reason


def _show(hidden: Path, store: Path) -> None:
    """In the order in which a publisher made it: markers last."""
    for path in sorted(hidden.iterdir(), key=lambda path: path.name.startswith(".")):
        path.rename(store / path.name)


async def test_a_version_that_was_retired_with_its_files_is_not_judged(config: Config, version: str) -> None:
    directory = weights(config, version).parent
    directory.rename(directory.with_name("elsewhere"))
    client = RedisClient(config.redis.control_url, name="test")
    key = Keys(config.group.name).version(version)
    await client.pipeline([("HSET", key, "state", "retired"), ("EXPIRE", key, 1000)])
    await client.close()
    assert await verify(config, version) is None
    assert await verdicts(config) == []


async def test_a_version_that_is_removed_while_it_is_read_is_not_judged(
    config: Config, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = RedisClient(config.redis.control_url, name="test")
    key = Keys(config.group.name).version(version)
    await client.pipeline([("HSET", key, "state", "superseded"), ("EXPIRE", key, 1000)])
    await client.close()

    def interrupted(manifest: Manifest, directory: Path) -> None:
        ArtifactStore(Path(config.store.path)).remove(version)
        verify_files(manifest, directory)

    monkeypatch.setattr(verify_module, "verify_files", interrupted)
    assert await verify(config, version) is None
    assert await verdicts(config) == []


async def test_what_was_never_announced_is_an_error(config: Config) -> None:
    with pytest.raises(ControlError, match="never announced"):
        await verify(config, "a.run-v9-0123456789ab")


def run_worker(config: Config, *, log: Path, **settings: str) -> subprocess.Popen[bytes]:
    """The worker as an operator starts it, its settings from the environment."""
    environment = {
        **os.environ,
        "ADAPTERSYNC_REDIS__CONTROL_URL": config.redis.control_url,
        "ADAPTERSYNC_STORE__PATH": config.store.path,
        **settings,
    }
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "adaptersync_tools.cli", "worker"], stderr=output, stdout=output, env=environment
        )


def ask(config: Config, version: str) -> str:
    with Jobs(config) as jobs:
        return jobs.verify(version)


def fetch(connection: Any, job_id: str) -> Job | None:
    return Job.fetch_many([job_id], connection=connection, serializer=JSONSerializer)[0]


@pytest.mark.foreign_keys("rq keeps its own")
def test_a_worker_does_the_job_and_can_be_asked_again(config: Config, version: str, tmp_path: Path) -> None:
    job_id = verification_id(config.group.name, version)
    with rq_connection(config.redis.control_url) as connection:
        assert ask(config, version) == ask(config, version) == job_id
        assert connection.lrange(f"rq:queue:{queue_name(config.group.name)}", 0, -1) == [job_id.encode()]
        worker = run_worker(config, log=tmp_path / "worker.log")
        try:
            wait_until_sync(lambda: (job := fetch(connection, job_id)) and job.is_finished, timeout_s=30)
            job = fetch(connection, job_id)
            assert job is not None
            assert job.return_value() == "ok"
            corrupt(weights(config, version))
            ask(config, version)
            wait_until_sync(
                lambda: (again := fetch(connection, job_id)) and "wrong bytes" in str(again.return_value()),
                timeout_s=30,
            )
        finally:
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(20) == 0, (tmp_path / "worker.log").read_text()


@pytest.mark.foreign_keys("rq keeps its own")
def test_a_worker_is_known_again_to_a_redis_that_was_emptied(config: Config, tmp_path: Path) -> None:
    with rq_connection(config.redis.control_url) as connection:
        worker = run_worker(config, log=tmp_path / "worker.log")
        try:
            known = workers_key(config.group.name)
            wait_until_sync(lambda: connection.scard(known) == 1, timeout_s=30)
            (name,) = connection.smembers(known)
            assert 60 < connection.ttl(name) <= 90  # for so long it counts as one after it has died
            connection.delete(known, name)
            wait_until_sync(lambda: connection.smembers(known) == {name}, timeout_s=30)
            assert connection.hget(name, "queues") == queue_name(config.group.name).encode()
        finally:
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(20) == 0, (tmp_path / "worker.log").read_text()


@pytest.mark.foreign_keys("rq keeps its own")
def test_a_job_whose_worker_was_killed_can_be_asked_for_again(config: Config, version: str) -> None:
    """What rq knows of the execution expires a minute before the note that there was one."""
    with rq_connection(config.redis.control_url) as connection:
        job = fetch(connection, ask(config, version))
        assert job is not None
        queue = Queue(queue_name(config.group.name), connection=connection, serializer=JSONSerializer)
        worker = PatientWorker([queue], connection=connection, serializer=JSONSerializer)
        execution = worker.prepare_execution(job)
        job.set_status(JobStatus.FAILED)
        connection.delete(execution.key)
        assert connection.zcard(job.execution_registry.key) == 1
        ask(config, version)
        again = fetch(connection, job.id)
        assert again is not None
        assert again.get_status() == JobStatus.QUEUED


@pytest.mark.foreign_keys("rq keeps its own")
def test_nothing_is_kept_of_those_that_were_asked_for(config: Config, version: str) -> None:
    """rq remembers clients: one for each question is 60 kB a version in a coordinator that lives for weeks."""
    before = len(rq.scripts._registered_scripts)
    with contextlib.closing(Jobs(config)) as jobs:
        for _ in range(5):
            jobs.verify(version)
            jobs.round("ledger")
    assert len(rq.scripts._registered_scripts) <= before + 1


@pytest.mark.foreign_keys("rq keeps its own")
def test_a_worker_runs_its_own_jobs_and_no_other_function(config: Config, version: str, tmp_path: Path) -> None:
    with rq_connection(config.redis.control_url) as connection:
        queue = Queue(queue_name(config.group.name), connection=connection, serializer=JSONSerializer)
        foreign = queue.enqueue("os.mkdir", str(tmp_path / "made"), job_id="foreign")
        ours = ask(config, version)
        worker = run_worker(config, log=tmp_path / "worker.log")
        try:
            wait_until_sync(lambda: (job := fetch(connection, ours)) and job.is_finished, timeout_s=30)
            assert foreign.is_failed
            result = foreign.latest_result()
            assert result is not None
            assert "not a job of ours" in str(result.exc_string)
            assert not (tmp_path / "made").exists()
        finally:
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(20) == 0, (tmp_path / "worker.log").read_text()


@pytest.mark.foreign_keys("rq keeps its own")
def test_callbacks_of_a_job_are_not_called(config: Config) -> None:
    with rq_connection(config.redis.control_url) as connection:
        callback = Callback("os.getcwd")
        job = ListedJob.create(
            VERIFY, connection=connection, on_success=callback, on_failure=callback, on_stopped=callback
        )
        assert (job.success_callback, job.failure_callback, job.stopped_callback) == (None, None, None)


@pytest.mark.foreign_keys("rq keeps its own")
def test_jobs_are_json_and_not_pickle(config: Config, version: str) -> None:
    job_id = ask(config, version)
    with rq_connection(config.redis.control_url) as connection:
        stored: dict[bytes, bytes] = connection.hgetall(f"rq:job:{job_id}")
    job = _fetch_raw(stored[b"data"])
    assert job == ["adaptersync.jobs.verify.verify_version", None, [version], {}]
    pickled = [name for name, value in stored.items() if value.startswith(b"\x80")]
    assert pickled == []


def _fetch_raw(data: bytes) -> Any:
    """What rq stores is compressed JSON."""
    import json
    import zlib

    return json.loads(zlib.decompress(data) if data[:1] == b"x" else data)


def test_versions_have_jobs_of_their_own() -> None:
    names = {
        verification_id(group, name)
        for group, name in [
            ("g", "a.b-v1-0123456789ab"),
            ("g", "a_b-v1-0123456789ab"),
            ("g", "a-b-v1-0123456789ab"),
            ("g-a", "b-v1-0123456789ab"),
        ]
    }
    assert len(names) == 4


@pytest.mark.foreign_keys("rq keeps its own")
def test_a_worker_archives_the_ledger_by_itself(config: Config, version: str, tmp_path: Path) -> None:
    """Again and again, and what came after the last time, too."""
    archive = Archive(Path(config.store.path), config.group.name, "events")
    with rq_connection(config.redis.control_url) as connection:
        stream = Keys(config.group.name).events
        worker = run_worker(config, log=tmp_path / "worker.log", ADAPTERSYNC_JOBS__LEDGER_S="0.2")
        try:
            wait_until_sync(archive.head, timeout_s=30)
            last = connection.xadd(stream, {"type": "x"}).decode()
            wait_until_sync(lambda: (head := archive.head()) and head.link.last == last, timeout_s=30)
        finally:
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(20) == 0, (tmp_path / "worker.log").read_text()


@pytest.mark.foreign_keys("rq keeps its own")
def test_a_worker_outlives_a_server_that_goes_away_during_a_job(
    config: Config, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the process that does the job does not outlive the worker's knowledge of it."""
    with rq_connection(config.redis.control_url) as connection:
        queue = Queue(queue_name(config.group.name), connection=connection, serializer=JSONSerializer)
        job = fetch(connection, ask(config, version))
        worker = PatientWorker([queue], connection=connection, serializer=JSONSerializer)
        answers = iter([False, False, True])
        monkeypatch.setattr(worker, "_reaches_redis", lambda: next(answers))
        monkeypatch.setattr("adaptersync.jobs.app.LOOK_S", 0.01)
        with subprocess.Popen(["sleep", "60"], start_new_session=True) as horse:

            def gone(self: PatientWorker, *_: Any) -> None:
                self._horse_pid = horse.pid
                raise ConnectionError("closed by server")

            monkeypatch.setattr("adaptersync.jobs.app.Worker.execute_job", gone)
            assert job is not None
            try:
                worker.execute_job(job, queue)
                assert not Path(f"/proc/{horse.pid}").exists()
            finally:
                horse.kill()
        assert (worker.horse_pid, list(answers)) == (0, [])
