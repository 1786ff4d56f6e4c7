"""What a real engine keeps in memory: by itself too much, with our agent what has a name."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from adaptersync_core.errors import EngineRefused
from contract.proof.conftest import Bench
from support.engines import MAX_CPU_LORAS, MODEL
from support.wait import wait_until_sync


async def test_twenty_versions_come_and_go_beside_a_leased_one(bench: Bench) -> None:
    """The leased one is asked for nothing, so it is always the least recently used."""
    leased = bench.version(1)
    await bench.load(leased)
    said = await bench.client.logprobs(leased.adapter_id, range(40, 80), timeout_s=30)
    for seq in range(2, 22):
        manifest = bench.version(seq)
        await bench.load(manifest)
        assert await bench.engine.resident() == {leased.adapter_id, manifest.adapter_id}
        (held,) = await bench.client.held()
        assert len(held.registered) == 2
        await bench.engine.unload(manifest.adapter_id)
    assert await bench.engine.resident() == {leased.adapter_id}
    assert (await bench.prove(leased)).verdict == "proved"
    assert said == await bench.client.logprobs(leased.adapter_id, range(40, 80), timeout_s=30)


async def test_what_failed_loads_leave_is_freed(bench: Bench) -> None:
    """A tensor too large for the base fails last, when the adapter has its place already."""
    leased = bench.version(1)
    await bench.load(leased)
    for seq in range(2, 2 + MAX_CPU_LORAS):
        with pytest.raises(EngineRefused):
            await bench.load(bench.version(seq, hidden=256))
    assert await bench.engine.resident() == {leased.adapter_id}
    (held,) = await bench.client.held()
    assert len(held.registered) == 1


async def test_a_version_is_not_freed_under_a_running_request(bench: Bench) -> None:
    """The next step would read its files again, and without them the server would end."""
    manifest = bench.version()
    await bench.load(manifest)
    name, served = manifest.adapter_id, bench.served
    number = (await bench.engine.numbers())[name]
    body = {"model": name, "prompt": "hello", "max_tokens": 480, "ignore_eos": True, "stream": True}
    drop = {"method": "adaptersync_drop", "args": [number]}
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(served.post, "/v1/completions", body)
        wait_until_sync(lambda: drop_answer(bench, "adaptersync_held")["active"] != [] and running(bench) == 1)
        assert served.unload(name).status == 200
        assert served.post("/collective_rpc", drop).json["results"] == [{"dropped": False, "running": 1}]
        assert not request.done()
        assert request.result(60).events[-1]["choices"][0]["finish_reason"] == "length"
    served.complete(MODEL, "after it")  # the step in which the worker hears that the other has ended
    assert served.post("/collective_rpc", drop).json["results"] == [{"dropped": True, "running": 0}]


def drop_answer(bench: Bench, method: str) -> dict[str, list[int]]:
    answer: dict[str, list[int]] = bench.served.post("/collective_rpc", {"method": method}).json["results"][0]
    return answer


def running(bench: Bench) -> float:
    text = bench.served.get("/metrics").text
    line = next(line for line in text.splitlines() if line.startswith("vllm:num_requests_running{"))
    return float(line.rsplit(" ", 1)[1])
