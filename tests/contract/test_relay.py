"""The relay as an unmodified TRL meets it, over a real coordinator and a router that the test plays."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from msgspec.structs import replace

from adaptersync.coordinator.app import _coordinate
from adaptersync.trainer.relay import relay_runner
from adaptersync_core.config import (
    Config,
    CoordinatorSection,
    GroupSection,
    JobsSection,
    RedisSection,
    RelaySection,
    StoreSection,
    TrainerSection,
)
from adaptersync_core.errors import ControlUnavailable
from adaptersync_core.keys import Keys
from adaptersync_core.records import Request
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from adaptersync_core.table import Table
from support.artifacts import small_adapter
from support.scripted import ScriptedReplica
from support.unclosed import nothing_unclosed
from support.upstreams import MAX_MODEL_LEN, Upstream, upstream
from support.wait import wait_until

NAMES = [f"trl-policy-v{step}" for step in range(5)]


class Bench:
    """A relay between a trainer (`post`) and a router (`router`), with a coordinator and one scripted replica."""

    def __init__(
        self,
        url: str,
        registry: Registry,
        replica: ScriptedReplica,
        router: Upstream,
        root: Path,
        stop: Callable[[], Awaitable[None]],
    ) -> None:
        self.stop = stop
        self.registry = registry
        self.replica = replica
        self.router = router
        self.root = root
        self._url = url
        self.session = aiohttp.ClientSession()

    async def post(self, path: str, body: object) -> tuple[int, dict[str, str], bytes]:
        async with self.session.post(self._url + path, json=body) as answer:
            return answer.status, {name.lower(): value for name, value in answer.headers.items()}, await answer.read()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self._url + path) as answer:
            return answer.status, await answer.json()

    def adapter(self, step: int, **config: object) -> Path:
        directory = small_adapter(self.root / f"checkpoint-{step}", seed=step)
        file = directory / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))
        return directory

    async def load(self, step: int, directory: Path | None = None, **config: object) -> tuple[int, str]:
        body = {"lora_name": NAMES[step], "lora_path": str(directory or self.adapter(step, **config))}
        status, _, text = await self.post("/v1/load_lora_adapter", body)
        return status, text.decode()

    async def asked(self, model: str) -> tuple[str, str]:
        """What the router is asked for in place of a name, and what it is told the name was."""
        status, headers, _ = await self.post("/v1/completions", {"model": model, "prompt": [1, 2]})
        assert status == 200
        seen = self.router.seen[-1]
        assert headers.get("x-adaptersync-substituted") == seen.headers.get("x-adaptersync-substituted")
        assert seen.json["prompt"] == [1, 2]
        return seen.json["model"], seen.headers.get("x-adaptersync-substituted", "")

    async def named(self, seq: int) -> str | None:
        return await self.registry.find_seq("run", seq)

    async def window(self) -> list[int]:
        table = await self.registry.table()
        return [table.versions[name].seq for name in table.window("run")]


def config_of(redis_url: str, router_url: str, directory: Path) -> Config:
    return Config(
        group=GroupSection(name="group"),
        redis=RedisSection(control_url=redis_url, lane_bytes=0),
        store=StoreSection(path=str(directory / "store")),
        coordinator=CoordinatorSection(min_ready=1, tick_s=0.05),
        relay=RelaySection(router_url=router_url, allowed_root=str(directory / "out"), promotion_timeout_s=5.0),
        trainer=TrainerSection(run="run", max_staleness=1),
        jobs=JobsSection(verify=False),
    )


@asynccontextmanager
async def relayed(redis_url: str, directory: Path, *, key_file: str = "", **relay: Any) -> AsyncIterator[Bench]:
    """`relay` are settings of the relay."""
    async with upstream("router") as router, AsyncExitStack() as stack:
        config = config_of(redis_url, router.url, directory)
        trainer = replace(config.trainer, router_key_file=key_file)
        config = replace(config, relay=replace(config.relay, **relay), trainer=trainer)
        client = RedisClient(redis_url, name="test")
        stack.push_async_callback(client.close)
        registry = Registry(client, Keys("group"))
        replica = ScriptedReplica(registry, "r1")
        stack.push_async_callback(
            _ended, *(asyncio.create_task(work) for work in (replica.live(), _coordinate(config)))
        )
        runner = relay_runner(config)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        bench = Bench(f"http://{host}:{port}", registry, replica, router, directory / "out", runner.cleanup)
        stack.push_async_callback(bench.session.close)
        yield bench


async def _ended(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends


@pytest.fixture
async def bench(redis_url: str, tmp_path: Path) -> AsyncIterator[Bench]:
    async with relayed(redis_url, tmp_path) as bench:
        yield bench


async def test_what_is_passed_on_shows_the_relays_key_and_no_other(redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("as-key\n")
    async with relayed(redis_url, tmp_path, key_file=str(tmp_path / "key")) as bench:
        assert (await bench.load(1))[0] == 200
        await bench.asked(NAMES[1])
        assert bench.router.seen[-1].headers["authorization"] == "Bearer as-key"


async def test_a_load_is_a_publication_and_its_name_an_alias(bench: Bench) -> None:
    status, text = await bench.load(1)
    assert status == 200
    assert text.startswith(f"Success: LoRA adapter '{NAMES[1]}' is run-v1-")
    model, substituted = await bench.asked(NAMES[1])
    assert (model, substituted) == ((await bench.registry.table()).runs["run"].current, "")


async def test_a_repeated_load_publishes_nothing(bench: Bench) -> None:
    first, again = await bench.load(1), await bench.load(1)
    assert first == again
    assert len(await bench.registry.published("run")) == 1


async def test_pauses_and_unloads_do_nothing_and_other_names_pass_as_they_are(bench: Bench) -> None:
    await bench.load(1)
    for path in ("/pause", "/resume", "/v1/unload_lora_adapter"):
        assert (await bench.post(path, {"lora_name": NAMES[1]}))[0] == 200
    assert not bench.router.seen
    assert await bench.window() == [1]
    assert await bench.asked("base") == ("base", "")


async def test_what_trl_reads_of_a_server_is_there(bench: Bench) -> None:
    await wait_until(lambda: _reported(bench))
    status, info = await bench.get("/server_info")
    assert status == 200
    assert info["vllm_config"]["lora_config"] == {"max_lora_rank": 64, "max_loras": 8}
    assert info["vllm_config"]["parallel_config"]["data_parallel_size"] == 1


async def _reported(bench: Bench) -> bool:
    return bool((await bench.registry.fleet()).replicas)


async def test_a_trainer_that_starts_again_begins_an_epoch_and_may_reuse_its_names(bench: Bench) -> None:
    await bench.load(1)
    await bench.get("/server_info")
    status, text = await bench.load(1, bench.adapter(2))
    assert (status, "is run-v2-" in text) == (200, True)
    assert (await bench.registry.table()).runs["run"].epoch == 2


async def test_a_trainer_that_could_not_begin_may_start_once_more(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.load(1)

    def away(config: Config) -> None:
        raise ControlUnavailable("Redis is away")

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr("adaptersync.trainer.relay.AdapterPublisher", away)
        assert (await bench.get("/server_info"))[0] == ControlUnavailable.http_status
    assert (await bench.get("/server_info"))[0] == 200
    status, text = await bench.load(1, bench.adapter(2))
    assert (status, "is run-v2-" in text) == (200, True)


async def test_a_relay_that_cannot_begin_leaves_nothing_open(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(config: Config) -> None:
        raise ControlUnavailable("Redis is away")

    monkeypatch.setattr("adaptersync.trainer.relay.AdapterPublisher", away)
    with nothing_unclosed(), pytest.raises(ControlUnavailable):
        await relay_runner(config_of(redis_url, "http://127.0.0.1:1", tmp_path)).setup()


async def test_a_trainer_that_starts_again_does_not_wait_for_the_load_of_the_one_before(
    redis_url: str, tmp_path: Path
) -> None:
    async with relayed(redis_url, tmp_path, promotion_timeout_s=60.0) as bench:
        await bench.load(1)
        bench.replica.answers.clear()
        before = asyncio.create_task(bench.load(2))
        await wait_until(lambda: _waits(bench))
        await asyncio.gather(*(bench.get("/server_info") for _ in range(4)))  # one trainer began, however often it asks
        status, text = await asyncio.wait_for(before, 10)
        assert (status, "another trainer has begun" in text) == (500, True)
        bench.replica.answers.set()
        status, text = await bench.load(1, bench.adapter(3))
        assert (status, "is run-v3-" in text) == (200, True)
        model, substituted = await bench.asked(NAMES[2])  # not a name of this trainer
        assert (model.startswith("run-v3-"), substituted) == (True, NAMES[2])
        assert (await bench.registry.table()).runs["run"].epoch == 2


async def test_a_relay_that_stops_ends_the_load_it_waits_for(redis_url: str, tmp_path: Path) -> None:
    async with asyncio.timeout(30), relayed(redis_url, tmp_path, promotion_timeout_s=60.0) as bench:
        bench.replica.answers.clear()
        waiting = asyncio.create_task(bench.load(1))
        await wait_until(lambda: _waits(bench))
        await bench.stop()
        assert (await waiting)[0] == 500


async def _waits(bench: Bench) -> bool:
    return (await bench.registry.table()).candidate("run") is not None


@pytest.mark.parametrize("name", ["", "a\r\nx-evil: 1", "a\0"])
async def test_a_name_that_no_header_can_hold_is_refused(bench: Bench, name: str) -> None:
    status, _, text = await bench.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(bench.adapter(1))})
    assert (status, b"cannot be called" in text) == (501, True)


async def test_a_path_that_leads_nowhere_is_refused(bench: Bench) -> None:
    bench.root.mkdir(exist_ok=True)
    (bench.root / "loop").symlink_to(bench.root / "loop")
    for place in ("loop", "nul\0"):
        status, text = await bench.load(1, bench.root / place)
        assert (status, "path cannot be followed" in text) == (501, True)


@pytest.mark.parametrize("body", [{"model": []}, {"model": {}}, {}, [], 7])
async def test_a_request_without_a_name_is_refused(bench: Bench, body: object) -> None:
    assert (await bench.post("/v1/completions", body))[0] == 422


@pytest.mark.parametrize(("place", "status"), [("../elsewhere", 501), ("missing", 501)])
async def test_only_adapters_below_the_root_are_taken(bench: Bench, place: str, status: int) -> None:
    small_adapter(bench.root.parent / "elsewhere")
    answered, text = await bench.load(1, bench.root / place)
    assert answered == status
    assert ("allowed root" in text) == (place == "../elsewhere")
    assert await bench.registry.published("run") == []


async def test_what_vllm_cannot_serve_is_501_with_the_reason(bench: Bench) -> None:
    status, text = await bench.load(1, use_dora=True)
    assert status == 501
    assert "DoRA" in text


async def test_what_the_fleet_refuses_fails_with_its_reason(bench: Bench) -> None:
    bench.replica.refuses[1] = "rank 32 is above the engine's 16"
    status, text = await bench.load(1)
    assert status == 500
    assert "rank 32 is above the engine's 16" in text


async def test_what_the_fleet_does_not_take_in_time_is_stood_in_for_and_marked(redis_url: str, tmp_path: Path) -> None:
    async with relayed(redis_url, tmp_path, promotion_timeout_s=1.0) as bench:
        assert (await bench.load(1))[0] == 200
        bench.replica.answers.clear()
        status, text = await bench.load(2)
        assert (status, "is run-v1-" in text) == (200, True)
        model, substituted = await bench.asked(NAMES[2])
        assert (model.startswith("run-v1-"), substituted) == (True, NAMES[2])
        bench.replica.answers.set()
        await wait_until(lambda: _current(bench, 2))
        status, text = await bench.load(2)  # asked again, it is a version of its own
        assert (status, "is run-v3-" in text) == (200, True)


async def _current(bench: Bench, seq: int) -> bool:
    return (await bench.window())[:1] == [seq]


async def test_a_retired_version_is_stood_in_for_by_the_oldest_that_is_served(bench: Bench) -> None:
    for step in (1, 2, 3):
        assert (await bench.load(step))[0] == 200
    await wait_until(lambda: _window(bench, [3, 2]))
    model, substituted = await bench.asked(NAMES[1])
    assert (model.startswith("run-v2-"), substituted) == (True, NAMES[1])
    await bench.registry.request(Request(kind="rollback", run="run"))
    await wait_until(lambda: _window(bench, [2]))
    bench.router.fail = [410]  # as the router does, from the moment on
    assert (await bench.asked(NAMES[3]))[0].startswith("run-v2-")


async def _window(bench: Bench, seqs: list[int]) -> bool:
    return await bench.window() == seqs


async def test_a_name_of_before_a_restart_of_the_relay_is_no_dead_end(bench: Bench) -> None:
    """TRL would ask for it 90 times in 505 s, and then end."""
    assert await bench.asked(NAMES[4]) == (NAMES[4], "")  # nothing is served yet: the router says so
    await bench.load(1)
    model, substituted = await bench.asked(NAMES[4])
    assert (model.startswith("run-v1-"), substituted) == (True, NAMES[4])


async def test_an_answer_that_breaks_off_is_not_whole_for_trl_either(bench: Bench) -> None:
    await bench.load(1)
    bench.router.cut_after = 1
    with pytest.raises(aiohttp.ClientPayloadError):
        await bench.post("/v1/completions", {"model": NAMES[1], "prompt": [1], "stream": True})


async def test_without_a_router_the_reason_is_said(bench: Bench) -> None:
    await bench.load(1)
    await bench.router.stop()
    status, _, text = await bench.post("/v1/completions", {"model": NAMES[1], "prompt": [1]})
    assert status == 502
    assert b"check relay.router_url" in text


async def test_without_redis_rollouts_go_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    await bench.load(1)

    async def away(self: Registry) -> None:
        raise ControlUnavailable("Redis cannot be reached")

    monkeypatch.setattr(Registry, "table", away)
    model, substituted = await bench.asked(NAMES[1])
    assert (model.startswith("run-v1-"), substituted) == (True, "")


async def test_without_redis_a_new_version_is_stood_in_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL would end the training; it goes on with what is served."""
    assert (await bench.load(1))[0] == 200
    monkeypatch.setattr("adaptersync.trainer.publisher.INSIST_S", 0.2)

    async def away(*_: object, **__: object) -> None:
        raise ControlUnavailable("Redis cannot be reached")

    with monkeypatch.context() as patch:
        patch.setattr(Registry, "reserve", away)
        status, text = await bench.load(2)
        assert (status, "is run-v1-" in text) == (200, True)
        model, substituted = await bench.asked(NAMES[2])
        assert (model.startswith("run-v1-"), substituted) == (True, NAMES[2])
    status, text = await bench.load(3)
    assert (status, "is run-v2-" in text) == (200, True)


