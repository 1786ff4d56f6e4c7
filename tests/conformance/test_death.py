"""How an engine dies: an adapter that was evicted is asked for, and its files are gone. And how it does not."""

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from adaptersync.engine.door import IDENTITY
from conformance.conftest import TARGETS, started
from support.engines import MAX_CPU_LORAS, MODEL, Engine
from support.wait import wait_until_sync

DEATH = "EngineCore encountered an issue. See stack trace (above) for the root cause."


@pytest.fixture(params=TARGETS)
def mortal(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine of the test's own: it does not outlive it."""
    with started(request, tmp_path_factory) as engine:
        yield engine


def test_evicted_adapter_without_files_takes_everybody_down(mortal: Engine, adapter: Callable[..., Path]) -> None:
    first = adapter()
    assert mortal.load("first", first).status == 200
    for number in range(MAX_CPU_LORAS):
        assert mortal.load(f"later{number}", adapter()).status == 200
    shutil.rmtree(first)
    assert "first" in mortal.listed()

    with ThreadPoolExecutor(1) as pool:
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 500, "ignore_eos": True, "stream": True}
        bystander = pool.submit(mortal.post, "/v1/completions", body)
        wait_until_sync(lambda: _running(mortal) == 1, timeout_s=30)  # an engine's first request takes its time
        answer = mortal.post("/v1/completions", {"model": "first", "prompt": "hello", "max_tokens": 1})
        assert (answer.status, answer.error["type"], answer.error["message"]) == (500, "InternalServerError", DEATH)
        stream = bystander.result(10)
        assert stream.status == 200
        assert stream.events[-1]["error"]["message"] == DEATH
        assert stream.events[-1]["error"]["code"] == 500
    # Having answered so, the server ends; supervisors must not take its exit code for a failure's.
    assert mortal.process.wait(30) == 0


@pytest.fixture(params=TARGETS)
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One without our door and extension."""
    if request.param == "vllm":
        yield request.getfixturevalue("unguarded")
        return
    with started(request, tmp_path_factory, guarded=False) as engine:
        yield engine


def test_without_our_door_and_extension_their_calls_are_refused(plain: Engine) -> None:
    assert plain.get(IDENTITY).status == 404
    info = plain.get("/server_info?config_format=json").json["vllm_config"]
    assert info["parallel_config"]["worker_extension_cls"] == ""
    answer = plain.post("/collective_rpc", {"method": "adaptersync_held"})
    assert (answer.status, answer.error["type"]) == (500, "InternalServerError")
    assert "object has no attribute 'adaptersync_held'" in answer.error["message"]
    assert plain.complete(MODEL, "it lives")


def _running(engine: Engine) -> float:
    """Nothing is said of it before there was one."""
    text = engine.get("/metrics").text
    line = next((line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")), "0")
    return float(line.rsplit(" ", 1)[-1])
