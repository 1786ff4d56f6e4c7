"""What an engine's counters say of its latest requests."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from adaptersync.agent.request_times import LOOKS, LatestTimes
from adaptersync_core.records import RequestTimes
from adaptersync_core.vllm import VllmClient
from adaptersync_core.vllm_metrics import RequestTotals


def counters(requests: float, queue_s: float = 0.0, prefill_s: float = 0.0, decode_s: float = 0.0) -> RequestTotals:
    return RequestTotals(requests=requests, queue_s=queue_s, prefill_s=prefill_s, decode_s=decode_s)


def after(*looks: RequestTotals) -> RequestTimes:
    latest = LatestTimes()
    for number, look in enumerate(looks):
        latest.see(look, 5.0 * number)
    return latest.told()


def test_only_what_came_between_two_looks_is_known() -> None:
    assert after() == after(counters(9, 9, 9, 9)) == RequestTimes()
    told = after(counters(10, 1, 1, 1), counters(14, 3, 1.5, 9))
    assert told == RequestTimes(requests=4, over_s=5.0, queue_s=2, prefill_s=0.5, decode_s=8)


def test_a_time_in_which_nothing_ended_makes_nothing_older() -> None:
    busy, idle = counters(4, 1, 1, 1), [counters(4, 1, 1, 1)] * 3 * LOOKS
    assert after(counters(0), busy, *idle) == after(counters(0), busy)


def test_what_is_old_is_forgotten_when_newer_has_come() -> None:
    slow = [counters(0), counters(1, 100)]
    later = [counters(1 + number, 100 + number) for number in range(1, LOOKS + 1)]
    assert after(*slow, *later) == RequestTimes(requests=LOOKS, over_s=5.0 * LOOKS, queue_s=LOOKS)


def test_another_life_of_the_engine_begins_at_nothing() -> None:
    assert after(counters(0), counters(9, 9, 9, 9), counters(2, 1, 1, 1)) == RequestTimes()
    told = after(counters(0), counters(9, 9, 9, 9), counters(2, 1, 1, 1), counters(3, 3, 2, 2))
    assert told == RequestTimes(requests=1, over_s=5.0, queue_s=2, prefill_s=1, decode_s=1)


class Server(VllmClient):
    def __init__(self, text: str) -> None:
        self._text = text

    async def _call(self, method: str, path: str, **_: Any) -> str:
        return self._text


async def test_the_counters_of_all_ranks_are_one() -> None:
    lines = [
        f'vllm:request_{name}_time_seconds_{kind}{{engine="{rank}",model_name="base"}} {value}'
        for rank in (0, 1)
        for name, kind, value in (
            ("queue", "count", 2.0),
            ("queue", "sum", 0.5),
            ("prefill", "sum", 0.25),
            ("decode", "sum", 4.0),
        )
    ]
    assert await Server("\n".join(lines)).request_totals() == counters(4, 1.0, 0.5, 8.0)
    assert await Server("\n".join(lines[:3])).request_totals() is None  # not all of them: another vLLM
    lines += [
        f'vllm:{name}{{engine="{rank}",model_name="base"}} {value}'
        for rank in (0, 1)
        for name, value in (
            ("num_requests_running", 3.0),
            ("inter_token_latency_seconds_count", 40.0),
            ("inter_token_latency_seconds_sum", 2.0),
        )
    ]
    totals = await Server("\n".join(lines)).request_totals()
    assert totals == replace(counters(4, 1.0, 0.5, 8.0), running=6.0, tokens=80.0, tokens_s=4.0)
