"""Rows 19 to 23: a part dies, hangs, or does not hear the answer, in the middle."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from msgspec.structs import replace

from adaptersync.trainer import AdapterPublisher, Publication
from adaptersync_core import registry as registry_module
from adaptersync_core import store as store_module
from adaptersync_core.config import Config
from adaptersync_core.errors import AdapterSyncError, StoreError
from adaptersync_core.events import ReplicaAcked
from adaptersync_core.manifest import WEIGHTS_FILE
from adaptersync_core.redis import RedisClient
from adaptersync_core.scripts import Script
from adaptersync_core.table import Table
from adaptersync_tools.demo.trl_calls import ScriptedTRL, TrainingDied
from adaptersync_tools.simulator.scheduler import Latency
from support.artifacts import small_adapter
from support.proxy import Fault, FaultProxy
from support.wait import wait_until
from support.whole_fleet import PROMPT, Replica, WholeFleet, whole_fleet

# 19: a coordinator dies between one replica's ack and another's refusal


class Killed(BaseException):
    """What SIGKILL is to a task: nothing catches it."""


class Executioner:
    """Kills a service, by the name its Redis client bears, at its n-th call: before it is sent, or after it is done."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.victim = ""
        self.left = -1
        self.after = False
        self.killed = False
        for call in ("command", "pipeline", "script"):
            patch.setattr(RedisClient, call, self._around(getattr(RedisClient, call)))
        create = RedisClient.__init__

        def named(client: RedisClient, url: str, *, name: str, **more: Any) -> None:
            client.service = name  # type: ignore[attr-defined]
            create(client, url, name=name, **more)

        patch.setattr(RedisClient, "__init__", named)

    def order(self, victim: str, call: int, *, after: bool) -> None:
        self.victim, self.left, self.after, self.killed = victim, call, after, False

    def _around(self, call: Any) -> Any:
        async def called(client: RedisClient, *arguments: Any, **more: Any) -> Any:
            mine = not self.killed and self.victim == getattr(client, "service", "")
            now = mine and self.left == 0
            if mine:
                self.left -= 1
            if now and not self.after:
                self.killed = True
                raise Killed
            reply = await call(client, *arguments, **more)
            if now:
                self.killed = True
                raise Killed
            return reply

        return called


async def _together(fleet: WholeFleet, known: set[str]) -> Table:
    """At rest, one version is current, everybody serves it, and nobody anything that was not promoted."""
    table = await fleet.settled()
    promoted = {event.version for event in await fleet.events("version.promoted")}
    assert set(table.versions) <= promoted <= known
    current = table.runs["run"].current
    assert current is not None
    for replica in table.ready():
        answer = await fleet.post(
            "/v1/completions", {"model": current, "prompt": [1], "max_tokens": 1}, url=fleet.replicas[replica].url
        )
        assert answer.status == 200
    return table


@pytest.mark.timeout(240)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("fate", ["good", "refused by one", "refused by all"])
async def test_s19_a_coordinator_killed_at_any_call_leaves_one_version_everywhere(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fate: str, after: bool
) -> None:
    """It dies at the first of its calls for a version, at the second, and so on; another takes over each time."""
    executioner = Executioner(monkeypatch)
    hurried = replace(config, coordinator=replace(config.coordinator, lease_s=0.3, tick_s=0.1))
    async with whole_fleet(hurried, tmp_path, replicas=3) as fleet:
        trainer = await fleet.trainer()
        known = {await fleet.promoted(trainer)}
        refusing = {"good": 0, "refused by one": 1, "refused by all": 3}[fate]
        for call in range(0, 28, 1 if fate == "good" else 4):
            await fleet.ready()
            for number in range(refusing):
                fleet[number].faults(fail_loads=1)
            (name,) = fleet._coordinators
            executioner.order(name, call, after=after)
            heir = asyncio.create_task(_inherit(fleet, name, f"coordinator-{call + 1}"))
            publication = await fleet.publish(trainer)
            known.add(publication.adapter_id)
            outcome = await fleet.outcome(publication)
            assert outcome.state in ("current", "rolled_back")
            assert outcome.state == "current" or refusing == 3
            await asyncio.wait_for(heir, 30)
            assert executioner.killed
            await _together(fleet, known)