async def test_many_rollouts_at_once_are_one_look_at_the_table(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    class Counted(Registry):
        async def table(self) -> Table:
            nonlocal looks
            looks += 1
            return await super().table()

    monkeypatch.setattr("adaptersync.trainer.relay.Registry", Counted)
    monkeypatch.setattr("adaptersync.trainer.relay.LOOK_S", 3600.0)
    async with relayed(redis_url, tmp_path) as bench:
        for step in (1, 2):
            assert (await bench.load(step))[0] == 200
            await asyncio.gather(*(bench.post("/v1/completions", {"model": NAMES[step]}) for _ in range(50)))
            assert {seen.json["model"] for seen in bench.router.seen[-50:]} == {await bench.named(step)}
        assert not any("x-adaptersync-substituted" in seen.headers for seen in bench.router.seen)
        assert looks == 2  # what is promoted is known at once


async def test_what_the_router_refuses_twice_is_passed_on(bench: Bench) -> None:
    await bench.load(1)
    bench.router.fail = [410, 410, 410]
    status, _, _ = await bench.post("/v1/completions", {"model": NAMES[1], "prompt": [1, 2]})
    assert (status, len(bench.router.seen)) == (410, 2)


async def test_a_trl_that_would_send_whole_weights_hears_why_it_cannot(bench: Bench) -> None:
    """As it does for DoRA. Up to here it reads no status, and dies of a field that is not there."""
    await wait_until(lambda: _reported(bench))
    _, info = await bench.get("/server_info")
    assert info["vllm_config"]["model_config"]["dtype"]
    assert await bench.get("/get_world_size") == (200, {"world_size": 1})
    status, _, text = await bench.post("/init_weight_transfer_engine", {"init_info": {}})
    assert status == 501
    assert b"only adapters are published here" in text


async def test_a_rollout_that_is_given_up_is_given_up_at_the_router(bench: Bench) -> None:
    await bench.load(1)
    bench.router.gate.clear()
    asking = asyncio.create_task(bench.asked(NAMES[1]))
    await wait_until(lambda: bench.router.in_flight == 1)
    asking.cancel()
    try:
        await wait_until(lambda: bench.router.aborted == 1)
        assert bench.router.in_flight == 0
    finally:
        bench.router.gate.set()


async def test_a_load_that_nobody_waits_for_any_more_comes_to_its_end(redis_url: str, tmp_path: Path) -> None:
    async with relayed(redis_url, tmp_path, promotion_timeout_s=60.0) as bench:
        await bench.load(1)
        bench.replica.answers.clear()
        directory = bench.adapter(2)
        loading = asyncio.create_task(bench.load(2, directory))
        await wait_until(lambda: _waits(bench))
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        bench.replica.answers.set()
        await wait_until(lambda: _current(bench, 2))
        status, text = await bench.load(2, directory)  # it is known, and not published once more
        assert (status, "is run-v2-" in text) == (200, True)
        assert len(await bench.registry.published("run")) == 2


async def test_what_could_be_read_for_ever_is_refused_and_holds_up_no_other(bench: Bench) -> None:
    pipe = bench.adapter(1) / "adapter_model.safetensors"
    pipe.unlink()
    os.mkfifo(pipe)
    try:
        status, text = await asyncio.wait_for(bench.load(1, pipe.parent), 20)
    finally:
        os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))  # whoever reads it is let go
    assert (status, f"{pipe.name} is missing" in text, (await bench.load(2))[0]) == (501, True, 200)


