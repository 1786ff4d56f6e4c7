"""What an engine's counters say of its speed."""

from __future__ import annotations

import pytest

from adaptersync.agent.rate import KEEP, LEAST, LEAST_EACH, Rate
from adaptersync_core.vllm import VllmClient
from adaptersync_core.vllm_metrics import Prefills


def counters(computed: float, requests: float, tokens: float, seconds: float, ranks: int = 1) -> Prefills:
    return Prefills(ranks=ranks, computed=computed, requests=requests, tokens=tokens, seconds=seconds)


def after(*looks: Prefills, every_s: float = 5.0) -> int:
    rate = Rate()
    for number, look in enumerate(looks):
        rate.see(look, number * every_s)
    return rate.tokens_per_s


NONE = counters(0, 0, 0, 0)


def test_nothing_is_known_of_an_engine_that_was_looked_at_once_or_does_nothing() -> None:
    assert after() == after(counters(9e6, 10, 9e6, 1)) == after(NONE, NONE, NONE) == 0


def test_an_engine_with_time_to_spare_is_measured_by_its_requests() -> None:
    assert after(NONE, counters(4000, 1, 4000, 0.5)) == 8000  # by the clock 800


def test_an_engine_whose_requests_share_its_steps_is_measured_by_the_clock() -> None:
    assert after(NONE, counters(40_000, 16, 32_000, 64)) == 8000  # by its requests 500


def test_ranks_prefill_beside_each_other() -> None:
    assert after(NONE, counters(4000, 1, 4000, 0.5, ranks=2)) == 16_000


def test_what_is_short_measures_steps_and_says_nothing() -> None:
    each, many = LEAST_EACH - 1, LEAST
    known = counters(4000, 1, 4000, 0.5)
    short = counters(4000 + LEAST - 1, 1 + many, 4000 + many * each, 0.5 + many)
    assert after(NONE, known, short) == 8000
    assert after(NONE, counters(LEAST - 1, 1, LEAST - 1, 0.1)) == 0
    assert after(NONE, counters(LEAST, 1, LEAST, 0.1)) == 10 * LEAST


def test_it_follows_a_change_and_keeps_what_it_knew_while_nothing_comes() -> None:
    looks = [counters(4000 * n, n, 4000 * n, 0.5 * n) for n in range(4)]
    assert after(*looks, looks[-1], looks[-1]) == 8000
    for n in range(12):  # four times slower
        looks.append(counters(12_000 + 4000 * n, 3 + n, 12_000 + 4000 * n, 1.5 + 2 * n))
    assert 2000 <= after(*looks) < 2200
    assert 2 * KEEP**12 < 0.2


def test_another_life_of_the_engine_is_measured_from_its_beginning() -> None:
    first = counters(4000, 1, 4000, 0.5)
    assert after(NONE, first, NONE) == 0
    assert after(NONE, first, NONE, counters(4000, 1, 4000, 2)) == 2000


METRICS = """\
vllm:prompt_tokens_by_source_total{engine="0",model_name="base",source="local_compute"} 300.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="base",source="local_cache_hit"} 7.0
vllm:prompt_tokens_by_source_total{engine="1",model_name="base",source="local_compute"} 100.0
vllm:request_prefill_time_seconds_count{engine="0",model_name="base"} 2.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="base"} 0.5
vllm:request_prefill_time_seconds_sum{engine="1",model_name="base"} 0.25
vllm:request_prefill_kv_computed_tokens_count{engine="0",model_name="base"} 2.0
vllm:request_prefill_kv_computed_tokens_count{engine="1",model_name="base"} 1.0
vllm:request_prefill_kv_computed_tokens_sum{engine="0",model_name="base"} 200.0
vllm:request_prefill_kv_computed_tokens_sum{engine="1",model_name="base"} 50.0
"""


class Server(VllmClient):
    """Answers what it was given; no network."""

    def __init__(self, text: str) -> None:
        self.url, self._text = "http://engine", text

    async def _call(self, method: str, path: str, **_: object) -> str:
        return self._text


async def test_the_counters_of_all_ranks_are_added() -> None:
    assert await Server(METRICS).prefills() == counters(400, 3, 250, 0.75, ranks=2)


@pytest.mark.parametrize("missing", ["prompt_tokens_by_source", "prefill_time", "prefill_kv_computed"])
async def test_an_engine_that_does_not_count_them_is_not_measured(missing: str) -> None:
    assert await Server("\n".join(line for line in METRICS.splitlines() if missing not in line)).prefills() is None
