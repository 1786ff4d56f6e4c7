"""The agent beside a simulated engine, on both servers: what it brings, refuses, takes back, and survives."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from adaptersync_core.errors import ControlUnavailable, EngineUnavailable
from adaptersync_core.events import PHASES
from adaptersync_core.manifest import WEIGHTS_FILE
from adaptersync_core.vllm import WORKER_EXTENSION, VllmClient
from adaptersync_tools.servers import RedisServer, Role
from support.agent_bench import Bench, bench_on
from support.artifacts import small_adapter
from support.engines import BLOCK_SIZE, MAX_CPU_LORAS, MAX_LORA_RANK, MAX_LORAS, Engine, simulator
from support.redis_servers import server_binary
from support.wait import wait_until


async def test_it_says_what_the_engine_is(bench: Bench) -> None:
    await wait_until(lambda: _reported(bench))
    report = (await bench.registry.fleet()).replicas["r1"].report
    assert report.url == bench.engine.url
    assert report.base_model == "base"
    assert (report.max_loras, report.max_cpu_loras) == (MAX_LORAS, MAX_CPU_LORAS)
    assert (report.max_lora_rank, report.block_size) == (MAX_LORA_RANK, BLOCK_SIZE)
    assert report.engine.startswith("vllm ")
    assert not report.draining


async def _reported(bench: Bench) -> bool:
    return bool((await bench.reported())[0])


async def test_a_wanted_version_is_loaded_and_acked_with_its_phases(bench: Bench) -> None:
    name = await bench.publish()
    await bench.want(name)
    ack = await bench.ack(name)
    assert ack.accepted, ack.reason
    assert ack.engine_epoch == (await bench.reported())[0]
    assert tuple(ack.phases) == PHASES
    assert bench.engine.listed() == {name: str(bench.staged / name)}
    await wait_until(lambda: _loaded(bench, (name,)))
    told = [fields for _, fields in await bench.registry.client.read_stream(bench.registry.keys.events, "0")]
    (event,) = [fields for fields in told if fields["type"] == "replica.acked"]
    assert (event["version"], event["replica"], event["accepted"]) == (name, "r1", "true")
    assert float(event["loaded_s"]) > 0


async def _loaded(bench: Bench, names: tuple[str, ...]) -> bool:
    return (await bench.reported())[1] == names


async def test_several_are_loaded_and_each_is_said_once(bench: Bench) -> None:
    before = _loads(bench)
    names = [await bench.publish() for _ in range(3)]
    await bench.want(*names)
    for name in names:
        assert (await bench.ack(name)).accepted
    assert bench.listed() == set(names)
    await _heartbeats(bench, 5)
    assert _loads(bench) == before + 3 + 1  # a canary before them


def _loads(bench: Bench) -> int:
    return int(bench.engine.get("/simulator/calls").json["calls"]["/v1/load_lora_adapter"])


async def _heartbeats(bench: Bench, count: int) -> None:
    """Wait for so many more reports."""
    for _ in range(count):
        last = await _heartbeat(bench)
        await wait_until(lambda last=last: _later(bench, last))  # type: ignore[misc]


async def _heartbeat(bench: Bench) -> str:
    return str(await bench.registry.client.command("HGET", bench.registry.keys.replica("r1"), "heartbeat_ms"))


async def _later(bench: Bench, last: str) -> bool:
    return await _heartbeat(bench) != last


async def test_what_is_to_go_goes_before_anything_is_loaded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full engine would evict something that is served."""
    olds = [await bench.publish() for _ in range(2)]
    await bench.want(*olds)
    for name in olds:
        assert (await bench.ack(name)).accepted
    order: list[str] = []
    load, unload = VllmClient.load, VllmClient.unload

    async def loading(self: VllmClient, name: str, path: str, *, timeout_s: float) -> None:
        order.append(name)
        await load(self, name, path, timeout_s=timeout_s)

    async def unloading(self: VllmClient, name: str) -> None:
        order.append(name)
        await wait_until(lambda: (bench.staged / new).is_dir())  # files are staged meanwhile
        await unload(self, name)

    monkeypatch.setattr(VllmClient, "load", loading)
    monkeypatch.setattr(VllmClient, "unload", unloading)
    new = await bench.publish()
    await bench.want(new)
    assert (await bench.ack(new)).accepted
    assert order == [*olds, new]


# refusals


