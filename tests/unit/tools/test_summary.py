"""What a run is judged by."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from adaptersync_core.rollouts import OPEN, Row, join
from adaptersync_tools import summary

RISING = [{"step": n, "reward": 0.5 + n / 50 + (n % 3) / 100, "ratio": 1.0 + (n % 2) / 500} for n in range(20)]
V1 = "a-v1-0123456789ab"
ROW = {"request_id": "r1", "router": "g1", "path": "/v1/completions", "asked": "a", "started_at": 1.0,
       "outcome": "ok", "version": V1, "replica": "replica-0", "routing": "cold"}  # fmt: skip
REFUSED = {**ROW, "request_id": "r2", "outcome": "refused"}
OPENED = {**ROW, "request_id": "r3", "outcome": OPEN}
PUBLISHED = {"published": 3, "promoted": 2, "superseded": 1, "rolled_back": 0, "voided": 0}
CACHE = summary.PrefixCache(
    versions=("a", "b"), within_answers=2, within_tokens=64, across_answers=2, across_tokens=0, holds=True
)


def rows(*entries: dict[str, object], voided: Collection[str] = ()) -> list[Row]:
    return join([msgspec.convert(entry, Row) for entry in entries], voided=voided)


def objections(**changes: Any) -> list[str]:
    known: dict[str, Any] = {
        "reward_function": "exact",
        "wanted_steps": 20,
        "steps": RISING,
        "versions": PUBLISHED,
        "rollouts": summary.rollouts_of(rows(ROW)),
        "prefix_cache": CACHE,
        "pauses": 0,
    }
    return summary.judge(**(known | changes))


def test_a_sound_run_has_no_objection() -> None:
    assert objections() == []


@pytest.mark.parametrize(
    ("changes", "objection"),
    [
        ({"wanted_steps": 30}, "only 20 of 30 steps"),
        ({"steps": [{**step, "reward": step["step"] % 2} for step in RISING]}, "reward rose by 0.0 standard errors"),
        ({"steps": [{**step, "ratio": 1.05} for step in RISING]}, "mean ratio 1.05"),
        ({"steps": [{"step": step["step"], "reward": step["reward"]} for step in RISING]}, "no step says its ratio"),
        ({"versions": {**PUBLISHED, "rolled_back": 1, "superseded": 0}}, "1 versions were rolled back"),
        ({"versions": {**PUBLISHED, "promoted": 1}}, "1 published versions have no outcome"),
        ({"rollouts": summary.rollouts_of(rows(ROW, REFUSED))}, "1 rollouts failed"),
        ({"rollouts": summary.rollouts_of(rows(ROW, OPENED))}, "of 1 rollouts nobody knows how they ended"),
        ({"rollouts": summary.rollouts_of(rows(ROW, voided={V1}))}, "1 rollouts are of voided versions"),
        ({"rollouts": summary.rollouts_of([])}, "no rollout is in the ledger"),
        ({"pauses": None}, "do not say how often they were paused"),
        ({"pauses": 2}, "2 pauses were sent"),
        ({"prefix_cache": replace(CACHE, holds=False)}, "prefix cache is not kept apart"),
    ],
)  # fmt: skip
def test_each_fault_is_an_objection(changes: dict[str, Any], objection: str) -> None:
    (found,) = objections(**changes)
    assert objection in found


def held_out(before: float, after: float) -> list[summary.HeldOut]:
    shares = (("base", before), ("quickstart", after))
    return [summary.HeldOut(model=model, problems=400, greedy=0.3, sampled=share) for model, share in shares]


def test_the_control_need_not_learn_and_must_not() -> None:
    flat = [{**step, "reward": 0.5} for step in RISING]
    assert objections(reward_function="coin", steps=flat) == []
    assert objections(reward_function="coin", steps=flat, held_out=held_out(0.4, 0.42)) == []
    assert objections(reward_function="coin", steps=flat, held_out=held_out(0.4, 0.2)) == []
    (found,) = objections(reward_function="coin", steps=flat, held_out=held_out(0.4, 0.55))
    assert found == "the control learnt: held-out answers rose by 4.3 standard errors"


def test_what_is_learnt_shows_in_problems_nobody_was_trained_on() -> None:
    assert objections(held_out=held_out(0.4, 0.8)) == []
    (found,) = objections(held_out=held_out(0.4, 0.45))
    assert found.startswith("held-out answers rose by 1.4 standard errors")
    assert objections(steps=RISING[:19], wanted_steps=19, held_out=held_out(0.4, 0.4)) == []  # too few to learn


def test_the_error_of_a_share_is_that_of_as_many_coins() -> None:
    assert held_out(0.5, 0.5)[0].error == pytest.approx(0.025)
    assert summary.held_out_gain(held_out(0.5, 0.5 + 0.025 * 2**0.5)) == pytest.approx(1.0, rel=0.01)
    assert summary.held_out_gain(held_out(0.5, 0.6)[:1]) is None


def test_reward_compares_ends_in_standard_errors() -> None:
    rewards = [0.4, 0.6] * 5 + [0.8, 1.0] * 5
    found = summary.reward_of(rewards)
    assert found is not None
    assert found.steps == 10
    assert found.first == pytest.approx(0.5)
    assert found.last == pytest.approx(0.9)
    assert found.first_error == pytest.approx(0.1054 / 10**0.5, rel=1e-3)
    assert found.gain_errors == pytest.approx(0.4 / (2 * 0.1054**2 / 10) ** 0.5, rel=1e-3)
    assert summary.reward_of([0.5, 0.6]) is None


def test_ledger_rows_that_were_written_twice_count_once() -> None:
    gone = {**ROW, "request_id": "r2", "outcome": "client_gone", "replica": ""}
    found = summary.rollouts_of(rows(ROW, ROW, gone))
    assert (found.total, found.ok, found.failed, found.given_up) == (2, 1, 0, 1)
    assert found.by_replica == {"replica-0": 1}


def test_latency_by_phase() -> None:
    acked = {"type": "replica.acked", "accepted": "true", "staged_s": "0.1"}
    events = [acked, {**acked, "staged_s": "0.3"}, {**acked, "accepted": "false", "staged_s": "9"}]
    events.append({"type": "version.promoted", "waited_s": "0.5"})
    found = summary.latency_of(events, [{"save_s": 0.2}])
    assert {name: (each.p50, each.max, each.count) for name, each in found.items()} == {
        "trainer save": (0.2, 0.2, 1),
        "staged": (0.2, 0.3, 2),
        "publish → promoted": (0.5, 0.5, 1),
    }
