"""A function that answers at the gate: on a real server, with a coordinator, a scripted replica, and a worker."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from rq import Queue
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.timeouts import UnixSignalDeathPenalty

from adaptersync.coordinator.gate import UNASKED
from adaptersync.coordinator.observer import look
from adaptersync.jobs.app import environment
from adaptersync.jobs.gate import Candidate, ask, evaluate_version
from adaptersync_core.config import Config, RedisSection, RouterSection
from adaptersync_core.job_records import unasked
from adaptersync_core.keys import Keys
from adaptersync_core.queue import Jobs, evaluation_id, job_id, queue_name
from adaptersync_core.records import VersionRecord
from adaptersync_core.redis import rq_connection
from support.artifacts import manifest_of, small_adapter
from support.publishing import Group, living_group, publishing
from support.redis_servers import KINDS
from support.wait import wait_until
from support.workers import working

pytestmark = pytest.mark.foreign_keys("rq keeps its own")


@pytest.fixture
def redis_kind() -> str:
    """One server is enough: rq's own commands, and requests, are tried on all elsewhere."""
    return KINDS[0]


def gated(config: Config, function: str, **settings: Any) -> Config:
    coordinator = replace(config.coordinator, gate=True, gate_function=f"support.gates:{function}", **settings)
    return replace(config, coordinator=coordinator)


@pytest.fixture
async def group(request: pytest.FixtureRequest, redis_url: str, cache_url: str, tmp_path: Path) -> AsyncIterator[Group]:
    """With a gate that asks the function that the test names."""
    function, settings = request.param
    async with living_group(
        redis_url, cache_url, tmp_path, change=lambda config: gated(config, function, **settings)
    ) as group:
        yield group