async def test_a_rank_above_the_engines_is_refused(bench: Bench) -> None:
    name = await bench.publish(rank=2 * MAX_LORA_RANK)
    await bench.want(name)
    ack = await bench.ack(name)
    assert not ack.accepted
    assert f"rank {2 * MAX_LORA_RANK} is above the engine's {MAX_LORA_RANK}" in ack.reason
    assert bench.listed() == set()


async def test_another_hidden_size_is_refused_although_the_engine_would_load_it(bench: Bench) -> None:
    name = await bench.publish(hidden=4)
    await bench.want(name)
    ack = await bench.ack(name)
    assert "does not fit the base model's weight" in ack.reason
    assert bench.listed() == set()


@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
async def test_harm_in_the_store_is_refused_and_mended_is_loaded(bench: Bench, harm: str) -> None:
    name = await bench.publish()
    path = bench.store.directory(name) / WEIGHTS_FILE
    good = path.read_bytes()
    match harm:
        case "flip":
            path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        case "cut":
            path.write_bytes(good[:-1])
        case "remove":
            path.unlink()
    await bench.want(name)
    ack = await bench.ack(name)
    assert not ack.accepted
    reason = {"flip": "wrong bytes", "cut": "wrong size", "remove": "No such file"}[harm]
    assert reason in ack.reason
    assert bench.listed() == set()
    path.write_bytes(good)
    assert (await bench.ack(name, accepted=True)).accepted


async def test_what_the_engine_refuses_is_said_with_its_words_and_tried_again(bench: Bench) -> None:
    bench.engine.post("/simulator/faults", {"fail_loads": 1})
    name = await bench.publish()
    await bench.want(name)
    ack = await bench.ack(name, accepted=False)
    assert "ordered by /simulator/faults" in ack.reason
    assert (await bench.ack(name, accepted=True)).accepted


async def test_a_name_from_another_directory_is_refused(bench: Bench, tmp_path: Path) -> None:
    name = await bench.publish()
    bench.engine.load(name, small_adapter(tmp_path / "elsewhere"))
    await bench.want(name)
    ack = await bench.ack(name)
    assert not ack.accepted
    assert "another directory" in ack.reason
    assert bench.engine.listed() == {name: str(tmp_path / "elsewhere")}  # it is not ours to unload


async def test_an_engine_that_dies_while_it_loads_refuses_nothing(mortal: Bench) -> None:
    """Half of a small fleet refusing would roll a good version back."""
    bench = mortal
    await wait_until(lambda: _reported(bench))
    bench.engine.post("/simulator/faults", {"delay_load_s": 0.5})
    name = await bench.publish()
    await bench.want(name)
    await wait_until(lambda: (bench.staged / name).is_dir())
    bench.engine.post("/simulator/faults", {"die": True})
    await asyncio.to_thread(bench.engine.process.wait, 20)
    last = await _heartbeat(bench)
    assert await bench.registry.acks("r1") == {}
    assert await _heartbeat(bench) == last  # silence is all that is heard
    assert not bench.agent.done()


async def test_a_frozen_engine_is_silence_although_its_front_answers(bench: Bench) -> None:
    await wait_until(lambda: _reported(bench))
    bench.engine.post("/simulator/faults", {"frozen": True})
    assert bench.engine.get("/health").status == 200
    await _heartbeats_stop(bench)
    bench.engine.post("/simulator/faults", {"frozen": False})
    await _heartbeats(bench, 2)


async def _heartbeats_stop(bench: Bench) -> None:
    async def still() -> bool:
        last = await _heartbeat(bench)
        await asyncio.sleep(0.5)  # five heartbeats
        return await _heartbeat(bench) == last

    await wait_until(still, timeout_s=10)


# lives


async def test_an_engine_that_is_loaded_already_is_confirmed(bench: Bench) -> None:
    """As after a restart of the agent alone, or of Redis."""
    name = await bench.publish()
    await bench.want(name)
    await bench.ack(name)
    await bench.registry.forget_acks("r1", [name])
    ack = await bench.ack(name)
    assert ack.accepted, ack.reason
    assert bench.engine.listed() == {name: str(bench.staged / name)}


