"""Loading, listing, evicting and unloading adapters: statuses, error types and the openings of messages."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.engines import MAX_CPU_LORAS, MAX_LORAS, MODEL, Engine

Make = Callable[..., Path]
WORKER = "Call to add_lora method failed: Worker failed with error "


def _without(name: str) -> Callable[[Make], Path]:
    def make(adapter: Make) -> Path:
        directory = adapter()
        (directory / name).unlink()
        return directory

    return make


def _with_file(name: str, content: Callable[[bytes], bytes]) -> Callable[[Make], Path]:
    def make(adapter: Make) -> Path:
        directory = adapter()
        (directory / name).write_bytes(content((directory / name).read_bytes()))
        return directory

    return make


def _with_config(**config: Any) -> Callable[[Make], Path]:
    return lambda adapter: adapter(config=config)


WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
REFUSED: dict[str, tuple[Callable[[Make], Path], int, str, str]] = {
    "no directory": (lambda a: a().parent / "absent", 404, "NotFoundError", r"Loading lora \S+ failed: No adapter"),
    "no config": (_without(CONFIG), 404, "NotFoundError", r"Loading lora \S+ failed: No adapter found for "),
    "no weights": (_without(WEIGHTS), 500, "InternalServerError", WORKER + r"'\S+ doesn't contain tensors'"),
    "config cut": (_with_file(CONFIG, lambda b: b[:20]), 500, "InternalServerError", WORKER + r"'.*line \d+ column"),
    "config empty": (_with_file(CONFIG, lambda b: b""), 500, "InternalServerError", WORKER + r"'Expecting value"),
    "weights cut": (
        _with_file(WEIGHTS, lambda b: b[: len(b) // 2]),
        500,
        "InternalServerError",
        WORKER + r"'Error while deserializing header: incomplete metadata, file not fully covered'",
    ),
    "weights too long": (
        _with_file(WEIGHTS, lambda b: b + bytes(8)),
        500,
        "InternalServerError",
        WORKER + r"'Error while deserializing header: incomplete metadata, file not fully covered'",
    ),
    "header cut": (
        _with_file(WEIGHTS, lambda b: b[:100]),
        500,
        "InternalServerError",
        WORKER + r"'Error while deserializing header: invalid header length'",
    ),
    "weights empty": (
        _with_file(WEIGHTS, lambda b: b""),
        500,
        "InternalServerError",
        WORKER + r"'Error while deserializing header: header too small'",
    ),
    "weights zeroed": (
        _with_file(WEIGHTS, lambda b: bytes(len(b))),
        500,
        "InternalServerError",
        WORKER + r"'Error while deserializing header: invalid JSON in header: ",
    ),
    "weights garbage": (
        _with_file(WEIGHTS, lambda b: b"\xff" * len(b)),
        500,
        "InternalServerError",
        WORKER + r"'Error while deserializing header: header too large'",
    ),
    "rank": (lambda a: a(rank=64), 500, "InternalServerError", WORKER + r"'LoRA rank 64 is greater than max_lora_rank"),
    "rank pattern": (
        _with_config(rank_pattern={"q_proj": 64}),
        500,
        "InternalServerError",
        WORKER + r"'LoRA rank 64 is greater than max_lora_rank 32\.'",
    ),
    "rank zero": (_with_config(r=0), 500, "InternalServerError", WORKER + r"'LoRA rank `r` must be a positive integer"),
    "no rank": (_with_config(r=None), 500, "InternalServerError", WORKER + r"'Missing required configuration fields"),
    "DoRA": (_with_config(use_dora=True), 500, "InternalServerError", WORKER + r"'vLLM does not yet support DoRA\.'"),
    "DoRA and rank": (
        lambda a: a(rank=64, config={"use_dora": True}),
        500,
        "InternalServerError",
        WORKER + r"'vLLM does not yet support DoRA\. LoRA rank 64 is greater than max_lora_rank 32\.'",
    ),
    "LoRA bias": (
        _with_config(lora_bias=True),
        500,
        "InternalServerError",
        WORKER + r"'vLLM does not support LoRA bias",
    ),
    "bias": (_with_config(bias="all"), 500, "InternalServerError", WORKER + r"'Adapter bias is not supported\.'"),
    "PiSSA": (
        _with_config(init_lora_weights="pissa"),
        500,
        "InternalServerError",
        WORKER + r"'vLLM does not support init_lora_weights='pissa'\.",
    ),
    "aLoRA": (
        _with_config(alora_invocation_tokens=[1]),
        500,
        "InternalServerError",
        WORKER + r"'vLLM does not support Activated LoRA",
    ),
    "modules to save": (
        _with_config(modules_to_save=["lm_head"]),
        500,
        "InternalServerError",
        WORKER + r"'vLLM only supports modules_to_save being either None",
    ),
    "unknown module": (
        lambda a: a(targets=["q_proj", "foo_proj"]),
        500,
        "InternalServerError",
        WORKER
        + r"'While loading \S+ expected target modules in \{.*\} but received \['model.layers.0.self_attn.foo_proj'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_adapter_is_refused(engine: Engine, adapter: Make, case: str) -> None:
    make, status, kind, opening = REFUSED[case]
    before = engine.resident()
    name = engine.fresh("bad")
    answer = engine.load(name, make(adapter))
    assert (answer.status, answer.error["type"], answer.error["code"]) == (status, kind, status)
    assert re.match(opening, answer.error["message"]), answer.error["message"]
    assert name not in engine.listed()
    assert engine.resident() == before


OVERSIZED: dict[str, tuple[dict[str, Any], str]] = {
    "hidden": ({"hidden": 256}, r"\(128\) must match the size of tensor b \(256\) at non-singleton dimension 1"),
    "intermediate": (
        {"intermediate": 512, "targets": ["gate_proj", "down_proj"]},
        r"\(256\) must match the size of tensor b \(512\) at non-singleton dimension 0",
    ),
    "rank beyond its config": (
        {"rank": 64, "config": {"r": 8}},
        r"\(32\) must match the size of tensor b \(64\) at non-singleton dimension 0",
    ),
}


@pytest.mark.parametrize("case", OVERSIZED)
def test_oversized_adapter_fails_but_stays_resident(engine: Engine, adapter: Make, case: str) -> None:
    how, numbers = OVERSIZED[case]
    before = engine.resident()
    name = engine.fresh("big")
    answer = engine.load(name, adapter(**how))
    assert answer.status == 500
    assert re.match(WORKER + r"'The size of tensor a " + numbers, answer.error["message"]), answer.text
    assert name not in engine.listed()
    (left,) = engine.resident() - before
    assert engine.post("/collective_rpc", {"method": "remove_lora", "args": [left]}).json == {"results": ["True"]}


@pytest.mark.parametrize(
    "how", [{"hidden": 64}, {"layers": 4}, {"rank": 16, "config": {"r": 8}}], ids=["smaller", "more layers", "rank"]
)
def test_some_wrong_adapters_load(engine: Engine, loaded: Callable[..., str], how: dict[str, Any]) -> None:
    assert loaded(**how) in engine.listed()


BODIES: dict[str, tuple[bytes, dict[str, str], str]] = {
    "no path": (b'{"lora_name": "x"}', {}, "body.lora_path"),
    "no name": (b'{"lora_path": "/x"}', {}, "body.lora_name"),
    "name not a string": (b'{"lora_name": 3, "lora_path": "/x"}', {}, "body.lora_name"),
    "not JSON": (b"{bad", {}, ""),
    "not an object": (b"[]", {}, ""),
    "content type": (b'{"lora_name": "x", "lora_path": "/x"}', {"Content-Type": "text/plain"}, ""),
}


@pytest.mark.parametrize("case", BODIES)
def test_malformed_load_is_a_400(engine: Engine, case: str) -> None:
    raw, headers, param = BODIES[case]
    answer = engine.call("POST", "/v1/load_lora_adapter", raw=raw, headers=headers)
    assert (answer.status, answer.error["type"], answer.error["code"]) == (400, "Bad Request", 400)
    assert answer.error["message"].startswith("1 validation error:")
    if param:
        assert answer.error["param"] == param


@pytest.mark.parametrize(("name", "path"), [("", "/x"), ("x", ""), ("", "")])
def test_empty_name_or_path(engine: Engine, name: str, path: str) -> None:
    answer = engine.load(name, path)
    assert (answer.status, answer.error["type"]) == (400, "InvalidUserInput")
    assert answer.error["message"] == "Both 'lora_name' and 'lora_path' must be provided."


def test_the_base_name_is_taken(engine: Engine, adapter: Make) -> None:
    answer = engine.load(MODEL, adapter())
    assert (answer.status, answer.error["type"]) == (400, "InvalidUserInput")
    assert answer.error["message"] == f"The lora adapter '{MODEL}' conflicts with a served base model."


def test_a_load_answers_text_and_is_listed_with_the_path_as_sent(engine: Engine, adapter: Make) -> None:
    name, path = engine.fresh("ok"), f"{adapter()}/."
    answer = engine.load(name, path)
    assert (answer.status, answer.text) == (200, f"Success: LoRA adapter '{name}' added successfully.")
    models = engine.get("/v1/models").json["data"]
    assert (models[0]["id"], models[0]["parent"], models[0]["max_model_len"]) == (MODEL, None, 512)
    assert models[0]["root"] == str(engine.model_directory)
    card = next(model for model in models if model["id"] == name)
    assert (card["root"], card["parent"], card["max_model_len"]) == (path, MODEL, None)
    assert card.keys() == models[0].keys()
    engine.unload(name)


def test_a_second_load_is_refused_and_changes_nothing(engine: Engine, adapter: Make) -> None:
    name, path = engine.fresh("twice"), adapter()
    assert engine.load(name, path).status == 200
    before = engine.resident()
    for again in (path, adapter(), path.parent / "absent"):
        answer = engine.load(name, again)
        assert (answer.status, answer.error["type"]) == (400, "InvalidUserInput")
        assert answer.error["message"].startswith(f"The lora adapter '{name}' has already been loaded.")
    assert engine.listed()[name] == str(path)
    assert engine.resident() == before
    engine.unload(name)


def test_ids_count_every_attempt_of_an_unregistered_name(engine: Engine, adapter: Make) -> None:
    def new_id(name: str) -> int:
        before = engine.resident()
        assert engine.load(name, adapter()).status == 200
        (added,) = engine.resident() - before
        return added

    first = new_id(engine.fresh("id"))
    assert new_id(engine.fresh("id")) == first + 1
    engine.load(engine.fresh("id"), adapter().parent / "absent")  # fails: an id all the same
    assert engine.post("/v1/completions", {"model": "nobody", "prompt": "x"}).status == 404  # and so does this
    assert new_id(engine.fresh("id")) == first + 4
    for name in engine.listed():
        engine.unload(name)


def test_eviction_is_silent(engine: Engine, adapter: Make, prompt: Callable[[int], list[int]]) -> None:
    tokens = prompt(20)
    names = [engine.fresh("many") for _ in range(MAX_CPU_LORAS + 2)]
    assert engine.load(names[0], adapter()).status == 200
    (first_id,) = [max(engine.resident())]
    before = engine.complete(names[0], tokens, logprobs=0)["choices"][0]["logprobs"]
    for name in names[1:]:
        assert engine.load(name, adapter()).status == 200
    assert set(names) <= set(engine.listed())
    assert len(engine.resident()) == MAX_CPU_LORAS
    assert first_id not in engine.resident()
    # The next request for it reads its files again, and evicts another one.
    after = engine.complete(names[0], tokens, logprobs=0, cache_salt="again")["choices"][0]["logprobs"]
    assert after["token_logprobs"] == pytest.approx(before["token_logprobs"], abs=1e-4)
    assert first_id in engine.resident()
    assert len(engine.resident()) == MAX_CPU_LORAS
    for name in names:
        engine.unload(name)


def test_deleted_files_do_no_harm_while_resident(engine: Engine, adapter: Make) -> None:
    name, path = engine.fresh("deleted"), adapter()
    engine.load(name, path)
    shutil.rmtree(path)
    engine.complete(name, "hello")
    engine.unload(name)


def test_unload_forgets_the_name_and_frees_nothing(engine: Engine, adapter: Make) -> None:
    name, path = engine.fresh("gone"), adapter()
    engine.load(name, path)
    resident = engine.resident()
    answer = engine.unload(name)
    assert (answer.status, answer.text) == (200, f"Success: LoRA adapter '{name}' removed successfully.")
    assert name not in engine.listed()
    assert engine.resident() == resident
    assert engine.post("/v1/completions", {"model": name, "prompt": "x"}).status == 404
    again = engine.unload(name)
    assert (again.status, again.error["type"]) == (404, "NotFoundError")
    assert again.error["message"] == f"The lora adapter '{name}' cannot be found."
    # The same name again gets a new id, so that both copies take up room.
    assert engine.load(name, path).status == 200
    assert max(engine.resident()) > max(resident)
    assert max(resident) in engine.resident()
    engine.unload(name)


def test_unload_without_a_name(engine: Engine) -> None:
    answer = engine.unload("")
    assert (answer.status, answer.error["type"]) == (400, "InvalidUserInput")
    missing = engine.post("/v1/unload_lora_adapter", {})
    assert (missing.status, missing.error["type"], missing.error["param"]) == (400, "Bad Request", "body.lora_name")


def test_remove_and_pin_by_id(engine: Engine, adapter: Make) -> None:
    name = engine.fresh("removed")
    engine.load(name, adapter())
    int_id = max(engine.resident())

    def rpc(method: str) -> Any:
        return engine.post("/collective_rpc", {"method": method, "args": [int_id]})

    assert rpc("pin_lora").json == {"results": ["True"]}
    assert rpc("remove_lora").json == {"results": ["True"]}
    assert int_id not in engine.resident()
    assert rpc("remove_lora").json == {"results": ["False"]}
    failed = rpc("pin_lora")
    assert (failed.status, failed.error["type"]) == (500, "InternalServerError")
    assert failed.error["message"].startswith(
        f"Call to collective_rpc method failed: Worker failed with error 'Pinning failed. LoRA {int_id} is not"
    )
    assert name in engine.listed()
    engine.unload(name)


def test_a_cache_of_pinned_adapters_takes_no_other(engine: Engine, adapter: Make) -> None:
    pinned = []
    for _ in range(MAX_LORAS):
        before = engine.resident()
        assert engine.load(engine.fresh("pinned"), adapter()).status == 200
        pinned += [*(engine.resident() - before)]
        engine.post("/collective_rpc", {"method": "pin_lora", "args": pinned[-1:]})
    before = engine.resident()
    answer = engine.load(engine.fresh("unlucky"), adapter())
    assert answer.status == 500
    assert answer.error["message"].startswith(WORKER + "'All items are pinned, cannot remove oldest from the cache.'")
    # It did not find a device slot, but it is registered.
    pinned += [*(engine.resident() - before)]
    assert len(pinned) == MAX_LORAS + 1
    for int_id in pinned:
        engine.post("/collective_rpc", {"method": "remove_lora", "args": [int_id]})
    for name in engine.listed():
        engine.unload(name)


def test_the_other_door(engine: Engine, adapter: Make) -> None:
    """SageMaker's routes do the same, under other names."""
    name, path = engine.fresh("side"), adapter()
    answer = engine.post("/adapters", {"name": name, "src": str(path)})
    assert (answer.status, answer.text) == (200, f"Adapter {name} registered")
    assert engine.listed()[name] == str(path)
    assert engine.post("/adapters", {"name": name, "src": str(path)}).status == 400
    assert engine.post("/adapters", {"name": name}).status == 400
    removed = engine.call("DELETE", f"/adapters/{name}")
    assert (removed.status, removed.text) == (200, f"Adapter {name} unregistered")
    assert engine.call("DELETE", f"/adapters/{name}").status == 404


