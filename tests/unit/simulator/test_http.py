"""The simulated server's ways to fail, stand still and be counted. Its likeness to vLLM is `tests/conformance`."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from adaptersync_tools.simulator.engine import EngineConfig
from adaptersync_tools.simulator.http import Simulator, SimulatorConfig, serving
from adaptersync_tools.simulator.publisher import PublisherConfig
from adaptersync_tools.simulator.scheduler import Latency
from adaptersync_tools.simulator.voice import EOS
from support.adapters import make_adapter
from support.engines import simulator as simulator_process
from support.kv import Listener, listening
from support.tiny_model import write_sizes
from support.wait import wait_until

PROMPT = list(range(33, 103))


class Client:
    def __init__(self, simulator: Simulator, session: aiohttp.ClientSession, url: str) -> None:
        self.simulator = simulator
        self.session = session
        self.url = url

    async def post(self, path: str, body: object = None) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body) as response:
            is_json = response.content_type == "application/json"
            return response.status, await response.json() if is_json else await response.text()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as response:
            is_json = response.content_type == "application/json"
            return response.status, await response.json() if is_json else await response.text()

    async def load(self, name: str, path: Path) -> tuple[int, Any]:
        return await self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})

    async def complete(self, **fields: Any) -> tuple[int, Any]:
        body = {"model": "base", "prompt": PROMPT, "max_tokens": 5, "temperature": 0} | fields
        return await self.post("/v1/completions", body)


@asynccontextmanager
async def running(*, latency: Latency | None = None, **engine: Any) -> AsyncIterator[Client]:
    config = SimulatorConfig(engine=EngineConfig(**engine), latency=latency or Latency())
    simulator = Simulator(config)
    async with serving(simulator) as address, aiohttp.ClientSession() as session:
        yield Client(simulator, session, address.url)


async def test_ordered_load_failures_count_down_and_use_up_ids(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a")
    async with running() as client:
        await client.post("/simulator/faults", {"fail_loads": 1, "fail_load_status": 503})
        status, body = await client.load("a", adapter)
        assert (status, body["error"]["code"]) == (503, 503)
        assert (await client.load("a", adapter))[0] == 200
        assert (await client.post("/collective_rpc", {"method": "list_loras"}))[1] == {"results": [[2]]}


async def test_unknown_fault_is_refused() -> None:
    async with running() as client:
        status, body = await client.post("/simulator/faults", {"explode": True})
        assert status == 400
        assert "explode" in body["error"]["message"]


async def test_a_load_goes_on_when_its_client_has_gone(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a")
    async with running() as client:
        await client.post("/simulator/faults", {"delay_load_s": 0.2})
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.load("a", adapter), 0.05)

        async def listed() -> bool:
            return len((await client.get("/v1/models"))[1]["data"]) == 2

        assert not await listed()
        await wait_until(listed)


async def test_a_frozen_engine_answers_health_and_hangs_elsewhere(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a")
    async with running() as client:
        await client.post("/simulator/faults", {"frozen": True})
        for path in ("/health", "/ping", "/metrics", "/v1/models", "/version"):
            assert (await client.get(path))[0] == 200
        calls = [
            asyncio.ensure_future(call)
            for call in (client.get("/is_paused"), client.complete(), client.load("a", adapter))
        ]
        _, pending = await asyncio.wait(calls, timeout=0.1)
        assert len(pending) == 3
        await client.post("/simulator/faults", {"frozen": False})
        assert [status for status, _ in await asyncio.gather(*calls)] == [200, 200, 200]


async def test_base_served_under_an_adapter_name(tmp_path: Path) -> None:
    async with running() as client:
        await client.load("a", make_adapter(tmp_path / "a"))

        async def text(model: str) -> str:
            return str((await client.complete(model=model))[1]["choices"][0]["text"])

        assert await text("a") != await text("base")
        await client.post("/simulator/faults", {"serve_base": True})
        assert await text("a") == await text("base")


async def test_death_fails_what_is_in_flight() -> None:
    async with running(latency=Latency(decode_tokens_per_s=10)) as client:
        whole = asyncio.ensure_future(client.complete(max_tokens=100))
        streamed = asyncio.ensure_future(client.complete(max_tokens=100, stream=True))
        await wait_until(lambda: client.simulator.engine.running == 2)
        await client.post("/simulator/faults", {"die": True})
        assert (await whole)[0] == 500
        status, text = await streamed
        assert status == 200
        assert "EngineCore encountered an issue" in text
        assert text.endswith("data: [DONE]\n\n")
        assert (await client.get("/health"))[0] == 503
        assert (await client.complete())[0] == 500
        assert (await client.get("/v1/models"))[0] == 200


async def test_abort_ends_a_request_with_what_it_has_said() -> None:
    async with running(latency=Latency(decode_tokens_per_s=100), max_num_seqs=1) as client:
        calls = [asyncio.ensure_future(client.complete(max_tokens=1000)) for _ in range(2)]
        await wait_until(lambda: client.simulator.scheduler.waiting == 1)
        await asyncio.sleep(0.05)  # some tokens' worth
        assert (await client.post("/abort_requests", {}))[1]["aborted"] == 2
        answers = [body for _, body in await asyncio.gather(*calls)]
        assert [answer["choices"][0]["finish_reason"] for answer in answers] == ["abort", "abort"]
        assert 0 < answers[0]["usage"]["completion_tokens"] < 1000
        assert answers[1]["usage"]["completion_tokens"] == 0
        await wait_until(lambda: client.simulator.engine.running == 0)


async def test_a_client_that_goes_away_frees_its_blocks() -> None:
    async with running(latency=Latency(decode_tokens_per_s=10)) as client:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.complete(max_tokens=100), 0.1)
        await wait_until(lambda: client.simulator.engine.running == 0)
        assert client.simulator.engine.cache.reset()


async def test_a_stream_that_cannot_be_written_any_more_ends_without_a_word(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client has gone, and the server tries to write before it is told."""
    write, written = web.StreamResponse.write, 0

    async def closing(self: web.StreamResponse, data: bytes) -> None:
        nonlocal written
        written += 1
        if written > 3:
            raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")
        await write(self, data)

    async with running(latency=Latency(decode_tokens_per_s=200)) as client:
        with monkeypatch.context() as patch:
            patch.setattr(web.StreamResponse, "write", closing)
            body = {"model": "base", "prompt": PROMPT, "max_tokens": 1000, "stream": True, "n": 2}
            await client.post("/v1/completions", body)
        await wait_until(lambda: client.simulator.engine.running == 0)
        assert (await client.complete())[0] == 200
    assert caplog.text == ""


