"""What vLLM's answers look like: whole bodies, stream chunks, usage, log-probabilities, model cards.

Pure: turns what the engine said into JSON-ready dictionaries. Fields that vLLM always sends as null are sent.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from adaptersync_tools.simulator.engine import Running
from adaptersync_tools.simulator.requests import Call
from adaptersync_tools.simulator.tokenizer import Tokenizer

FINGERPRINT = "vllm-0.32.0-simulated"


def answer(
    call: Call, runs: Sequence[Running], said: Sequence[int], reasons: Sequence[str], tokenizer: Tokenizer
) -> dict[str, Any]:
    """The whole body of a call that is not streamed; `said[i]` tokens of choice i count."""
    choices = [
        _choice(call, index, run, count, reason, tokenizer)
        for index, (run, count, reason) in enumerate(zip(runs, said, reasons, strict=True))
    ]
    body: dict[str, Any] = {
        "id": call.id,
        "object": "chat.completion" if call.chat else "text_completion",
        "created": call.created,
        "model": call.model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": usage(call, runs, said, detailed=True),
    }
    if call.chat:
        body |= {
            "prompt_logprobs": _prompt_logprobs(call, runs[0], tokenizer),
            "prompt_token_ids": runs[0].request.prompt if call.return_token_ids else None,
            "prompt_text": None,
        }
    return body | {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}


def usage(call: Call, runs: Sequence[Running], said: Sequence[int], *, detailed: bool) -> dict[str, Any]:
    """Token counts; a prompt counts once however many choices it has, and only the last one's hits count."""
    prompts = runs[:: call.choices_per_prompt]
    prompt_tokens = sum(len(run.request.prompt) for run in prompts)
    block_size = runs[-1].table.block_size
    cached = prompts[-1].table.hit_blocks * block_size
    created = prompts[-1].table.prompt_blocks * block_size - cached if call.chat else None
    details: dict[str, Any] = {"cached_tokens": cached}
    if detailed or created is not None:
        details["created_cache_tokens"] = created
    if detailed:
        details["multimodal_tokens"] = None
    counts: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + sum(said),
        "completion_tokens": sum(said),
        "prompt_tokens_details": details,
    }
    return counts | {"completion_tokens_details": None} if detailed else counts


def _choice(call: Call, index: int, run: Running, said: int, reason: str, tokenizer: Tokenizer) -> dict[str, Any]:
    tokens = run.spoken.tokens[:said]
    choice: dict[str, Any] = {"index": index}
    if call.chat:
        choice["message"] = {
            "role": "assistant",
            "content": tokenizer.decode(tokens),
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        }
    else:
        choice["text"] = tokenizer.decode(run.request.prompt + tokens if call.echo else tokens)
    choice |= {
        "logprobs": _logprobs(call, run, 0, said, tokenizer),
        "finish_reason": reason,
        "stop_reason": None,
        "token_ids": tokens if call.return_token_ids else None,
    }
    if not call.chat:
        choice |= {
            "prompt_logprobs": _prompt_logprobs(call, run, tokenizer),
            "prompt_token_ids": run.request.prompt if call.return_token_ids else None,
        }
    return choice | {"routed_experts": None}


def _prompt_logprobs(call: Call, run: Running, tokenizer: Tokenizer) -> list[dict[str, Any] | None] | None:
    if run.prompt_logprobs is None:
        return None
    scored: list[dict[str, Any] | None] = [None]
    for token, value in zip(run.request.prompt[1:], run.prompt_logprobs, strict=True):
        scored.append({str(token): {"logprob": value, "rank": 1, "decoded_token": tokenizer.decode([token])}})
    return scored


def _logprobs(call: Call, run: Running, start: int, end: int, tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Log-probabilities of the tokens said from `start` to `end`; each names the sampled token only."""
    if call.logprobs is None:
        return None
    values: list[float | None] = list(run.spoken.logprobs[start:end])
    texts = [tokenizer.decode([token]) for token in run.spoken.tokens[start:end]]
    if call.chat:
        return {
            "content": [
                {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
                for text, value in zip(texts, values, strict=True)
            ]
        }
    if call.echo and run.prompt_logprobs is not None and start == 0:
        values = [None, *run.prompt_logprobs, *values]
        texts = [tokenizer.decode([token]) for token in run.request.prompt] + texts
    offsets, position = [], sum(len(tokenizer.decode([token])) for token in run.spoken.tokens[:start])
    for text in texts:
        offsets.append(position)
        position += len(text)
    return {
        "text_offset": offsets,
        "token_logprobs": values,
        "tokens": texts,
        "top_logprobs": [None if value is None else {text: value} for text, value in zip(texts, values, strict=True)],
    }


def first_chunks(call: Call, index: int, run: Running) -> list[dict[str, Any]]:
    """What a stream sends for a choice before its first token: chat names the role, text says nothing."""
    if not call.chat:
        return []
    choice = {
        "index": index,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    prompt = run.request.prompt if call.return_token_ids else None
    return [_chunk(call, [choice]) | {"prompt_token_ids": prompt, "prompt_text": None}]


def token_chunk(
    call: Call, index: int, run: Running, start: int, end: int, reason: str | None, tokenizer: Tokenizer
) -> dict[str, Any]:
    """The chunk for the tokens said from `start` to `end`; `reason` is set on a choice's last one."""
    tokens = run.spoken.tokens[start:end]
    shown = tokens if call.return_token_ids else None
    text = tokenizer.decode(tokens)
    logprobs = _logprobs(call, run, start, end, tokenizer)
    choice: dict[str, Any] = {"index": index}
    if call.chat:
        choice |= {"delta": {"content": text}, "logprobs": logprobs, "finish_reason": reason}
        if reason is not None:
            choice["stop_reason"] = None
    else:
        if call.echo and start == 0:
            text = tokenizer.decode(run.request.prompt) + text
        prompt = run.request.prompt if call.return_token_ids and start == 0 else None
        choice |= {"text": text, "logprobs": logprobs, "finish_reason": reason, "stop_reason": None}
        choice["prompt_token_ids"] = prompt
    choice["token_ids"] = shown
    chunk = _chunk(call, [choice])
    if reason is not None and not call.include_usage:
        chunk["system_fingerprint"] = FINGERPRINT
    return chunk


def usage_chunk(call: Call, runs: Sequence[Running], said: Sequence[int]) -> dict[str, Any]:
    return _chunk(call, []) | {
        "usage": usage(call, runs, said, detailed=False),
        "system_fingerprint": FINGERPRINT,
    }


def _chunk(call: Call, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": call.id,
        "object": "chat.completion.chunk" if call.chat else "text_completion",
        "created": call.created,
        "model": call.model,
        "choices": choices,
    }


def model_card(name: str, root: str, parent: str | None, length: int | None, now: int) -> Mapping[str, Any]:
    permission = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": now,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": now,
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": length,
        "permission": [permission],
    }
