"""What a generation request may hold, what vLLM refuses in it, and what it asks of the engine.

Pure: turns bodies into engine requests. Knows no routes, no answers and no time.
"""

import re
from typing import Any, TypeVar

import msgspec

from adaptersync_tools.simulator.engine import Engine, Request
from adaptersync_tools.simulator.errors import Refused, bad_request, invalid_body
from adaptersync_tools.simulator.tokenizer import Tokenizer

T = TypeVar("T")
_SALT_FORBIDDEN = "@/\\\0"
_MAX_N = 16_384  # VLLM_MAX_N_SEQUENCES, unless somebody set it
_DEFAULT_TOKENS = 16  # what vLLM's /v1/completions generates unless told


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None


class Common(msgspec.Struct, frozen=True, kw_only=True):
    """Fields both generation routes read. Others (top_p, stop, ...) are accepted and change nothing."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    n: int = 1
    seed: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    cache_salt: str | None = None
    ignore_eos: bool | None = False


class CompletionBody(Common, frozen=True, kw_only=True):
    prompt: str | list[int | str | list[int]] | None = None
    logprobs: int | None = None
    echo: bool | None = False


class ChatBody(Common, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A decoded generation request: one engine request for each prompt and choice, in choice order."""

    chat: bool
    id: str
    created: int
    model: str
    stream: bool
    include_usage: bool
    return_token_ids: bool
    logprobs: int | None
    echo: bool
    prompt_logprobs: int | None
    requests: list[Request]
    choices_per_prompt: int


def decode_body(raw: bytes, content_type: str, shape: type[T]) -> T:
    if content_type.split(";")[0].strip() != "application/json":
        raise invalid_body("Unsupported Media Type: Only 'application/json' is allowed")
    try:
        return msgspec.json.decode(raw, type=shape, strict=False)
    except msgspec.ValidationError as error:
        raise _schema_error(error) from error
    except msgspec.DecodeError as error:
        raise invalid_body(f"{{'type': 'json_invalid', 'msg': 'JSON decode error: {error}'}}") from error


def _schema_error(error: msgspec.ValidationError) -> Refused:
    """vLLM's wording for the first field that is missing or of a wrong type."""
    place = re.search(r"at `\$\.?(.*?)`$", str(error))
    field = place[1] if place else ""
    if missing := re.match(r"Object missing required field `(\w+)`", str(error)):
        field = f"{field}.{missing[1]}".lstrip(".")
    param = f"body.{field}".rstrip(".")
    kind = "missing" if missing else "type"
    said = "Field required" if missing else str(error)
    return invalid_body(f"{{'type': '{kind}', 'loc': '{param}', 'msg': {said!r}}}", param)


def completion_call(body: CompletionBody, engine: Engine, tokenizer: Tokenizer, *, call_id: str, created: int) -> Call:
    lora = engine.registry.resolve(body.model)
    prompts = _prompts(body.prompt, tokenizer)
    if body.echo and body.logprobs is not None:
        body = msgspec.structs.replace(body, prompt_logprobs=body.logprobs)
    limit = body.max_tokens if body.max_tokens is not None else _DEFAULT_TOKENS
    return Call(
        chat=False,
        id=call_id,
        created=created,
        model=lora.name if lora else engine.config.model,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        return_token_ids=bool(body.return_token_ids),
        logprobs=body.logprobs,
        echo=bool(body.echo),
        prompt_logprobs=body.prompt_logprobs,
        requests=[request for prompt in prompts for request in _requests(body, prompt, limit, engine)],
        choices_per_prompt=body.n,
    )


def chat_call(body: ChatBody, engine: Engine, tokenizer: Tokenizer, *, call_id: str, created: int) -> Call:
    lora = engine.registry.resolve(body.model)
    prompt = tokenizer.chat(body.messages)
    limit = body.max_completion_tokens or body.max_tokens
    if limit is None:
        limit = max(1, engine.config.max_model_len - len(prompt))
    return Call(
        chat=True,
        id=call_id,
        created=created,
        model=lora.name if lora else engine.config.model,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        return_token_ids=bool(body.return_token_ids),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        echo=False,
        prompt_logprobs=body.prompt_logprobs,
        requests=_requests(body, prompt, limit, engine),
        choices_per_prompt=body.n,
    )


def _prompts(given: str | list[int | str | list[int]] | None, tokenizer: Tokenizer) -> list[list[int]]:
    if given is None or given == "":
        raise bad_request("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if isinstance(given, str):
        return [tokenizer.encode(given)]
    if not given:
        raise bad_request("You must pass at least one prompt")
    if isinstance(given[0], int):
        return [[token for token in given if isinstance(token, int)]]
    return [tokenizer.encode(p) if isinstance(p, str) else p for p in given if not isinstance(p, int)]


def _requests(body: Common, prompt: list[int], limit: int, engine: Engine) -> list[Request]:
    """The engine requests of one prompt, or the refusal vLLM would answer."""
    config = engine.config
    if body.cache_salt == "":
        raise bad_request("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    if body.cache_salt and (len(body.cache_salt) > 128 or set(body.cache_salt) & set(_SALT_FORBIDDEN)):
        raise bad_request(
            "Parameter 'cache_salt' must be at most 128 characters and must not contain '@', '/', '\\\\', or NUL.",
            "cache_salt",
        )
    if body.temperature is not None and body.temperature < 0:
        raise bad_request(f"temperature must be non-negative, got {body.temperature}.", "temperature", body.temperature)
    if body.n < 1:
        raise bad_request(f"n must be at least 1, got {body.n}.")
    if body.n > _MAX_N:
        raise bad_request(
            f"n must be at most {_MAX_N}, got {body.n}. To increase this limit, set the VLLM_MAX_N_SEQUENCES "
            "environment variable."
        )
    if limit < 1:
        raise bad_request(f"max_tokens must be at least 1, got {limit}.", "max_tokens", limit)
    if len(prompt) >= config.max_model_len:
        raise bad_request(
            f"This model's maximum context length is {config.max_model_len} tokens. However, your prompt "
            f"contains {len(prompt)} input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt.",
            "input_tokens",
            len(prompt),
        )
    if limit > config.max_model_len:
        raise bad_request(
            f"max_tokens={limit} cannot be greater than max_model_len={config.max_model_len}. Please request "
            "fewer output tokens.",
            "max_tokens",
            limit,
        )
    if not prompt:
        raise bad_request("The decoder prompt cannot be empty")
    if config.base is not None and (wrong := next((t for t in prompt if t >= config.base.vocab), None)):
        raise bad_request(f"Token id {wrong} is out of vocabulary")
    # Greedy decoding has no seed. Without one sampling would be random; here it is seed 0.
    greedy = body.temperature == 0
    return [
        Request(
            prompt=prompt,
            max_tokens=min(limit, config.max_model_len - len(prompt)),
            lora=engine.registry.resolve(body.model),
            seed=0 if greedy else (body.seed or 0) + index,
            salt=body.cache_salt,
            want_prompt_logprobs=body.prompt_logprobs is not None,
            ignore_eos=bool(body.ignore_eos),
        )
        for index in range(body.n)
    ]