async def test_what_the_engine_has_lost_is_not_said_to_be_held_until_it_is_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its word is taken back, and given again once the version was proved anew."""
    lost, other = await bench.publish(), await bench.publish()
    await bench.want(lost, other)
    for name in (lost, other):
        await bench.ack(name)
    back, load = asyncio.Event(), VllmClient.load

    async def waits(self: VllmClient, *arguments: Any, **more: Any) -> None:
        await back.wait()
        await load(self, *arguments, **more)

    monkeypatch.setattr(VllmClient, "load", waits)
    await asyncio.to_thread(bench.engine.unload, lost)
    await wait_until(lambda: _said(bench, {other}), timeout_s=5)
    back.set()
    assert (await bench.ack(lost)).accepted
    assert bench.engine.listed() == {name: str(bench.staged / name) for name in (lost, other)}
    told = [fields for _, fields in await bench.registry.client.read_stream(bench.registry.keys.events, "0")]
    assert [each["version"] for each in told if each["type"] == "replica.acked"].count(lost) == 2
    assert "r1" in await bench.registry.holdings(["r1"])


async def _said(bench: Bench, names: set[str]) -> bool:
    return set(await bench.registry.acks("r1")) == names


async def test_a_restarted_engine_is_another_life_and_gets_everything_again(
    mortal: Bench, model_directory: Path, tmp_path: Path
) -> None:
    bench = mortal
    names = [await bench.publish() for _ in range(2)]
    await bench.want(*names)
    first = {name: await bench.ack(name) for name in names}
    bench.engine.process.send_signal(signal.SIGKILL)
    await asyncio.to_thread(bench.engine.process.wait)
    (tmp_path / "second").mkdir()
    flags = ["--port", str(bench.engine.port), "--token-file", str(bench.engine.token_file)]
    flags += ["--worker-extension-cls", WORKER_EXTENSION]
    with simulator(tmp_path / "second", model_directory, *flags) as second:
        assert second.port == bench.engine.port

        async def again() -> bool:
            acks = await bench.registry.acks("r1")
            # what the first life was known to have lost was taken back, if the agent looked before it knew of the
            # second
            return all(name in acks and acks[name].engine_epoch != first[name].engine_epoch for name in names)

        await wait_until(again, timeout_s=15)
        assert set(second.listed()) == set(names)
        assert all(ack.accepted for ack in (await bench.registry.acks("r1")).values())
        await wait_until(lambda: _loaded(bench, tuple(sorted(names))))
        acks = await bench.registry.acks("r1")
        assert {ack.engine_epoch for ack in acks.values()} == {(await bench.reported())[0]}


# the way out


async def test_what_is_no_longer_wanted_is_unloaded_forgotten_and_then_deleted(bench: Bench) -> None:
    old, new = await bench.publish(), await bench.publish()
    await bench.want(old, new)
    for name in (old, new):
        await bench.ack(name)
    await bench.want(new, drained=(old,))
    await wait_until(lambda: bench.listed() == {new})
    await wait_until(lambda: _loaded(bench, (new,)))
    await wait_until(lambda: _acked(bench, {new}))
    await _heartbeats(bench, 3)
    assert (bench.staged / old).is_dir()  # others of the group may hold it: it is still in the table
    await bench.want(new)
    await wait_until(lambda: not (bench.staged / old).exists())
    assert (bench.staged / new).is_dir()
    assert bench.engine.listed() == {new: str(bench.staged / new)}


async def test_files_outlive_the_requests_that_may_still_need_them(
    redis_url: str, engine: Engine, tmp_path: Path
) -> None:
    """A router that is cut off may wait for an answer for as long as keep_s says."""
    async with bench_on(redis_url, engine, tmp_path, keep_s=1.5) as bench:
        old, new = await bench.publish(), await bench.publish()
        await bench.want(old, new)
        for name in (old, new):
            await bench.ack(name)
        await bench.want(new)
        await wait_until(lambda: bench.listed() == {new})
        await asyncio.sleep(0.8)  # more than half of the time
        await bench.want(old, new)  # it is back, say after a restore: its time begins anew
        await bench.ack(old)
        await wait_until(lambda: bench.listed() == {old, new})
        left_at = time.monotonic()
        await bench.want(new)
        await wait_until(lambda: not (bench.staged / old).exists(), timeout_s=10)
        assert time.monotonic() - left_at >= 1.5
        assert (bench.staged / new).is_dir()


async def _acked(bench: Bench, names: set[str]) -> bool:
    return set(await bench.registry.acks("r1")) == names


async def test_files_stay_as_long_as_the_engine_may_read_them(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    unload, may, tried = VllmClient.unload, asyncio.Event(), asyncio.Event()

    async def stubborn(self: VllmClient, name: str) -> None:
        tried.set()
        if not may.is_set() and not name.startswith("canary-"):
            raise EngineUnavailable("no answer")
        await unload(self, name)

    monkeypatch.setattr(VllmClient, "unload", stubborn)
    old, new = await bench.publish(), await bench.publish()
    await bench.want(old)
    await bench.ack(old)
    await bench.want(new)
    async with asyncio.timeout(5):
        await tried.wait()
    await _heartbeats(bench, 5)
    assert bench.listed() >= {old}
    assert (bench.staged / old).is_dir()
    may.set()
    await wait_until(lambda: old not in bench.listed())
    await wait_until(lambda: not (bench.staged / old).exists())


async def test_work_on_what_is_no_longer_wanted_is_given_up(bench: Bench) -> None:
    """The engine goes on with a load that nobody waits for: its files stay until it is known to have ended."""
    bench.engine.post("/simulator/faults", {"delay_load_s": 1.0})
    slow, other = await bench.publish(), await bench.publish()
    before = _loads(bench)
    await bench.want(slow)
    await wait_until(lambda: _loads(bench) == before + 1)
    await bench.want(other)
    staged = bench.staged / slow

    async def listed() -> bool:
        there = staged.is_dir()
        return slow in bench.listed() and there

    await wait_until(listed, timeout_s=10, what="the load found its files")
    assert (await bench.ack(other)).accepted
    await wait_until(lambda: bench.listed() == {other}, timeout_s=10)
    await wait_until(lambda: not staged.exists())
    assert set(await bench.registry.acks("r1")) == {other}


async def test_without_a_table_nothing_is_unloaded(bench: Bench) -> None:
    """A Redis that lost everything gives no orders."""
    name = await bench.publish()
    await bench.want(name)
    await bench.ack(name)
    await bench.registry.client.command("FLUSHALL")
    await wait_until(lambda: _reported(bench))
    await _heartbeats(bench, 5)
    assert bench.listed() == {name}
    assert (bench.staged / name).is_dir()


async def test_an_older_table_unloads_nothing(bench: Bench) -> None:
    """A Redis that was set back gives no orders until somebody restored it."""
    first = await bench.publish()
    await bench.want(first)
    await bench.ack(first)
    before = await bench.registry.client.command("GET", bench.registry.keys.table)
    second = await bench.publish()
    await bench.want(second, drained=(first,))
    await bench.ack(second)
    await wait_until(lambda: bench.listed() == {second})
    await bench.registry.client.command("SET", bench.registry.keys.table, before)
    await _heartbeats(bench, 5)
    assert bench.listed() == {second}


async def test_an_agent_that_is_stopped_says_that_its_replica_drains(bench: Bench) -> None:
    await wait_until(lambda: _reported(bench))
    bench.agent.cancel()
    await asyncio.gather(bench.agent, return_exceptions=True)
    assert (await bench.registry.fleet()).replicas["r1"].report.draining


async def test_a_manifest_that_redis_no_longer_has_is_read_from_the_store(bench: Bench) -> None:
    name = await bench.publish()
    await bench.registry.client.command("DEL", bench.registry.keys.manifest(name))
    await bench.want(name)
    ack = await bench.ack(name)
    assert ack.accepted, ack.reason


async def test_an_engine_that_answers_nonsense_does_not_end_the_agent(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy in between, a half-started server."""
    await wait_until(lambda: _reported(bench))
    call, nonsense = VllmClient._call, asyncio.Event()
    answers = iter(["<html>", "[]", "null", json.dumps({"data": [{}]}), "process_start_time_seconds many", ""] * 20)

    async def answer(self: VllmClient, *arguments: str, **more: object) -> str:
        return next(answers) if nonsense.is_set() else await call(self, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(VllmClient, "_call", answer)
    nonsense.set()
    await _heartbeats_stop(bench)
    nonsense.clear()
    await _heartbeats(bench, 2)
    assert not bench.agent.done()


# Redis away


async def test_redis_away_for_three_seconds(
    redis_kind: str, engine: Engine, tmp_path: Path, no_leaked_keys: None
) -> None:
    server = RedisServer(Role.CONTROL, tmp_path / "redis", binary=server_binary(redis_kind))
    with server:
        server._any_port = False
        async with bench_on(server.url, engine, tmp_path) as bench:
            old, new = await bench.publish(), await bench.publish()
            await bench.want(old)
            await bench.ack(old)
            await asyncio.to_thread(server.kill)
            await asyncio.sleep(3)  # how long it is away is what the test is about
            assert bench.listed() == {old}
            await asyncio.to_thread(server.start)
            for _ in range(100):
                try:
                    await bench.want(old, new)
                    break
                except ControlUnavailable:
                    await asyncio.sleep(0.05)
            assert (await bench.ack(new)).accepted
            assert bench.listed() == {old, new}
            assert not bench.agent.done()
