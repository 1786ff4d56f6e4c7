"""Everything around generation: health, versions, pauses, metrics and what the server says about itself."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.engines import BLOCK_SIZE, MAX_CPU_LORAS, MAX_LORA_RANK, MAX_LORAS, MAX_MODEL_LEN, MODEL, Engine
from support.wait import wait_until_sync

Prompt = Callable[[int], list[int]]


def _metrics(engine: Engine) -> dict[str, float]:
    """Each series of /metrics, by its text up to the value."""
    series = {}
    for line in engine.get("/metrics").text.splitlines():
        if line and not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            series[name] = float(value)
    return series


def test_health(engine: Engine) -> None:
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        answer = engine.call(method, path)
        assert (answer.status, answer.raw) == (200, b"")


def test_version(engine: Engine) -> None:
    assert engine.get("/version").json == {"version": "0.32.0"}
    assert engine.get("/load").json == {"server_load": 0}


def test_unknown_routes_and_methods(engine: Engine) -> None:
    missing = engine.get("/nowhere")
    assert (missing.status, missing.json) == (404, {"detail": "Not Found"})
    wrong = engine.get("/v1/load_lora_adapter")
    assert (wrong.status, wrong.json) == (405, {"detail": "Method Not Allowed"})


def test_pause_and_resume(engine: Engine) -> None:
    assert engine.get("/is_paused").json == {"is_paused": False}
    bad = engine.post("/pause?mode=gently")
    assert (bad.status, bad.error["type"], bad.error["param"]) == (400, "Bad Request", "query.mode")
    for mode in ("keep", "wait", "abort"):
        assert engine.post(f"/pause?mode={mode}&clear_cache=false").json == {"status": "paused"}
        assert engine.get("/is_paused").json == {"is_paused": True}
        assert engine.post("/resume").json == {"status": "resumed"}
        assert engine.get("/is_paused").json == {"is_paused": False}
    assert engine.post("/resume").json == {"status": "resumed"}


def test_a_load_works_while_paused_and_requests_wait(engine: Engine, adapter: Callable[..., Path]) -> None:
    name = engine.fresh("paused")
    engine.post("/pause?mode=keep&clear_cache=false")
    assert engine.load(name, adapter()).status == 200
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(engine.complete, name, "hello")
        assert engine.get("/is_paused").json == {"is_paused": True}
        assert not waiting.done()
        engine.post("/resume")
        assert waiting.result(30)["model"] == name
    engine.unload(name)


def test_a_pause_clears_the_cache_unless_told_not_to(engine: Engine, prompt: Prompt) -> None:
    def cached(tokens: list[int]) -> int:
        usage = engine.complete(MODEL, tokens)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    tokens = prompt(40)
    for query, hit in (("mode=keep&clear_cache=false", 32), ("mode=keep", 0), ("mode=abort", 0), ("mode=wait", 0)):
        cached(tokens)
        engine.post(f"/pause?{query}")
        engine.post("/resume")
        assert cached(tokens) == hit, query


def test_metrics_have_their_names(engine: Engine) -> None:
    series = _metrics(engine)
    labels = f'{{engine="0",model_name="{MODEL}"}}'
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:prompt_tokens_total",
        "vllm:prompt_tokens_cached_total",
        "vllm:generation_tokens_total",
        "vllm:request_prefill_time_seconds_sum",
        "vllm:request_prefill_kv_computed_tokens_count",
        "vllm:request_prefill_kv_computed_tokens_sum",
    ):
        assert name + labels in series
    for reason in ("capacity", "deferred"):
        assert f'vllm:num_requests_waiting_by_reason{labels[:-1]},reason="{reason}"}}' in series
    for reason in ("stop", "length", "abort", "error", "repetition"):
        assert f'vllm:request_success_total{{engine="0",finished_reason="{reason}",model_name="{MODEL}"}}' in series
    assert series["process_start_time_seconds"] > 1.7e9
    (cache,) = [name for name in series if name.startswith("vllm:cache_config_info{")]
    assert f'block_size="{BLOCK_SIZE}"' in cache
    assert re.search(r'num_gpu_blocks="\d+"', cache)


def test_metrics_count_tokens(engine: Engine, prompt: Prompt) -> None:
    tokens = prompt(70)
    names = {
        f'vllm:{name}_total{{engine="0",model_name="{MODEL}"}}': grown
        for name, grown in {
            "prefix_cache_queries": 210,
            "prefix_cache_hits": 128,
            "prompt_tokens": 280,
            "prompt_tokens_cached": 128,
            "generation_tokens": 12,
        }.items()
    }
    labels = f'{{engine="0",model_name="{MODEL}"}}'
    for name, each in (("count", 4), ("sum", 152)):
        names[f"vllm:request_prefill_kv_computed_tokens_{name}{labels}"] = each
    for phase in ("queue", "prefill", "decode"):
        names[f"vllm:request_{phase}_time_seconds_count{labels}"] = 4
    for source, each in (("local_compute", 152), ("local_cache_hit", 128)):
        names[f'vllm:prompt_tokens_by_source_total{labels[:-1]},source="{source}"}}'] = each
    names[f'vllm:request_success_total{{engine="0",finished_reason="length",model_name="{MODEL}"}}'] = 4
    before = _metrics(engine)
    for _ in range(3):
        engine.complete(MODEL, tokens, max_tokens=3, ignore_eos=True)
    engine.complete(MODEL, tokens, max_tokens=3, ignore_eos=True, prompt_logprobs=0)  # does not look up

    def grown() -> dict[str, float]:
        after = _metrics(engine)
        return {name: after[name] - before[name] for name in names}

    wait_until_sync(lambda: grown() == names, what=f"{names}, at last {grown()}")
    for phase in ("queue", "prefill", "decode"):
        took = f"vllm:request_{phase}_time_seconds_sum{labels}"
        assert _metrics(engine)[took] >= before[took]


def test_the_server_describes_itself(engine: Engine) -> None:
    info = engine.get("/server_info?config_format=json").json
    assert info.keys() == {"vllm_config", "vllm_env", "system_env"}
    config = info["vllm_config"]
    assert config["model_config"]["max_model_len"] == MAX_MODEL_LEN
    assert config["cache_config"]["block_size"] == BLOCK_SIZE
    assert config["parallel_config"]["data_parallel_size"] == 1
    lora = config["lora_config"]
    assert (lora["max_loras"], lora["max_cpu_loras"], lora["max_lora_rank"]) == (
        MAX_LORAS,
        MAX_CPU_LORAS,
        MAX_LORA_RANK,
    )
    assert isinstance(engine.get("/server_info").json["vllm_config"], str)


def test_kv_event_sources(engine: Engine) -> None:
    sources = engine.get("/kv_event_sources").json
    assert sources == {
        "0": {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": engine.kv_endpoint,
            "replay_endpoint": engine.replay_endpoint,
            "buffer_steps": 10_000,
            "hwm": 100_000,
            "max_queue_size": 100_000,
            "topic": "",
        }
    }


def test_rpc_without_a_method(engine: Engine) -> None:
    answer = engine.post("/collective_rpc", {})
    assert (answer.status, answer.error["type"]) == (400, "Bad Request")
    assert answer.error["message"] == "Missing 'method' in request body"


def test_abort(engine: Engine) -> None:
    assert engine.post("/abort_requests", {"request_ids": ["no such"]}).json == {"status": "aborted", "aborted": 1}


def test_a_frozen_engine_looks_healthy(engine: Engine, adapter: Callable[..., Path], prompt: Prompt) -> None:
    """A client that gives up on a load has not stopped it; a call that reaches the engine is the only probe."""
    name, path = engine.fresh("thawed"), adapter()
    stream = {"prompt": prompt(20), "max_tokens": 400, "ignore_eos": True, "stream": True}
    engine.freeze(True)
    try:
        for route in ("/health", "/ping", "/v1/models", "/metrics", "/version"):
            assert engine.get(route).status == 200
        with ThreadPoolExecutor(2) as pool:
            probe = pool.submit(engine.get, "/is_paused")
            request = pool.submit(engine.post, "/v1/completions", stream)
            with pytest.raises(TimeoutError):
                engine.call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)}, timeout_s=0.5)
            assert name not in engine.listed()
            assert not probe.done()
            assert not request.done()
            engine.freeze(False)
            assert probe.result(30).json == {"is_paused": False}
            assert request.result(30).events[-1]["choices"][0]["finish_reason"] == "length"
        wait_until_sync(lambda: name in engine.listed())
    finally:
        engine.freeze(False)
    engine.unload(name)