async def test_no_more_rollouts_than_its_own_limit_are_at_the_router(redis_url: str, tmp_path: Path) -> None:
    async with relayed(redis_url, tmp_path, max_inflight=2) as bench:
        await bench.load(1)
        bench.router.gate.clear()
        asking = [asyncio.create_task(bench.asked(NAMES[1])) for _ in range(5)]
        await wait_until(lambda: bench.router.in_flight == 2)
        bench.router.gate.set()
        await asyncio.gather(*asking)
        assert bench.router.largest == 2


async def test_a_rollout_has_the_relays_own_time(redis_url: str, tmp_path: Path) -> None:
    async with relayed(redis_url, tmp_path, request_timeout_s=0.5) as bench:
        await bench.load(1)
        bench.router.gate.clear()
        status, _, text = await bench.post("/v1/completions", {"model": NAMES[1], "prompt": [1, 2]})
        assert (status, b"router does not answer" in text) == (502, True)


async def test_what_trl_asks_once_waits_for_a_fleet_that_can_answer(bench: Bench) -> None:
    """It asked for the fleet's health a moment ago, and would end at the first refusal."""
    await wait_until(lambda: _reported(bench))
    bench.router.no_models = 2
    status, body = await bench.get("/v1/models")
    assert (status, body["data"][0]["max_model_len"], bench.router.no_models) == (200, MAX_MODEL_LEN, 0)


async def test_a_fleet_that_stays_away_is_no_longer_waited_for_at_last(redis_url: str, tmp_path: Path) -> None:
    async with relayed(redis_url, tmp_path, promotion_timeout_s=0.7) as bench:
        bench.router.no_models = 100
        assert (await bench.get("/v1/models"))[0] == 503
        assert bench.router.no_models < 99
        await bench.router.stop()
        assert (await bench.get("/v1/models"))[0] == 502