async def record(group: Group, version: str) -> VersionRecord:
    found = await group.registry.version(version)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("group", "state", "reason"),
    [
        (("passes", {}), "current", ""),
        (("fails", {}), "rolled_back", "answers too long"),
        (("cannot_say", {"gate_inconclusive": "refuse"}), "rolled_back", "inconclusive: too few samples"),
        (
            ("exits", {"gate_inconclusive": "refuse"}),
            "rolled_back",
            "inconclusive: support.gates:exits: SystemExit: no GPU",
        ),
    ],
    indirect=["group"],
)
async def test_its_word_decides(
    group: Group, state: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From the trainer's publication to the fate, by a worker process."""
    async with working(group.config, log=tmp_path / "worker.log"), publishing(group.config) as publisher:
        publication = await asyncio.to_thread(publisher.publish, group.adapter())

        async def decided() -> bool:
            return (await record(group, publication.adapter_id)).state == state

        await wait_until(decided, timeout_s=30)
        assert (await record(group, publication.adapter_id)).reason == reason


@pytest.mark.parametrize("group", [("waits", {})], indirect=True)
async def test_a_worker_that_is_killed_in_the_midst_of_it_is_replaced(
    group: Group, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With its job: the version is asked about again, and decided once."""
    begun = tmp_path / "begun"
    monkeypatch.setenv("GATE_BEGUN", str(begun))
    async with publishing(group.config) as publisher:
        async with working(group.config, log=tmp_path / "first.log") as worker:
            publication = await asyncio.to_thread(publisher.publish, group.adapter())
            await wait_until(lambda: begun.exists() and begun.read_text(), timeout_s=30)
            assert await unasked(group.registry.client, "group", [publication.adapter_id]) == frozenset()
            worker.kill()
            os.kill(int(begun.read_text()), signal.SIGKILL)
        name = job_id("gate", "group", publication.adapter_id)
        with rq_connection(group.config.redis.control_url) as connection:
            lost = Job.fetch(name, connection=connection, serializer=JSONSerializer)
            assert lost.is_started  # nobody knows yet; rq finds it out when the job's heartbeat is old
            connection.zadd(
                f"rq:wip:adaptersync-{group.config.group.name}",
                dict.fromkeys(connection.zrange(f"rq:wip:adaptersync-{group.config.group.name}", 0, -1), 1),
            )
        async with working(group.config, log=tmp_path / "second.log"):

            async def current() -> bool:
                return (await record(group, publication.adapter_id)).state == "current"

            await wait_until(current, timeout_s=40)
        events = await group.registry.client.command("XRANGE", group.registry.keys.events, "-", "+")
        assert [fields["type"] for _, fields in events].count("version.promoted") == 1
        assert "request.refused" not in [fields["type"] for _, fields in events]


@pytest.mark.parametrize("group", [("starts_something", {})], indirect=True)
async def test_what_it_starts_is_handed_no_secret_of_the_settings(
    group: Group, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its job has them nevertheless: without the address it could not even begin."""
    begun, secret = tmp_path / "begun", "hunter-2"
    monkeypatch.setenv("GATE_BEGUN", str(begun))
    # a server without users lets everybody in, whatever they show
    url = group.config.redis.control_url.replace("redis://", f"redis://default:{secret}@")
    config = replace(
        group.config, redis=replace(group.config.redis, control_url=url), router=RouterSection(gate_token=secret)
    )
    async with (
        working(config, log=tmp_path / "worker.log", file=tmp_path / "worker.toml"),
        publishing(group.config) as publisher,
    ):
        publication = await asyncio.to_thread(publisher.publish, group.adapter())

        async def current() -> bool:
            return (await record(group, publication.adapter_id)).state == "current"

        await wait_until(current, timeout_s=30)
    handed = begun.read_text()
    assert "ADAPTERSYNC_STORE__PATH=" in handed
    assert secret not in handed


def test_settings_with_secrets_are_left_where_they_were_given(tmp_path: Path) -> None:
    config = Config(
        redis=RedisSection(control_url="rediss://ops:hunter-2@redis.example/0", password_file="/etc/password"),
        router=RouterSection(gate_token="hunter-2", port=8088),
    )
    given = environment(config, tmp_path / "adaptersync.toml")
    assert not [name for name, value in given.items() if "hunter-2" in value]
    assert given["ADAPTERSYNC_CONFIG"] == str(tmp_path / "adaptersync.toml")
    assert (given["ADAPTERSYNC_ROUTER__PORT"], given["ADAPTERSYNC_REDIS__PASSWORD_FILE"]) == ("8088", "/etc/password")


@pytest.mark.parametrize("group", [("sleeps", {"gate_timeout_s": 0.5})], indirect=True)
async def test_without_a_worker_the_time_ends_too_and_an_operator_decides(group: Group) -> None:
    async with publishing(group.config) as publisher:
        publication = await asyncio.to_thread(publisher.publish, group.adapter())

        async def held() -> str:
            version = (await group.registry.table()).versions.get(publication.adapter_id)
            return version.held if version else ""

        await wait_until(held)
        assert await held() == f"support.gates:sleeps has not said in 0.5 s, for {UNASKED}"
        # what is held is not asked about any more
        assert await asyncio.to_thread(_evaluate, group.config, publication.adapter_id) == "waits no more"


@pytest.mark.parametrize("group", [("sleeps", {"gate_timeout_s": 1.0})], indirect=True)
async def test_what_others_write_among_rqs_keys_stops_nobody_who_decides(group: Group) -> None:
    async with publishing(group.config) as publisher:
        publication = await asyncio.to_thread(publisher.publish, group.adapter())
        job = f"rq:job:{evaluation_id('group', publication.adapter_id)}"

        async def at_the_gate() -> str:
            version = (await group.registry.table()).versions.get(publication.adapter_id)
            return version.state if version else ""

        await wait_until(lambda: _is(at_the_gate, "ready"))
        await group.registry.client.command("DEL", job)
        await group.registry.client.command("SET", job, "a worker's, or an operator's")

        async def held() -> str:
            return (await group.registry.table()).versions[publication.adapter_id].held

        await wait_until(held)
        assert await held() == "support.gates:sleeps has not said in 1 s"  # and not why: that cannot be read
        assert (await look(group.registry, group.config))[1].waits


@pytest.mark.parametrize("group", [("sleeps", {})], indirect=True)
async def test_what_waits_for_a_worker_is_told(group: Group) -> None:
    async with publishing(group.config) as publisher:
        publication = await asyncio.to_thread(publisher.publish, group.adapter())

        async def told() -> list[str]:
            _, view = await look(group.registry, group.config)
            return [wait.waits_for for wait in view.waits if wait.version == publication.adapter_id]

        await wait_until(lambda: _is(told, [f"the gate: support.gates:sleeps; {UNASKED}"]))


async def _is(ask: Callable[[], Awaitable[object]], what: object) -> bool:
    return await ask() == what


def test_it_is_asked_before_what_else_waits(redis_url: str) -> None:
    config = replace(Config(), redis=RedisSection(control_url=redis_url))
    version, other = "run-v1-0123456789ab", "run-v2-0123456789ab"
    with Jobs(config) as jobs, rq_connection(redis_url) as connection:
        verify, gate = jobs.verify(other), jobs.evaluation(version)
        queue = Queue(queue_name("default"), connection=connection, serializer=JSONSerializer)
        assert queue.job_ids == [gate, verify]


def _evaluate(config: Config, version: str) -> str:
    from adaptersync.jobs import gate

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gate, "load_config", lambda: config)
        return evaluate_version(version)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("support.gates:breaks", "ValueError: no such benchmark"),
        ("support.gates:answers_nonsense", "returned no Verdict: 'yes'"),
        ("support.gates:not_there", "AttributeError"),
        ("nowhere_at_all:judge", "ModuleNotFoundError"),
        ("support.gates:exits", "SystemExit: no GPU"),
        ("support.gates:is_interrupted", "KeyboardInterrupt"),
        ("support.gates:raises_what_cannot_be_told", "Unspeakable: it cannot be shown, for RuntimeError"),
        ("support.gates:answers_what_cannot_be_told", "returned no Verdict: it cannot be shown, for RuntimeError"),
        ("support.gates:fails_with_half_a_character", "OSError: no such file: answers-\\udce4.json"),
        ("support.gates:answers_no_outcome", "ValidationError"),
        ("support.gates:answers_no_reason", "ValidationError"),
    ],
)
def test_what_cannot_be_asked_cannot_say(function: str, reason: str, tmp_path: Path) -> None:
    config = Config()
    config = replace(config, coordinator=replace(config.coordinator, gate=True, gate_function=function))
    verdict = ask(config, manifest_of(small_adapter(tmp_path / "a")))
    assert verdict.outcome == "inconclusive"
    assert reason in verdict.reason
    msgspec.json.encode(verdict)  # as it is sent