async def test_pause_keep_holds_and_resume_goes_on() -> None:
    async with running(latency=Latency(decode_tokens_per_s=100)) as client:
        call = asyncio.ensure_future(client.complete(max_tokens=10))
        await wait_until(lambda: client.simulator.engine.running == 1)
        await client.post("/pause?mode=keep&clear_cache=false")
        assert (await client.get("/is_paused"))[1] == {"is_paused": True}
        done, _ = await asyncio.wait({call}, timeout=0.3)
        assert not done
        await client.post("/resume")
        assert (await call)[1]["usage"]["completion_tokens"] == 10


async def test_pause_wait_drains_and_admits_nothing_new() -> None:
    async with running(latency=Latency(decode_tokens_per_s=100)) as client:
        first = asyncio.ensure_future(client.complete(max_tokens=10))
        await wait_until(lambda: client.simulator.engine.running == 1)
        await client.post("/pause?mode=wait")
        assert first.done() or (await asyncio.wait_for(first, 1))[0] == 200
        second = asyncio.ensure_future(client.complete())
        done, _ = await asyncio.wait({second}, timeout=0.1)
        assert not done
        await client.post("/resume")
        assert (await second)[0] == 200


async def test_pauses_are_counted() -> None:
    async with running() as client:
        calls = (await client.get("/simulator/calls"))[1]["calls"]
        assert calls["/pause"] == 0
        await client.post("/pause?mode=keep")
        await client.post("/resume")
        await client.get("/nowhere")
        calls = (await client.get("/simulator/calls"))[1]["calls"]
        assert (calls["/pause"], calls["/resume"], calls["unmatched"]) == (1, 1, 1)


async def test_one_adapter_too_many_is_deferred_and_others_pass(tmp_path: Path) -> None:
    async with running(latency=Latency(decode_tokens_per_s=50), max_loras=1, max_cpu_loras=2) as client:
        for seed, name in enumerate(("a", "b")):
            await client.load(name, make_adapter(tmp_path / name, seed=seed))
        first = asyncio.ensure_future(client.complete(model="a", max_tokens=20))
        await wait_until(lambda: client.simulator.engine.running == 1)
        second = asyncio.ensure_future(client.complete(model="b"))
        await wait_until(lambda: client.simulator.scheduler.deferred == 1)
        assert (await client.complete(model="base", max_tokens=1))[0] == 200
        assert not second.done()
        _, text = await client.get("/metrics")
        assert 'vllm:num_requests_waiting_by_reason{engine="0",model_name="base",reason="deferred"} 1.0' in text
        await asyncio.gather(first, second)


async def test_latency_model_adds_up() -> None:
    latency = Latency(prefill_tokens_per_s=350, decode_tokens_per_s=100)
    async with running(latency=latency, block_size=32) as client:

        async def took(**fields: Any) -> float:
            start = time.monotonic()
            assert (await client.complete(**fields))[0] == 200
            return time.monotonic() - start

        first, second = await took(max_tokens=5), await took(max_tokens=5)
        assert first > 0.239  # 70 / 350 + 4 / 100
        assert 0.056 < second < first  # 64 of the 70 are cached now


