"""What is read of a rollout's body, and what must not be asked of a replica. Pure.

Whatever vLLM refuses by itself is left to it: the replica says what is wrong. Refused here is what it would take, and
would harm others by: see `check`.
"""

from __future__ import annotations

import hashlib

import msgspec
from msgspec import Raw, Struct

from adaptersync_core.errors import Unroutable

NOTHING = Raw()  # a field that was not given
NULL = (NOTHING, Raw(b"null"))
YES, NO = Raw(b"true"), Raw(b"false")

PROMPT_DIGITS = 32
PARTS = 128 << 10  # of a body are made into objects in one go, in a tenth of a second: until then nothing else goes on

_TRANSFERS = ("kv_transfer_params", "ec_transfer_params")
_OFF = (*NULL, NO)  # anything else vLLM may read as true
_NONE_OF_IT = (NOTHING,) * 6


class Asked(Struct, frozen=True):
    """What routing needs of a body, and what decides whether it may be sent on; everything else stays unread."""

    model: str | None = None
    prompt: Raw = NOTHING
    messages: Raw = NOTHING
    prompt_logprobs: Raw = NOTHING
    echo: Raw = NOTHING
    logprobs: Raw = NOTHING
    prompt_embeds: Raw = NOTHING
    kv_transfer_params: Raw = NOTHING
    ec_transfer_params: Raw = NOTHING
    vllm_xargs: Raw = NOTHING
    n: Raw = NOTHING
    best_of: Raw = NOTHING
    suffix: Raw = NOTHING
    truncate_prompt_tokens: Raw = NOTHING
    add_special_tokens: Raw = NOTHING
    add_generation_prompt: Raw = NOTHING
    continue_final_message: Raw = NOTHING
    chat_template: Raw = NOTHING
    chat_template_kwargs: Raw = NOTHING
    reasoning_effort: Raw = NOTHING
    documents: Raw = NOTHING
    tools: Raw = NOTHING
    tool_choice: Raw = NOTHING


class More(Struct, frozen=True):
    """What is looked for in `vllm_xargs`; of anything else there may be a million."""

    kv_transfer_params: Raw = NOTHING
    ec_transfer_params: Raw = NOTHING
    kv_cache_report_mode: Raw = NOTHING


def check(asked: Asked, *, chat: bool, scoring: bool) -> None:
    """Unroutable 400 for what would harm others; `scoring`: prompts may be scored.

    - Scoring a prompt ends a vLLM that has LoRA on its model's head, and everything in flight there.
    - Embeddings in place of a prompt end one that takes them, when their shape is not the model's.
    - A transfer of KV fills a prompt's cache with what another engine, or another version, has computed.
    - An engine that tells again of blocks it has had is believed to have them twice, and still when they are evicted.
    """
    risky = (
        asked.prompt_logprobs,
        asked.echo,
        asked.prompt_embeds,
        asked.kv_transfer_params,
        asked.ec_transfer_params,
        asked.vllm_xargs,
    )
    if risky == _NONE_OF_IT:  # almost always; to look at each costs 4 us
        return
    if not scoring and (field := _scores(asked, chat=chat)):
        raise Unroutable(
            "log-probabilities of a prompt are not served: asking for them can end a vLLM that has LoRA on its head",
            status=400,
            next_step="leave it out; or, if no replica has LoRA there, set router.prompt_logprobs",
            field=field,
        )
    if asked.prompt_embeds not in NULL:
        raise Unroutable(
            "embeddings are not taken for a prompt: those of another shape than the model's end a vLLM",
            status=400,
            next_step="send text or token ids",
            field="prompt_embeds",
        )
    more = _more(asked)
    for field in _transfers(asked, more):
        raise Unroutable(
            "a request may not bring a cache with it: what is in it need not be of the version that is asked for",
            status=400,
            next_step="leave it out",
            field=field,
        )
    if more.kv_cache_report_mode != NOTHING:
        raise Unroutable(
            "a request may not have the engine report its cache: its agent counts what it reports",
            status=400,
            next_step="leave it out",
            field="vllm_xargs.kv_cache_report_mode",
        )


def fingerprint(asked: Asked, *, chat: bool) -> str:
    """What the ledger knows a prompt by: the head of the SHA-256 of its JSON as it came; empty where there is none."""
    prompt = asked.messages if chat else asked.prompt
    return "" if prompt in NULL else hashlib.sha256(prompt).hexdigest()[:PROMPT_DIGITS]


def manifold(raw: Raw) -> bool:
    """Whether it may be of more than `PARTS` values: each but the first follows one of these, which a text has, too."""
    if len(raw) <= PARTS:
        return False
    written = bytes(raw)
    return written.count(b",") + written.count(b"[") + written.count(b"{") > PARTS


def crowded(body: bytes, asked: Asked) -> bool:
    """Whether it may have more than `PARTS` fields beside those that may be long: each has a colon."""
    if len(body) <= PARTS:
        return False
    long = (asked.prompt, asked.messages, asked.tools, asked.documents)
    return body.count(b":") - sum(bytes(raw).count(b":") for raw in long) > PARTS


def _scores(asked: Asked, *, chat: bool) -> str:
    """The field by which a prompt's log-probabilities are asked for, or nothing.

    With `echo` vLLM takes the number for the answer as the prompt's, too; a chat always has one.
    """
    if asked.prompt_logprobs not in NULL:
        return "prompt_logprobs"
    if asked.echo in _OFF:
        return ""
    return "echo" if chat or asked.logprobs not in NULL else ""


def _transfers(asked: Asked, more: More) -> list[str]:
    """Fields, or keys of `vllm_xargs`, that tell of caches elsewhere."""
    found = [name for name in _TRANSFERS if getattr(asked, name) not in NULL]
    return found + [f"vllm_xargs.{name}" for name in _TRANSFERS if getattr(more, name) != NOTHING]


def _more(asked: Asked) -> More:
    """Nothing where the replica will say what is wrong."""
    try:
        return More() if asked.vllm_xargs in NULL else msgspec.json.decode(asked.vllm_xargs, type=More)
    except msgspec.DecodeError:
        return More()