def test_errors_hide_paths(engine: Engine, adapter: Make) -> None:
    message = engine.load(engine.fresh("hidden"), adapter().parent / "absent").error["message"]
    assert message.endswith("No adapter found for <path>")


def test_the_config_is_what_vllm_reads_not_the_names_peft_adds(engine: Engine, loaded: Callable[..., str]) -> None:
    """Unknown fields are ignored, and alpha counts: twice the alpha moves the output twice as far or so."""
    base = _logprob(engine, MODEL)
    small = _logprob(engine, loaded(seed=7, scale=0.05, config={"lora_alpha": 1, "novel_field": {"x": 1}}))
    large = _logprob(engine, loaded(seed=7, scale=0.05, config={"lora_alpha": 64}))
    assert 0 < abs(small - base) < abs(large - base)


def _logprob(engine: Engine, model: str) -> float:
    answer = engine.complete(model, "The quick brown fox", prompt_logprobs=0)
    scored = answer["choices"][0]["prompt_logprobs"][1:]
    return float(sum(next(iter(entry.values()))["logprob"] for entry in scored))


def test_error_bodies_are_json(engine: Engine) -> None:
    answer = engine.unload("never loaded")
    assert answer.headers["content-type"].startswith("application/json")
    assert json.loads(answer.raw).keys() == {"error"}
    assert answer.error.keys() == {"message", "type", "param", "code"}