async def test_more_sequences_than_decode_at_full_rate_share_it() -> None:
    async with running(latency=Latency(decode_tokens_per_s=100, full_rate_seqs=2)) as client:
        start = time.monotonic()
        calls = [asyncio.create_task(client.complete(max_tokens=11)) for _ in range(4)]
        longer = asyncio.create_task(client.complete(max_tokens=31))
        await asyncio.gather(*calls)
        assert time.monotonic() - start > 0.249  # 10 / 100, at two fifths of the rate
        assert (await longer)[0] == 200
        assert 0.449 < time.monotonic() - start < 0.74  # then alone: the other 20 at 100 a second
        _, text = await client.get("/metrics")
        told = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if "{" in line}
        assert told["vllm:inter_token_latency_seconds_count"] == 4 * 10 + 30
        spent_s = told["vllm:inter_token_latency_seconds_sum"]
        assert spent_s == pytest.approx(told["vllm:request_decode_time_seconds_sum"], abs=0.05)


def test_the_process_starts_fast_and_stops_cleanly(tmp_path: Path) -> None:
    model = write_sizes(tmp_path / "model")
    with simulator_process(tmp_path, model) as engine:
        assert _cpu_seconds(engine.process.pid) < 1.0  # 0.3; the wall time depends on who else runs
        assert engine.complete("base", PROMPT)["usage"]["prompt_tokens"] == 70
        engine.process.send_signal(signal.SIGTERM)
        assert engine.process.wait(5) == 0


def _cpu_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def test_the_process_ends_after_its_engine_died(tmp_path: Path) -> None:
    model = write_sizes(tmp_path / "model")
    with simulator_process(tmp_path, model, "--death-grace-s", "0.1") as engine:
        engine.post("/simulator/faults", {"die": True})
        assert engine.process.wait(5) == 0


async def test_request_ids_are_echoed_only_when_told_to() -> None:
    headers = {"X-Request-Id": "mine"}
    for told in (False, True):
        simulator = Simulator(SimulatorConfig(request_id_headers=told))
        async with serving(simulator) as address, aiohttp.ClientSession() as session:
            body = {"prompt": "hello", "max_tokens": 1}
            async with session.post(address.url + "/v1/completions", json=body, headers=headers) as response:
                assert (await response.json())["id"] == "cmpl-mine"
                assert response.headers.get("X-Request-Id") == ("mine" if told else None)


async def test_dropped_batches_are_in_the_replay_only(tmp_path: Path) -> None:
    kv_events = PublisherConfig(endpoint=f"ipc://{tmp_path}/kv", replay_endpoint=f"ipc://{tmp_path}/replay")
    simulator = Simulator(SimulatorConfig(engine=EngineConfig(block_size=32), kv_events=kv_events))
    async with serving(simulator) as address, aiohttp.ClientSession() as session:
        client = Client(simulator, session, address.url)
        with listening(kv_events.endpoint, kv_events.replay_endpoint or "") as listener:
            await asyncio.to_thread(_subscribed, client, listener, asyncio.get_running_loop())
            start = (await asyncio.to_thread(listener.replay, 0))[-1].sequence + 1
            await client.post("/simulator/faults", {"drop_kv_batches": 1})
            for first in (40, 50):
                await client.complete(prompt=[first] * 40)
            live = await asyncio.to_thread(listener.until, bool)
            assert [batch.sequence for batch in live] == [start + 1]
            replayed = await asyncio.to_thread(listener.replay, start)
            assert [batch.sequence for batch in replayed] == [start, start + 1]


def _subscribed(client: Client, listener: Listener, loop: asyncio.AbstractEventLoop) -> None:
    """A subscription takes a moment to arrive: ask until an event does."""
    number = 33
    while not listener.pending(0.1):
        number += 1
        asyncio.run_coroutine_threadsafe(client.complete(prompt=[number] * 40), loop).result()
    listener.discard(0.05)


async def test_a_load_holds_decoding_up(tmp_path: Path) -> None:
    latency = Latency(decode_tokens_per_s=50, load_s=0.3)
    async with running(latency=latency) as client:
        start = time.monotonic()
        call = asyncio.ensure_future(client.complete(max_tokens=11))
        await wait_until(lambda: client.simulator.engine.running == 1)
        await client.load("a", make_adapter(tmp_path / "a"))
        assert (await call)[0] == 200
        assert time.monotonic() - start > 0.499  # 10 / 50 + 0.3


async def test_answers_end_by_themselves_when_told_to() -> None:
    async with running(stop_probability=0.05) as client:
        _, body = await client.complete(max_tokens=500, return_token_ids=True)
        (choice,) = body["choices"]
        assert choice["finish_reason"] == "stop"
        assert choice["token_ids"][-1] == EOS
        assert len(choice["text"]) == len(choice["token_ids"]) - 1 < 499
        _, body = await client.complete(max_tokens=500, ignore_eos=True)
        assert body["choices"][0]["finish_reason"] == "length"
