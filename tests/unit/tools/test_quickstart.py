"""What the quickstart draws of a run; the run itself is an acceptance test."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from adaptersync_tools import quickstart, summary
from adaptersync_tools.curves import Curve
from adaptersync_tools.demo.lessons import CARRY, SMOLLM2, Lesson
from adaptersync_tools.quickstart import Tour

STEPS = [{"step": step, "reward": 0.5, "right": step / 10} for step in (1, 2, 3)]
RIGHT = (0.1, 0.2, 0.3)


def tour(out: Path, lesson: Lesson = CARRY, *, reward: str | None = None, simulated: bool = False) -> Tour:
    made = Tour(steps=3, replicas=2, simulated=simulated, lesson=lesson, reward=reward, out=out)
    lines = made.directory / "train" / "steps.jsonl"
    lines.parent.mkdir(parents=True)
    lines.write_bytes(b"".join(msgspec.json.encode(step) + b"\n" for step in STEPS))
    return made


def found(made: Tour) -> summary.Summary:
    shares = (("base", 0.4), ("quickstart", 0.6))
    return summary.Summary(
        run="quickstart", mode="trl", reward_function=made.reward, replicas=2, steps=3, sound=False, objections=[],
        reward=None, right=None, ratio=None, versions=summary.versions_of([]), latency={},
        rollouts=summary.rollouts_of([]), prefix_cache=None, pauses=0, restarts={}, durations={},
        held_out=[summary.HeldOut(model=model, problems=50, greedy=0.5, sampled=share) for model, share in shares],
    )  # fmt: skip


def test_what_is_right_is_drawn_and_what_else_was_rewarded(tmp_path: Path) -> None:
    rewarded = Curve(name="rewarded", values=(0.5, 0.5, 0.5))
    assert tour(tmp_path / "a").curves() == [Curve(name="right answers", values=RIGHT)]
    for number, made in enumerate(((CARRY, "coin"), (SMOLLM2, None))):
        curves = tour(tmp_path / f"b{number}", made[0], reward=made[1]).curves()
        assert curves == [rewarded, Curve(name="right", values=RIGHT)]


def test_a_lesson_has_a_reward_of_its_own(tmp_path: Path) -> None:
    assert tour(tmp_path / "a").reward == "exact"
    assert tour(tmp_path / "b", SMOLLM2).reward == "digits"
    assert tour(tmp_path / "c", SMOLLM2, reward="coin").reward == "coin"
    assert tour(tmp_path / "d", simulated=True, reward="coin").reward == "synthetic"


def test_a_run_is_judged_by_what_it_learnt_too(tmp_path: Path) -> None:
    made = tour(tmp_path, reward="coin")
    judged = made._judged(msgspec.structs.replace(found(made), held_out=[]))
    assert not judged.sound
    assert not any("control" in objection for objection in judged.objections)
    learnt = made._judged(
        msgspec.structs.replace(
            found(made), held_out=[msgspec.structs.replace(each, problems=5000) for each in found(made).held_out]
        )
    )
    assert [objection for objection in learnt.objections if "the control learnt" in objection]


@pytest.mark.trl
@pytest.mark.filterwarnings("default")
def test_the_picture_lies_beside_the_summary(tmp_path: Path) -> None:
    made = tour(tmp_path)
    made._draw(found(made))
    assert (made.directory / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "can_draw_pictures", lambda: False)
    made = tour(tmp_path)
    made._draw(found(made))
    assert not (made.directory / "curve.png").exists()