def test_a_reason_that_cannot_be_sent_is_written_otherwise(tmp_path: Path) -> None:
    verdict = ask(gated(Config(), "passes_with_half_a_character"), manifest_of(small_adapter(tmp_path / "a")))
    assert (verdict.outcome, verdict.reason) == ("pass", "as in answers-\\udce4.json")


def test_one_that_takes_too_long_is_interrupted_and_cannot_say(tmp_path: Path) -> None:
    """By what rq interrupts jobs with."""
    manifest = manifest_of(small_adapter(tmp_path / "a"))
    config = gated(Config(), "sleeps")
    with UnixSignalDeathPenalty(1):  # type: ignore[no-untyped-call]
        verdict = ask(config, manifest)
    assert verdict.outcome == "inconclusive"
    assert "JobTimeoutException" in verdict.reason or "BaseTimeoutException" in verdict.reason


def test_it_is_given_what_opens_the_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Candidate] = []
    monkeypatch.setattr("support.gates.passes", seen.append)
    token = tmp_path / "token"
    token.write_text("open-sesame\n")
    config = replace(gated(Config(), "passes"), router=RouterSection(gate_token_file=str(token)))
    ask(config, manifest_of(small_adapter(tmp_path / "a")))
    (candidate,) = seen
    assert candidate.headers == {"x-adaptersync-gate": "open-sesame"}
    assert candidate.version in str(candidate.directory)


@pytest.mark.parametrize("group", [("passes", {})], indirect=True)
async def test_what_was_not_asked_for_is_asked_for_by_the_clock(group: Group, tmp_path: Path) -> None:
    """The coordinator's own question may be lost: here, Redis forgets it."""
    async with publishing(group.config) as publisher:
        publication = await asyncio.to_thread(publisher.publish, group.adapter())

        async def waits() -> bool:
            return (await record(group, publication.adapter_id)).state == "ready"

        await wait_until(waits)
        with Jobs(group.config) as jobs, rq_connection(group.config.redis.control_url) as connection:
            Job.fetch(
                jobs.evaluation(publication.adapter_id), connection=connection, serializer=JSONSerializer
            ).delete()
        async with working(group.config, log=tmp_path / "worker.log"):

            async def current() -> bool:
                return (await record(group, publication.adapter_id)).state == "current"

            await wait_until(current, timeout_s=30)
    assert Keys("group").requests not in await group.registry.client.command("KEYS", "*")
