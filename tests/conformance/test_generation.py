"""Completions, chat and tokenisation: shapes of answers and streams, refusals, and what the answers depend on."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from support.engines import MAX_MODEL_LEN, MODEL, Answer, Engine

Prompt = Callable[[int], list[int]]
Load = Callable[..., str]

COMPLETION_KEYS = {
    "id",
    "object",
    "created",
    "model",
    "choices",
    "service_tier",
    "system_fingerprint",
    "usage",
    "kv_transfer_params",
    "ec_transfer_params",
    "metrics",
}
CHOICE_KEYS = {
    "index",
    "text",
    "logprobs",
    "finish_reason",
    "stop_reason",
    "token_ids",
    "prompt_logprobs",
    "prompt_token_ids",
    "routed_experts",
}
CHUNK_KEYS = {"id", "object", "created", "model", "choices"}
HELLO = [{"role": "user", "content": "Hello, how are you today?"}]
HELLO_TEXT = "<user>Hello, how are you today?\n<assistant>"


def _stream(engine: Engine, path: str, body: dict[str, Any]) -> Answer:
    answer = engine.post(path, body | {"stream": True})
    assert answer.status == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    return answer


def test_a_rollout_as_trl_asks_for_it(engine: Engine, loaded: Load, prompt: Prompt) -> None:
    name, tokens = loaded(), prompt(40)
    answer = engine.post(
        "/v1/completions",
        {
            "model": name,
            "prompt": tokens,
            "max_tokens": 6,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "repetition_penalty": 1.0,
            "n": 1,
            "return_token_ids": True,
            "logprobs": 0,
            "seed": 2**62 + 1,
        },
    )
    assert answer.status == 200, answer.text
    body = answer.json
    assert body.keys() == COMPLETION_KEYS
    assert (body["object"], body["model"]) == ("text_completion", name)
    (choice,) = body["choices"]
    assert choice.keys() == CHOICE_KEYS
    said = choice["token_ids"]
    assert all(isinstance(token, int) for token in said)
    assert choice["prompt_token_ids"] == tokens
    assert choice["finish_reason"] in ("length", "stop")
    assert (len(said) == 6) or choice["finish_reason"] == "stop"
    logprobs = choice["logprobs"]
    assert logprobs.keys() == {"text_offset", "token_logprobs", "tokens", "top_logprobs"}
    assert all(len(values) == len(said) for values in logprobs.values())
    assert all(value < 0 for value in logprobs["token_logprobs"])
    for token, value, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert top == {token: value}
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (40, len(said))
    assert usage["total_tokens"] == 40 + len(said)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_without_asking_there_are_no_ids_and_no_logprobs(engine: Engine) -> None:
    (choice,) = engine.complete(MODEL, "hello")["choices"]
    assert choice.keys() == CHOICE_KEYS
    for name in ("logprobs", "token_ids", "prompt_token_ids", "prompt_logprobs", "stop_reason"):
        assert choice[name] is None


def test_greedy_answers_repeat_and_adapters_differ(engine: Engine, loaded: Load, prompt: Prompt) -> None:
    one, other, tokens = loaded(seed=1), loaded(seed=2), prompt(30)

    def said(model: str) -> tuple[list[int], list[float]]:
        choice = engine.complete(model, tokens, max_tokens=8, logprobs=0, return_token_ids=True)["choices"][0]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    first = said(one)
    assert said(one)[0] == first[0]
    assert said(one)[1] == pytest.approx(first[1], abs=1e-4)
    assert len({tuple(said(model)[0]) for model in (one, other, MODEL)}) == 3


def test_a_zero_adapter_serves_the_base(engine: Engine, loaded: Load, prompt: Prompt) -> None:
    zero, tokens = loaded(scale=0.0), prompt(30)
    answers = [
        engine.complete(model, tokens, max_tokens=8, logprobs=0, return_token_ids=True)["choices"][0]
        for model in (zero, MODEL)
    ]
    assert answers[0]["token_ids"] == answers[1]["token_ids"]
    assert answers[0]["logprobs"]["token_logprobs"] == pytest.approx(answers[1]["logprobs"]["token_logprobs"], abs=1e-4)


def test_a_seed_makes_sampling_repeatable(engine: Engine, prompt: Prompt) -> None:
    tokens = prompt(30)

    def said(seed: int) -> str:
        answer = engine.complete(MODEL, tokens, max_tokens=16, temperature=1, seed=seed)
        return str(answer["choices"][0]["text"])

    assert said(1) == said(1)
    assert said(1) != said(2)


def test_batches_and_choices_come_in_order(engine: Engine, prompt: Prompt) -> None:
    one, other = prompt(40), prompt(50)
    body = engine.complete(MODEL, [one, other], n=2, temperature=1, seed=3, max_tokens=2, return_token_ids=True)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == [one, one, other, other]
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (90, 8, 98)
    texts = engine.complete(MODEL, ["ab", "cde"], max_tokens=1)
    assert texts["usage"]["prompt_tokens"] == 5


def test_text_prompts_are_their_tokens(engine: Engine, prompt: Prompt) -> None:
    tokens = prompt(20)
    text = bytes(tokens).decode()
    assert (
        engine.complete(MODEL, text, max_tokens=4)["choices"][0]["text"]
        == engine.complete(MODEL, tokens, max_tokens=4)["choices"][0]["text"]
    )


def test_no_model_means_the_base(engine: Engine) -> None:
    answer = engine.post("/v1/completions", {"prompt": "hello", "max_tokens": 1})
    assert answer.json["model"] == MODEL


def test_sixteen_tokens_unless_told(engine: Engine) -> None:
    answer = engine.post("/v1/completions", {"prompt": "hello", "temperature": 0, "ignore_eos": True})
    assert answer.json["usage"]["completion_tokens"] == 16


def test_an_answer_ends_at_the_model_length(engine: Engine, prompt: Prompt) -> None:
    answer = engine.post("/v1/completions", {"prompt": prompt(MAX_MODEL_LEN - 3), "max_tokens": 3, "ignore_eos": True})
    assert answer.json["usage"]["completion_tokens"] == 3


def test_prompt_logprobs(engine: Engine, loaded: Load, prompt: Prompt) -> None:
    name, tokens = loaded(), prompt(12)
    scored = engine.complete(name, tokens, prompt_logprobs=0)["choices"][0]["prompt_logprobs"]
    assert scored[0] is None
    assert len(scored) == 12
    for token, entry in zip(tokens[1:], scored[1:], strict=True):
        value = entry[str(token)]
        assert value.keys() == {"logprob", "rank", "decoded_token"}
        assert value["logprob"] < 0
        assert value["decoded_token"] == chr(token)


def test_echo_repeats_the_prompt_with_its_logprobs(engine: Engine) -> None:
    (choice,) = engine.complete(MODEL, "hello", max_tokens=2, echo=True, logprobs=0)["choices"]
    assert choice["text"].startswith("hello")
    assert choice["logprobs"]["tokens"][:5] == list("hello")
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert len(choice["logprobs"]["token_logprobs"]) == 7


def test_a_stream_of_text(engine: Engine, loaded: Load, prompt: Prompt) -> None:
    name, tokens = loaded(), prompt(20)
    body = {"model": name, "prompt": tokens, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    whole = engine.post("/v1/completions", body | {"return_token_ids": True, "logprobs": 0}).json["choices"][0]
    chunks = _stream(engine, "/v1/completions", body | {"return_token_ids": True, "logprobs": 0}).events
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk.keys() == CHUNK_KEYS for chunk in chunks[:-1])
    assert chunks[-1].keys() == CHUNK_KEYS | {"system_fingerprint"}
    choices = [chunk["choices"][0] for chunk in chunks]
    keys = {"index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids"}
    assert all(choice.keys() == keys for choice in choices)
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert [choice["prompt_token_ids"] for choice in choices] == [tokens] + [None] * (len(choices) - 1)
    assert [token for choice in choices for token in choice["token_ids"]] == whole["token_ids"]
    assert "".join(choice["text"] for choice in choices) == whole["text"]


def test_a_stream_tells_its_usage_last(engine: Engine, prompt: Prompt) -> None:
    body = {"prompt": prompt(20), "max_tokens": 2, "ignore_eos": True, "stream_options": {"include_usage": True}}
    chunks = _stream(engine, "/v1/completions", body).events
    assert chunks[-1].keys() == CHUNK_KEYS | {"usage", "system_fingerprint"}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 20,
        "total_tokens": 22,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert all(chunk.keys() == CHUNK_KEYS for chunk in chunks[:-1])


def test_chat(engine: Engine, loaded: Load) -> None:
    name = loaded()
    answer = engine.post(
        "/v1/chat/completions",
        {"model": name, "messages": HELLO, "max_tokens": 3, "ignore_eos": True, "return_token_ids": True},
    )
    assert answer.status == 200, answer.text
    body = answer.json
    assert body.keys() == COMPLETION_KEYS | {"prompt_logprobs", "prompt_token_ids", "prompt_text"}
    assert (body["object"], body["model"]) == ("chat.completion", name)
    assert body["prompt_token_ids"] == list(HELLO_TEXT.encode())
    (choice,) = body["choices"]
    assert choice.keys() == CHOICE_KEYS - {"text", "prompt_logprobs", "prompt_token_ids"} | {"message"}
    assert choice["message"]["role"] == "assistant"
    assert isinstance(choice["message"]["content"], str)
    assert len(choice["token_ids"]) == 3
    details = body["usage"]["prompt_tokens_details"]
    assert (details["cached_tokens"], details["created_cache_tokens"]) == (0, 32)


def test_chat_logprobs(engine: Engine) -> None:
    body = {"messages": HELLO, "max_tokens": 2, "temperature": 0, "logprobs": True, "ignore_eos": True}
    (choice,) = engine.post("/v1/chat/completions", body).json["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == 2
    assert all(entry.keys() == {"token", "logprob", "bytes", "top_logprobs"} for entry in content)
    assert all(entry["logprob"] < 0 and entry["top_logprobs"] == [] for entry in content)


def test_a_stream_of_chat(engine: Engine) -> None:
    body = {"messages": HELLO, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    chunks = _stream(engine, "/v1/chat/completions", body).events
    first, *rest = chunks
    assert first.keys() == CHUNK_KEYS | {"prompt_token_ids", "prompt_text"}
    assert first["prompt_token_ids"] == list(HELLO_TEXT.encode())
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk["choices"][0] for chunk in rest]
    assert all(choice["delta"].keys() == {"content"} for choice in deltas)
    assert sum(len(choice["token_ids"]) for choice in deltas) == 2
    assert deltas[-1]["finish_reason"] == "length"
    assert deltas[-1].keys() == {"index", "delta", "logprobs", "finish_reason", "stop_reason", "token_ids"}
    assert all(choice.keys() == deltas[-1].keys() - {"stop_reason"} for choice in deltas[:-1])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_an_unknown_model_is_a_404(engine: Engine, path: str) -> None:
    answer = engine.post(
        path,
        {"model": "nobody", "prompt": "x", "messages": HELLO} if "chat" in path else {"model": "nobody", "prompt": "x"},
    )
    assert (answer.status, answer.error["type"], answer.error["param"]) == (404, "NotFoundError", "model")
    assert answer.error["message"] == f"The model `nobody` does not exist. Valid aliases: {MODEL}."


REFUSED: dict[str, tuple[dict[str, Any], str, str | None, str]] = {
    "no prompt": ({"prompt": None}, "BadRequestError", "prompt", r"Either prompt or prompt_embeds must be provided"),
    "empty text": ({"prompt": ""}, "BadRequestError", "prompt", r"Either prompt or prompt_embeds must be provided"),
    "no prompts": ({"prompt": []}, "BadRequestError", None, r"You must pass at least one prompt"),
    "no tokens": ({"max_tokens": 0}, "BadRequestError", "max_tokens", r"max_tokens must be at least 1, got 0"),
    "too many": ({"max_tokens": 5000}, "BadRequestError", "max_tokens", r"max_tokens=5000 cannot be greater than"),
    "long prompt": (
        {"prompt": [65] * 640},
        "BadRequestError",
        "input_tokens",
        r"This model's maximum context length is 512 tokens\. However, your prompt contains 640 input tokens",
    ),
    "out of vocabulary": ({"prompt": [5000]}, "BadRequestError", None, r"Token id 5000 is out of vocabulary"),
    "too many choices": ({"n": 16385}, "BadRequestError", None, r"n must be at most 16384, got 16385\."),
    "no choices": ({"n": 0}, "BadRequestError", None, r"n must be at least 1, got 0\."),
    "empty salt": ({"cache_salt": ""}, "BadRequestError", "cache_salt", r"Parameter 'cache_salt' must be a non-empty"),
    "salt with a slash": ({"cache_salt": "a/b"}, "BadRequestError", "cache_salt", r"Parameter 'cache_salt' must be at"),
    "negative temperature": ({"temperature": -1}, "BadRequestError", "temperature", r"temperature must be non-neg"),
    "wrong type": ({"max_tokens": "x"}, "Bad Request", "body.max_tokens", r"1 validation error"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_request_is_a_400(engine: Engine, case: str) -> None:
    fields, kind, param, opening = REFUSED[case]
    answer = engine.post("/v1/completions", {"prompt": "hello", "max_tokens": 1} | fields)
    assert (answer.status, answer.error["type"], answer.error["param"]) == (400, kind, param), answer.text
    assert re.match(opening, answer.error["message"]), answer.error["message"]


def test_the_request_id_is_in_the_answer_but_not_in_the_headers(engine: Engine) -> None:
    answer = engine.call(
        "POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}, headers={"X-Request-Id": "mine-1"}
    )
    assert answer.json["id"] == "cmpl-mine-1"
    assert "x-request-id" not in answer.headers


def test_tokenize(engine: Engine, loaded: Load) -> None:
    text = "Grüße, 🙂\n"
    answer = engine.post("/tokenize", {"model": loaded(), "prompt": text})
    tokens = list(text.encode())
    expected = {"count": len(tokens), "max_model_len": MAX_MODEL_LEN, "tokens": tokens, "token_strs": None}
    assert answer.json == expected
    assert engine.post("/tokenize", {"prompt": text}).json == expected
    chat = engine.post("/tokenize", {"model": MODEL, "messages": HELLO}).json
    assert chat["tokens"] == list(HELLO_TEXT.encode())
    strings = engine.post("/tokenize", {"prompt": "ab", "return_token_strs": True}).json["token_strs"]
    assert strings == ["a", "b"]
    neither = engine.post("/tokenize", {"model": MODEL})
    assert (neither.status, neither.error["type"]) == (400, "Bad Request")
