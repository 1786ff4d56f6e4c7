"""How a run's summary reads."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from adaptersync_tools import summary
from adaptersync_tools.curves import Curve
from adaptersync_tools.report import control, show

ROLLOUTS = summary.rollouts_of([])
REWARD = summary.reward_of([0.5, 0.6] * 10)
FOUND = summary.Summary(
    run="quickstart", mode="trl", reward_function="exact", replicas=2, steps=20, sound=True, objections=[],
    reward=REWARD, right=REWARD, ratio=summary.spread_of([1.0]), versions={"published": 21}, latency={},
    rollouts=ROLLOUTS, prefix_cache=None, pauses=0, restarts={}, durations={},
)  # fmt: skip
CURVE = Curve(name="right answers", values=(0.4, 0.6, 0.8))


def held_out(before: float, after: float) -> list[summary.HeldOut]:
    shares = (("base", before), ("quickstart", after))
    return [summary.HeldOut(model=model, problems=500, greedy=0.3, sampled=share) for model, share in shares]


def shown(directory: Path, width: int = 120, **changes: Any) -> str:
    said = io.StringIO()
    show(msgspec.structs.replace(FOUND, **changes), directory, Console(file=said, width=width), [CURVE])
    return said.getvalue()


def test_a_run_ends_with_its_curve_and_both_accuracies(tmp_path: Path) -> None:
    text = shown(tmp_path, held_out=held_out(0.41, 0.88))
    assert "Share of answers, by step" in text
    assert "● right answers" in text
    assert "base 30% greedy, 41% ± 2% sampled → quickstart 30% greedy, 88% ± 1% sampled" in text
    assert "control" not in text
    assert "curve.png" not in text
    assert "&& adaptersync up --simulated" in text
    (tmp_path / "curve.png").touch()
    assert "curve.png" in shown(tmp_path)


def test_a_curve_fits_a_narrow_terminal(tmp_path: Path) -> None:
    plot = shown(tmp_path, width=60).partition("● right answers")[0]
    assert max(len(line) for line in plot.splitlines()) <= 60


def test_a_control_says_that_it_is_one_and_that_nothing_was_learnt(tmp_path: Path) -> None:
    text = " ".join(shown(tmp_path, reward_function="coin", held_out=held_out(0.41, 0.43)).split())
    assert "20 steps on 2 replicas (TRL and vLLM, a control)" in text
    assert (
        "This was a control: a coin decided which answers were rewarded. Nothing was learnt: of the held-out answers "
        "41% were right before and 43% after (+0.6 standard errors)." in text
    )
    assert text.count("right answers") >= 2  # beside what was rewarded, in the curve and the table


def test_a_control_that_learnt_says_so() -> None:
    learnt = msgspec.structs.replace(FOUND, reward_function="coin", held_out=held_out(0.41, 0.61))
    assert "Yet something was learnt" in control(learnt)
    assert "was not measured" in control(msgspec.structs.replace(learnt, held_out=[]))
