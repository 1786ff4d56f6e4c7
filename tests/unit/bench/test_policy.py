"""The routing policies under a trainer's load: the figures that are promised, from fixed seeds and without a clock."""

from __future__ import annotations

from typing import get_args

import pytest
from msgspec import structs

from adaptersync.router.policy import Policy
from adaptersync_tools.bench.policy import LOADS, Outcome, Settings, promised, run, simulate
from adaptersync_tools.cli import main

BY_NAME = {load.name: load for load in LOADS}


def test_what_is_promised_is_kept_and_the_former_rule_would_not_keep_it() -> None:
    result = run(Settings(requests=6000, rounds=1))
    assert [target.name for target in result.targets if not target.kept] == []
    found = {(each.load, each.policy): each for each in result.outcomes}
    assert len(found) == len(result.outcomes) == len(get_args(Policy)) * len(LOADS)
    for load in BY_NAME:
        assert found[load, "promise"].warm_percent <= found[load, "promise"].possible_percent
        assert found[load, "promise"].warm_percent >= found[load, "threshold"].warm_percent
        if BY_NAME[load].longest:
            prompt, expected = found[load, "promise"], found[load, "expected"]
            assert expected.first_token_s < prompt.first_token_s
            assert expected.first_token_p95_s < prompt.first_token_p95_s
            assert expected.largest <= 43
        else:  # nothing to wait for
            assert found[load, "expected"].warm_percent == found[load, "promise"].warm_percent
    former = {each.load: each for each in result.outcomes if each.policy == "threshold"}
    assert former["shuffled"].warm_percent < 84
    assert not all(target.kept for target in promised(former, former))


def test_a_life_is_the_same_each_time_and_another_for_another_seed() -> None:
    settings = Settings(requests=2000)
    first, again, other = (simulate(BY_NAME["shuffled"], "promise", settings, seed) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("clients", [32, 512])
def test_it_holds_for_quiet_and_for_busy_fleets(clients: int) -> None:
    load = BY_NAME["shuffled"].__class__(name="other", clients=clients, window=clients // 8)
    promise, threshold = (
        simulate(load, policy, Settings(requests=24 * clients + 4000), 1) for policy in ("promise", "threshold")
    )
    assert promise.warm_percent > threshold.warm_percent + 1
    assert promise.largest <= clients / 4 + max(9, clients / 4 / 8 + 1)


def test_a_target_missed_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "policy", "--requests", "2000", "--rounds", "1", "--spill", "0"]) == 1
    assert "✗ shuffled: warm" in capsys.readouterr().out


def test_each_promise_can_be_broken() -> None:
    outcome = Outcome(
        load="",
        policy="",
        warm_percent=87,
        possible_percent=88,
        largest=43,
        busiest_percent=30,
        spilled_percent=0,
        first_token_s=1,
        first_token_p95_s=2,
    )
    found = dict.fromkeys(BY_NAME, outcome)
    sooner = dict.fromkeys(BY_NAME, structs.replace(outcome, first_token_p95_s=1))
    assert all(target.kept for target in promised(found, sooner))
    for load, kept, better in (
        ("one slow replica", 1.0, 0.99),
        ("long prompts", 1.8, 1.79),
        ("mixed lengths", 1.7, 1.69),
        ("shuffled", 3.0, 2.0),
    ):
        for p95, held in ((better, True), (kept + 0.01, load == "shuffled")):
            targets = promised(found, sooner | {load: structs.replace(outcome, first_token_p95_s=p95)})
            assert all(target.kept for target in targets) == held, (load, p95)
    for load, worse in (
        ("shuffled", {"warm_percent": 86.9}),
        ("shuffled", {"largest": 44}),
        ("two routers", {"warm_percent": 86.6}),
        ("two routers", {"largest": 44}),
        ("groups given up", {"possible_percent": 89.1}),
        ("one replica away", {"possible_percent": 88.1}),
        ("one replica away", {"largest": 55}),
        ("long template", {"busiest_percent": 30.1}),
    ):
        targets = promised(found | {load: structs.replace(outcome, **worse)}, sooner)
        assert [target.kept for target in targets].count(False) == 1