async def _inherit(fleet: WholeFleet, name: str, heir: str) -> None:
    """Start another coordinator when this one is dead."""
    await asyncio.wait((fleet._coordinators[name],))
    with pytest.raises(BaseExceptionGroup):
        fleet._coordinators.pop(name).result()
    fleet.start_coordinator(heir)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_s19_an_agent_killed_at_any_call_leaves_one_version_everywhere(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    executioner = Executioner(monkeypatch)
    async with whole_fleet(config, tmp_path, replicas=2) as fleet:
        trainer = await fleet.trainer()
        known = {await fleet.promoted(trainer)}
        for call in range(0, 24, 2):
            executioner.order("replica-1", call, after=after)
            publication = await fleet.publish(trainer)
            known.add(publication.adapter_id)
            await wait_until(partial(_dead_or_decided, executioner, publication), timeout_s=20)
            await fleet[1].agent_ended(timeout_s=2.0)  # one that died in a task of its own has to be told
            await fleet[1].stop_agent()
            fleet[1].start_agent()
            assert (await fleet.outcome(publication)).state == "current"
            await fleet.ready()
            await _together(fleet, known)


def _dead_or_decided(executioner: Executioner, publication: Publication) -> bool:
    return executioner.killed or publication.outcome is not None


# 20: a replica accepts connections and never answers; or its front answers for a frozen engine


@pytest.mark.parametrize("how", ["frozen", "black hole"])
async def test_s20_a_replica_that_hangs_is_ejected_and_the_others_generate(
    config: Config, tmp_path: Path, how: str
) -> None:
    async with _hurried(config, tmp_path) as fleet, contextlib.AsyncExitStack() as stack:
        trainer = await fleet.trainer()
        await fleet.promoted(trainer)
        async with fleet.traffic("run", clients=6) as served:
            await wait_until(lambda: len(served) > 20, timeout_s=20)
            if how == "frozen":
                fleet[0].faults(frozen=True)
                assert (await fleet.get("/health", url=fleet[0].url)).status == 200
            else:
                await fleet[0].stop_engine()
                hole = await asyncio.start_server(_say_nothing, "127.0.0.1", fleet[0].port)
                stack.push_async_callback(hole.wait_closed)
                stack.callback(hole.close)
            await fleet.state("replica-0", "ejected", "silent")
            before = len(served)
            publication = await fleet.publish(trainer)
            assert (await fleet.outcome(publication)).state == "current"
            await wait_until(lambda: len(served) > before + 50, timeout_s=20)
        assert {answer.answer.status for answer in served} == {200}  # what hung on it was sent to another
        assert all(answer.at - answer.sent_at < 15 for answer in served)  # long before the router's own limit
        if how == "frozen":
            fleet[0].faults(frozen=False)
            await fleet.ready(3)
            await fleet.settled()


async def test_s20_a_request_that_waits_at_a_frozen_engine_keeps_its_version_elsewhere(
    config: Config, tmp_path: Path
) -> None:
    async with _hurried(config, tmp_path, latency=Latency(decode_tokens_per_s=20)) as fleet:
        trainer = await fleet.trainer()
        old = await fleet.promoted(trainer)
        asking = asyncio.create_task(fleet.complete("run", max_tokens=40, ignore_eos=True))
        streaming = asyncio.create_task(_cut_off(fleet, old))
        await wait_until(lambda: sum(one.sim.engine.running for one in fleet.replicas.values()) == 2)
        frozen = [replica for replica in fleet.replicas.values() if replica.sim.engine.running]
        assert len(frozen) == 1  # the second prompt begins as the first
        frozen[0].faults(frozen=True)
        await fleet.state(frozen[0].name, "ejected", "silent")
        new = await fleet.promoted(trainer)
        answer = await asking
        assert (answer.status, answer.json["model"]) == (200, old)
        assert answer.headers["x-adaptersync-replica"] != frozen[0].name
        assert answer.json["usage"]["completion_tokens"] == 40
        assert await streaming > 0
        await wait_until(lambda: _ended(fleet, 2))
        assert await fleet.current() == new
        rows = {row["outcome"]: row for row in await fleet.rows() if row["outcome"] != "open"}
        assert (rows["ok"]["version"], rows["ok"]["attempts"]) == (old, "2")
        assert rows["ok"]["tried"] == f"{frozen[0].name} silent"
        assert rows["upstream_error"]["reason"].startswith(f"{frozen[0].name}: silent: no heartbeat for")
        frozen[0].faults(frozen=False)
        await fleet.ready(3)


async def test_s20_a_frozen_replica_that_the_floor_keeps_is_asked_last(config: Config, tmp_path: Path) -> None:
    """Three of at least three are ready: none may be ejected, and one of them takes requests and answers none."""
    settings = replace(config, coordinator=replace(config.coordinator, min_ready=3))
    async with _hurried(settings, tmp_path, latency=Latency(decode_tokens_per_s=20)) as fleet:
        trainer = await fleet.trainer()
        name = await fleet.promoted(trainer)
        asking = asyncio.create_task(fleet.complete("run", max_tokens=40, ignore_eos=True))
        await wait_until(lambda: any(one.sim.engine.running for one in fleet.replicas.values()))
        (frozen,) = [replica for replica in fleet.replicas.values() if replica.sim.engine.running]
        frozen.faults(frozen=True)
        await fleet.state(frozen.name, "ready", "silent")
        answer = await asking
        assert (answer.status, answer.json["model"]) == (200, name)
        assert answer.headers["x-adaptersync-replica"] != frozen.name
        for prompt in range(8):
            answer = await fleet.complete("run", [prompt], max_tokens=1)
            assert (answer.status, answer.headers["x-adaptersync-replica"] == frozen.name) == (200, False)
        frozen.faults(frozen=False)
        await fleet.state(frozen.name, "ready", "holds all that is served")
        assert await fleet.promoted(trainer) != name  # by all three


async def test_s20_what_a_draining_replica_has_is_left_alone(config: Config, tmp_path: Path) -> None:
    """Its agent ends in order, and is forgotten, long before the answer is whole."""
    async with _hurried(config, tmp_path, latency=Latency(decode_tokens_per_s=10)) as fleet:
        trainer = await fleet.trainer()
        name = await fleet.promoted(trainer)
        asking = asyncio.create_task(fleet.complete("run", max_tokens=50, ignore_eos=True))
        await wait_until(lambda: any(one.sim.engine.running for one in fleet.replicas.values()))
        (busy,) = [replica for replica in fleet.replicas.values() if replica.sim.engine.running]
        await busy.stop_agent()
        await wait_until(lambda: _forgotten(fleet, busy.name), timeout_s=20)
        assert not asking.done()
        answer = await asking
        assert (answer.status, answer.json["model"]) == (200, name)
        assert answer.headers["x-adaptersync-replica"] == busy.name
        await wait_until(lambda: _ended(fleet, 1))
        (row,) = [row for row in await fleet.rows() if row["outcome"] != "open"]
        assert (row["outcome"], row["attempts"]) == ("ok", "1")


def _hurried(config: Config, tmp_path: Path, **more: Any) -> contextlib.AbstractAsyncContextManager[WholeFleet]:
    """Three replicas; one that says nothing is ejected soon."""
    settings = replace(
        config,
        coordinator=replace(config.coordinator, alive_s=1.5, eject_s=0.5),
        agent=replace(config.agent, probe_timeout_s=0.5),
        router=replace(config.router, request_timeout_s=60.0),
    )
    return whole_fleet(settings, tmp_path, replicas=3, **more)


async def _cut_off(fleet: WholeFleet, model: str) -> int:
    """Bytes of a stream that came before it was cut off."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
    received = 0
    async with aiohttp.ClientSession() as session, session.post(fleet.url + "/v1/completions", json=body) as answer:
        try:
            while chunk := await answer.content.readany():
                received += len(chunk)
        except aiohttp.ClientPayloadError:
            return received
    raise AssertionError("it came to an end")


async def _ended(fleet: WholeFleet, count: int) -> bool:
    return sum(row["outcome"] != "open" for row in await fleet.rows()) == count


async def _forgotten(fleet: WholeFleet, replica: str) -> bool:
    return replica not in (await fleet.table()).members


async def _say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while await reader.read(1024):
            pass
    writer.close()


# 21: the reply is lost, so the request is sent again


@contextlib.asynccontextmanager
async def _lossy(config: Config) -> AsyncIterator[tuple[Config, FaultProxy]]:
    """Settings whose control server is reached through a proxy."""
    where = urlsplit(config.redis.control_url)
    assert where.hostname
    assert where.port
    async with FaultProxy(where.hostname, where.port) as proxy:
        yield replace(config, redis=replace(config.redis, control_url=f"redis://127.0.0.1:{proxy.port}/0")), proxy


SCRIPTS = ("begin_run", "reserve", "publish", "ack", "report", "lead", "decide")


@pytest.mark.parametrize("script", SCRIPTS)
async def test_s21_a_repeat_after_a_lost_reply_is_a_no_op(config: Config, tmp_path: Path, script: str) -> None:
    sha = Script(script).sha.encode()
    async with _lossy(config) as (lossy, proxy), whole_fleet(lossy, tmp_path) as fleet:
        trainer = await fleet.trainer()
        names = [await fleet.promoted(trainer)]
        for _ in range(3):
            proxy.arm(Fault.LOSE_REPLY, match=sha, times=2)
            if script == "begin_run":
                trainer = await fleet.trainer()
            names.append(await fleet.promoted(trainer))
        assert proxy.faults_done >= 6
        await fleet.settled()
        told = Counter(
            (event.version, type(event).__name__) for event in await fleet.events() if hasattr(event, "version")
        )
        for name in names:
            assert told[name, "AdapterPublished"] == 1
            assert told[name, "VersionPromoted"] == 1
            assert told[name, "ReplicaAcked"] == 2
        assert [await fleet.registry.find_seq("run", seq + 1) for seq in range(4)] == names  # no number was wasted
        epochs = [event.epoch for event in await fleet.events("run.began")]
        assert epochs == list(range(1, 5 if script == "begin_run" else 2))


async def test_s21_a_version_is_proved_and_acknowledged_once_however_slow_the_records_are(
    fleet: WholeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an agent reads may be older than what it wrote since."""
    acks = registry_module.Registry.acks

    async def slow(self: registry_module.Registry, replica: str) -> Any:
        read = await acks(self, replica)
        await asyncio.sleep(0.2)
        return read

    monkeypatch.setattr(registry_module.Registry, "acks", slow)
    trainer = await fleet.trainer()
    names = [await fleet.promoted(trainer) for _ in range(3)]
    await fleet.settled()
    for name in names:
        assert len(await fleet.events("replica.acked", name)) == len(fleet.replicas)


async def test_s21_a_load_whose_answer_was_lost_is_settled_by_looking(config: Config, tmp_path: Path) -> None:
    """The engine has it, and calls a repeat a duplicate."""

    def lose(replica: Replica) -> None:
        load, lost = replica.sim.scheduler.load, set[str]()

        async def loading(name: str, path: str, **how: Any) -> None:
            await load(name, path, **how)
            if name not in lost:
                lost.add(name)
                raise ConnectionResetError

        replica.sim.scheduler.load = loading  # type: ignore[method-assign]

    async with whole_fleet(config, tmp_path, start=False) as fleet:
        fleet.on_engine.append(lose)
        await fleet.start()
        trainer = await fleet.trainer()
        name = await fleet.promoted(trainer)
        assert all(replica.listed() == {name} for replica in fleet.replicas.values())
        acks = [event for event in await fleet.events("replica.acked", name) if isinstance(event, ReplicaAcked)]
        assert [ack.accepted for ack in acks] == [True, True]


# 22: a failed load leaves the fleet paused


def paused(fleet: WholeFleet) -> bool:
    return any(
        replica.sim.scheduler.paused or replica.sim.calls["/pause"] or replica.sim.calls["/resume"]
        for replica in fleet.replicas.values()
    )


@pytest.mark.parametrize("failing", [0, 1, 2])
async def test_s22_nothing_is_paused_by_a_promotion_or_its_failure(fleet: WholeFleet, failing: int) -> None:
    trainer = await fleet.trainer()
    await fleet.promoted(trainer)
    for number in range(failing):
        fleet[number].faults(fail_loads=1)
    async with fleet.traffic("run") as served:
        outcome = await fleet.outcome(await fleet.publish(trainer))
        assert outcome.state == ("current" if failing == 0 else "rolled_back")
        await fleet.settled()
        await wait_until(lambda: len(served) > 20, timeout_s=20)
    assert {answer.answer.status for answer in served} == {200}
    assert not paused(fleet)


async def test_s22_a_load_that_fails_under_trl_leaves_nobody_paused(fleet: WholeFleet) -> None:
    """TRL pauses, is refused, and dies without a resume."""
    async with fleet.relay() as url:
        trl = ScriptedTRL(url)
        await trl.construct()
        name = await trl.sync(fleet.adapter())
        for number in range(2):
            fleet[number].faults(fail_loads=1)
        with pytest.raises(TrainingDied, match="ordered by"):
            await trl.sync(fleet.adapter())
        assert not paused(fleet)
        status, headers, _ = await trl.rollout(name, [1, 2, 3])
        assert (status, headers["x-adaptersync-version"]) == (200, await fleet.current())


# 23: a failed send leaves a cached export, which goes out the next time


class Model:
    """Saves other weights after each step, as a model in training does."""

    def __init__(self) -> None:
        self.steps = 0

    def save_pretrained(self, save_directory: str) -> None:
        small_adapter(Path(save_directory), seed=1000 + self.steps)


@pytest.mark.parametrize("failure", ["store", "redis"])
async def test_s23_what_goes_out_after_a_failure_is_what_the_model_is_then(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    async with _lossy(config) as (lossy, proxy), whole_fleet(lossy, tmp_path) as fleet:
        trainer = await fleet.trainer()
        model = Model()
        names = {}
        for model.steps in range(1, 7):
            if model.steps % 2 == 0:
                await _failing(fleet, trainer, model, monkeypatch, failure, proxy)
            else:
                names[model.steps] = await fleet.promoted(trainer, model)
        for step, name in names.items():
            wanted = (small_adapter(tmp_path / f"wanted-{step}", seed=1000 + step) / WEIGHTS_FILE).read_bytes()
            assert (fleet.store.directory(name) / WEIGHTS_FILE).read_bytes() == wanted
            for replica in fleet.replicas.values():
                if name in replica.staged():
                    assert (tmp_path / "staged" / replica.name / name / WEIGHTS_FILE).read_bytes() == wanted


async def _failing(
    fleet: WholeFleet,
    trainer: AdapterPublisher,
    model: Model,
    patch: pytest.MonkeyPatch,
    failure: str,
    proxy: FaultProxy,
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with patch.context() as here:
        if failure == "store":
            here.setattr(store_module, "copy_verified", full)
            with pytest.raises(StoreError):
                await fleet.publish(trainer, model)
        else:  # announced, and the answer lost, until the publisher has lost its patience
            here.setattr("adaptersync.trainer.publisher.INSIST_S", 0.2)
            proxy.arm(Fault.LOSE_REQUEST, match=Script("publish").sha.encode(), times=3)
            with contextlib.suppress(AdapterSyncError):
                await fleet.publish(trainer, model)
