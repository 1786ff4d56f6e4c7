"""What a vLLM server counts, read from the text of its `/metrics`. Pure.

Of all its metrics these are the ones that somebody here goes by; a server that does not count them is no error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct

Sample = tuple[str, dict[str, str], float]  # name, labels, value

_METRIC = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_COMPUTED = "vllm:prompt_tokens_by_source_total"
_PREFILLS = (
    "vllm:request_prefill_kv_computed_tokens_count",
    "vllm:request_prefill_kv_computed_tokens_sum",
    "vllm:request_prefill_time_seconds_sum",
)
_REQUEST_TOTALS = (
    "vllm:request_queue_time_seconds_count",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum",
)
_DECODING = (
    "vllm:num_requests_running",
    "vllm:inter_token_latency_seconds_count",
    "vllm:inter_token_latency_seconds_sum",
)


class Prefills(Struct, frozen=True, kw_only=True):
    """What a server has prefilled since it began, over all its ranks: `computed` tokens up to now, and of the requests
    that have ended how many they are, how many tokens were computed for them, and how long their prefills took."""

    ranks: int
    computed: float
    requests: float
    tokens: float
    seconds: float


class RequestTotals(Struct, frozen=True, kw_only=True):
    """What the requests that ended have taken since the server began, over all its ranks, in each of its phases.

    `running` are those under way now. `tokens` were decoded after a first one, up to now and of whichever request, and
    `tokens_s` is the sum of their inter-token latencies: what that grows by in a second is how many sequences
    were decoded at once.
    """

    requests: float
    queue_s: float
    prefill_s: float
    decode_s: float
    running: float = 0.0
    tokens: float = 0.0
    tokens_s: float = 0.0


def samples(text: str) -> list[Sample]:
    """ValueError where a value is no number."""
    return [(m["name"], dict(_LABEL.findall(m["labels"] or "")), float(m["value"])) for m in _METRIC.finditer(text)]


def prefills(told: Sequence[Sample]) -> Prefills | None:
    """None when the server does not count them."""
    found: dict[str, list[float]] = {}
    for name, labels, value in told:
        if name in _PREFILLS or (name == _COMPUTED and labels.get("source") == "local_compute"):
            found.setdefault(name, []).append(value)
    if len(found) <= len(_PREFILLS):
        return None
    computed, requests, tokens, seconds = (sum(found[name]) for name in (_COMPUTED, *_PREFILLS))
    ranks = len(found[_COMPUTED])
    return Prefills(ranks=ranks, computed=computed, requests=requests, tokens=tokens, seconds=seconds)


def request_totals(told: Sequence[Sample]) -> RequestTotals | None:
    """None when the server does not count it."""
    found: dict[str, float] = {}
    for name, _, value in told:
        if name in _REQUEST_TOTALS or name in _DECODING:
            found[name] = found.get(name, 0.0) + value
    if not found.keys() >= {*_REQUEST_TOTALS}:
        return None
    requests, queue_s, prefill_s, decode_s = (found[name] for name in _REQUEST_TOTALS)
    running, tokens, tokens_s = (found.get(name, 0.0) for name in _DECODING)
    return RequestTotals(
        requests=requests,
        queue_s=queue_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        running=running,
        tokens=tokens,
        tokens_s=tokens_s,
    )
