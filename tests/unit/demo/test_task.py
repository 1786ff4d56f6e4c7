"""The demo's problems: the same everywhere, right, and with nothing held out among those trained on."""

from __future__ import annotations

from adaptersync_tools.demo.rewards import exact
from adaptersync_tools.demo.task import CARRY_SHARE, Problem, draw
from adaptersync_tools.demo.train import figures
from adaptersync_tools.demo.warmup import Settings


def test_a_problem_knows_its_answer_and_the_careless_one() -> None:
    problem = Problem(17, 25)
    assert (problem.question, problem.answer, problem.careless_answer) == ("17+25", "042", "032")
    assert problem.carries


def test_careless_answers_are_wrong_exactly_where_something_is_carried() -> None:
    everything = [Problem(left, right) for left in range(100) for right in range(100)]
    assert all(int(p.answer) == p.left + p.right and len(p.answer) == len(p.careless_answer) == 3 for p in everything)
    assert all((p.careless_answer != p.answer) == p.carries for p in everything)


def test_the_same_seed_draws_the_same_problems() -> None:
    first = [problem.question for problem in draw("train", 5, seed=3)]
    assert first == [problem.question for problem in draw("train", 9, seed=3)][:5]
    assert first != [problem.question for problem in draw("train", 5, seed=4)]
    assert first == ["57+43", "95+29", "66+15", "64+17", "87+04"]  # on every machine


def test_no_held_out_problem_is_trained_on() -> None:
    trained, held_out = (set(draw(split, 20_000, seed=1)) for split in ("train", "test"))
    assert not trained & held_out
    assert 800 < len(held_out) < 1200  # a tenth of the ten thousand
    assert len(trained) > 7000


def test_most_problems_carry() -> None:
    problems = draw("train", 5000, seed=2)
    assert abs(sum(problem.carries for problem in problems) / 5000 - CARRY_SHARE) < 0.03


def test_the_reward_is_for_exactly_the_right_answer() -> None:
    chat = [[{"role": "assistant", "content": text}] for text in ("042", "42", "042 ")]
    assert exact(completions=chat, answer=["042"] * 3) == [1.0, 0.0, 0.0]
    assert exact(completions=["042"], answer=["042"]) == [1.0]


def test_another_setting_makes_another_base() -> None:
    assert Settings().digest == Settings().digest
    assert len({Settings().digest, Settings(seed=1).digest, Settings(careless=0.5).digest}) == 3


def test_a_line_of_figures_has_our_names_and_all_counts() -> None:
    line = figures({"reward": 0.512345678, "perf/step_s": 0.4, "loss": 1.0, "sample/staleness_max": 2.0}, 2, 9.8765)
    assert line == {
        "step": 2,
        "seconds": 9.88,
        "reward": 0.51235,
        "step_s": 0.4,
        "behind": 2,
        "dropped_stale": 0,
        "retries": 0,
        "served_mismatch": 0,
        "repinned": 0,
        "doomed": 0,
    }
