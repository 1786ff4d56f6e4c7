"""How fast an engine decodes, by its batch."""

from __future__ import annotations

import pytest

from adaptersync.agent.decode_rates import KEPT_S, LEAST, LOOKS, DecodeRates
from adaptersync_core.records import DecodeRate, Decoding
from adaptersync_core.vllm_metrics import RequestTotals

LOOK_S = 5.0


class Engine:
    """Counters of one that decodes `batch` sequences at `rate` tokens a second together."""

    def __init__(self) -> None:
        self.rates = DecodeRates()
        self.at = 100.0
        self.running = self.tokens = self.tokens_s = 0.0

    def looks(self, count: int, batch: float, rate: float, *, running: float | None = None) -> None:
        for _ in range(count):
            self.at += LOOK_S
            self.running = batch if running is None else running
            self.tokens += rate * LOOK_S
            self.tokens_s += batch * LOOK_S
            self.see()

    def see(self, requests: float = 1.0) -> None:
        counters = {"running": self.running, "tokens": self.tokens, "tokens_s": self.tokens_s}
        self.rates.see(RequestTotals(requests=requests, queue_s=0, prefill_s=0, decode_s=0, **counters), self.at)

    def told(self) -> Decoding:
        return self.rates.told(self.at, batch_max=64)


def test_rates_are_by_batch_and_the_batch_is_that_of_lately() -> None:
    engine = Engine()
    assert engine.told() == Decoding(batch_max=64)
    engine.looks(1 + LEAST, 15.0, 600.0)  # of the first nothing is known that came before it
    engine.looks(LOOKS, 30.0, 900.0)  # at the first of these the batch had changed
    engine.looks(LOOKS, 32.0, 1000.0)
    told = engine.told()
    assert (told.batch, told.batch_max) == (32.0, 64)
    assert told.rates == (
        DecodeRate(batch=15.0, tokens_per_s=600.0, over_s=LEAST * LOOK_S),
        DecodeRate(batch=32.0, tokens_per_s=1000.0, over_s=LOOKS * LOOK_S),
    )


@pytest.mark.parametrize(("batch", "running"), [(15.0, 31.0), (30.0, 15.0)])
def test_a_look_in_which_the_batch_changed_says_nothing(batch: float, running: float) -> None:
    """Half the time with 30 and half idle is not 15, at which a token would take less."""
    engine = Engine()
    engine.looks(1 + LEAST, 30.0, 900.0)
    engine.looks(LEAST, batch, 450.0, running=running)
    engine.looks(1, 30.0, 0.0)  # nothing was decoded
    assert engine.told().rates == (DecodeRate(batch=30.0, tokens_per_s=900.0, over_s=LEAST * LOOK_S),)


def test_another_life_of_the_engine_begins_at_nothing() -> None:
    engine = Engine()
    engine.looks(1 + LEAST, 30.0, 900.0)
    engine.tokens = engine.tokens_s = 0.0
    engine.see()
    assert engine.told() == Decoding(batch_max=64)


def test_a_size_that_was_hardly_seen_is_not_told_of() -> None:
    engine = Engine()
    engine.looks(LEAST, 30.0, 900.0)
    assert engine.told() == Decoding(batch_max=64)
    engine.looks(1, 30.0, 900.0)
    assert len(engine.told().rates) == 1


def test_what_is_old_is_forgotten() -> None:
    engine = Engine()
    engine.looks(1 + LEAST, 15.0, 600.0)
    engine.at += KEPT_S
    engine.looks(1 + LEAST, 30.0, 900.0)
    assert [rate.batch for rate in engine.told().rates] == [30.0]


def test_an_engine_that_does_not_count_tokens_says_nothing() -> None:
    rates = DecodeRates()
    for requests in (1.0, 2.0):
        rates.see(RequestTotals(requests=requests, queue_s=0, prefill_s=0, decode_s=0), requests)
    assert rates.told(2.0, batch_max=0) == Decoding()
