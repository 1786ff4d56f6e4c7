"""What two ways of training are compared by; no trainer, no server."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adaptersync_core.errors import ConfigError
from adaptersync_core.rollouts import Row
from adaptersync_tools.bench import training
from adaptersync_tools.bench.equivalence import difference, thirds
from adaptersync_tools.bench.training import (
    Ran,
    Settings,
    TrainingResult,
    Way,
    alternated,
    compared,
    unnumbered,
    wrong_version,
)
from adaptersync_tools.bench.training_report import show_more
from adaptersync_tools.supervisor import StackFailed

STEPS = 30
SETTINGS = Settings(steps=STEPS, repeats=2)


def lines(seed: int, *, shift: float = 0.0, rise: float = 0.4, **changes: float) -> tuple[dict[str, Any], ...]:
    rng = random.Random(seed)
    made = []
    for step in range(1, STEPS + 1):
        reward = 0.5 + rise * step / STEPS + shift + rng.gauss(0, 0.03)
        line = {"step": step, "reward": reward, "ratio": 1 + rng.gauss(0, 0.004)}
        made.append(
            line | {"step_s": 1.0, "sync_s": 0.1, "save_s": 0.1, "pause_s": 0.0, "promotion_wait_s": 0.0} | changes
        )
    return tuple(made)


def rarely(steps: tuple[dict[str, Any], ...], more_s: float, *, waits: bool) -> tuple[dict[str, Any], ...]:
    """The sync of one step in ten takes so much longer; `waits`: for the fleet."""
    return tuple(
        {**step, "sync_s": step["sync_s"] + more_s, "promotion_wait_s": more_s if waits else 0.0}
        if step["step"] % 10 == 0
        else step
        for step in steps
    )


def ran(way: Way, seed: int, **changes: Any) -> Ran:
    known: dict[str, Any] = {
        "steps": lines(seed),
        "pauses": 0,
        "wrong_version": 0,
        "substituted": 0,
        "unnumbered": 0,
        "answers": 9,
    }
    if way == "TRL":
        steps = lines(seed + 100, sync_s=0.3, pause_s=0.05)
        known = {"steps": steps, "pauses": STEPS + 1}
    return Ran(way=way, seed=seed, **(known | changes))


def result(**changes: Any) -> TrainingResult:
    ours = [ran("adaptersync", seed, **{name: make(seed) for name, make in changes.items()}) for seed in (0, 1)]
    return compared(SETTINGS, [*ours, ran("TRL", 0), ran("TRL", 1)])


def broken(found: TrainingResult) -> list[str]:
    return [target.name for target in found.targets if not target.kept]


def test_the_same_training_keeps_everything() -> None:
    found = result()
    assert broken(found) == []
    assert [(part.first, part.last) for part in found.parts] == [(1, 10), (11, 20), (21, 30)]
    told = found.told["TRL"]
    assert (told.pauses, told.syncs, told.wrong_version) == (2 * (STEPS + 1), 2 * (STEPS + 1), None)
    assert told.paused_s == pytest.approx(0.25)
    assert told.other_s == pytest.approx(0.2)
    assert found.told["adaptersync"].paused_s == 0.0
    assert [len(curve.values) for curve in found.curves()] == [STEPS, STEPS]
    assert [found.told[way].saves for way in training.WAYS] == pytest.approx([1.0, 3.0])


def test_steps_between_two_syncs_say_nothing_of_one() -> None:
    of_a_sync = {"sync_s", "save_s", "pause_s", "promotion_wait_s"}

    def every_second(seed: int) -> tuple[dict[str, Any], ...]:
        steps = lines(seed)
        return tuple(
            step if number % 2 else {k: v for k, v in step.items() if k not in of_a_sync}
            for number, step in enumerate(steps)
        )

    found = result(steps=every_second)
    assert broken(found) == []
    assert len(found.figures[0].samples_s) == 2 * (STEPS // 2)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"steps": lambda seed: lines(seed, shift=-0.08)}, ["reward"] * 3),
        ({"steps": lambda seed: lines(seed, shift=0.08)}, ["reward"] * 3),  # better is not the same either
        ({"steps": lambda seed: lines(seed, ratio=1.02)}, ["distance of the ratio"]),
        ({"steps": lambda seed: lines(seed, ratio=0.98)}, ["distance of the ratio"]),
        ({"steps": lambda seed: lines(seed, sync_s=0.15)}, ["median sync of ours", "mean sync of ours, its waits"]),
        (
            {"steps": lambda seed: lines(seed, sync_s=0.31)},
            ["median sync", "mean sync of ours, its waits", "mean sync of ours beside", "mean sync, waits included"],
        ),
        # the median hides what is rare
        (
            {"steps": lambda seed: rarely(lines(seed), 3.0, waits=True)},
            ["mean sync of ours beside", "mean sync, waits included"],
        ),
        ({"steps": lambda seed: rarely(lines(seed), 0.2, waits=False)}, ["mean sync of ours, its waits"]),
        # waits hide behind a save that is shorter than TRL's
        (
            {"steps": lambda seed: rarely(lines(seed, sync_s=0.02, save_s=0.02), 2.4, waits=True)},
            ["mean sync of ours beside"],
        ),
        ({"pauses": lambda _: 1}, ["pauses of our fleet"]),
        ({"wrong_version": lambda _: 1}, ["answers of another version"]),
        ({"wrong_version": lambda _: None}, ["answers of another version"]),  # nobody looked
        ({"substituted": lambda _: 1}, ["answers that stand for another"]),
        ({"unnumbered": lambda _: 1}, ["requests that asked for no version"]),
    ],
)
def test_each_difference_breaks_what_is_promised(changes: dict[str, Callable[[int], Any]], names: list[str]) -> None:
    found = broken(result(**changes))
    assert len(found) == len(names)
    assert all(name.startswith(wanted) for name, wanted in zip(found, names, strict=True))


def test_a_ratio_that_is_closer_to_1_is_no_fault() -> None:
    assert broken(result(steps=lambda seed: lines(seed, ratio=1.0))) == []


def test_curves_that_do_not_rise_show_nothing() -> None:
    flat = [ran(way, seed, steps=lines(seed + 9, rise=0.0)) for way in training.WAYS for seed in (0, 1)]
    assert broken(compared(SETTINGS, flat)) == ["difference at the end that would have been seen"]


def test_what_runs_scatter_is_noise_that_steps_do_not_show() -> None:
    """A run that is ahead from its first step to its last has steps that agree on it."""
    ours = [[0.5, 0.5, 0.5, 0.5], [0.6, 0.6, 0.6, 0.6]]
    theirs = [[0.6, 0.6, 0.6, 0.6], [0.7, 0.7, 0.7, 0.7]]
    found = difference(ours, theirs, 1, 4)
    assert (found.ours, found.theirs) == pytest.approx((0.55, 0.65))
    assert found.error == pytest.approx(2**0.5 * 0.05)  # of 2 runs that lie 0.1 apart, twice
    assert found.errors == pytest.approx(-(2**0.5))
    assert found.visible == pytest.approx(3 * found.error)


def test_what_steps_scatter_is_noise_too() -> None:
    found = difference([[0.5, 0.7, 0.5, 0.7]], [[0.5, 0.5, 0.7, 0.7]], 1, 4)
    assert found.error == pytest.approx(0.1633 / 2, rel=1e-3)
    assert found.errors == 0.0


def test_a_part_is_of_its_own_steps() -> None:
    ours, theirs = [[1.0] * 3 + [2.0] * 4], [[1.0] * 7]
    parts = thirds(ours, theirs)
    assert [(part.first, part.last, part.ours) for part in parts] == [(1, 2, 1.0), (3, 4, 1.5), (5, 7, 2.0)]
    assert [(part.first, part.last) for part in thirds([[1.0] * 5], [[1.0] * 5])] == [(1, 5)]


def test_ways_take_turns_with_the_same_seeds(tmp_path: Path) -> None:
    made: list[tuple[str, int]] = []

    def way(name: Way) -> Callable[[int, Path], Ran]:
        def train(seed: int, directory: Path) -> Ran:
            assert directory.is_dir()
            made.append((name, seed))
            return ran(name, seed)

        return train

    ways = {name: way(name) for name in training.WAYS}
    runs = alternated(Settings(steps=STEPS, repeats=3, seed=5), ways, tmp_path)
    assert made == [
        *(("TRL", 5), ("adaptersync", 5)),
        *(("adaptersync", 6), ("TRL", 6)),
        *(("TRL", 7), ("adaptersync", 7)),
    ]
    assert [(each.way, each.seed) for each in runs] == made
    with pytest.raises(ConfigError, match="a training lies there already"):
        alternated(SETTINGS, ways, tmp_path)


def test_a_training_that_ended_early_is_not_compared() -> None:
    with pytest.raises(StackFailed, match=r"ended early.*way=TRL made=29 of 30 steps"):
        compared(SETTINGS, [ran("adaptersync", 0), ran("TRL", 0, steps=lines(0)[:-1])])


ROW = {"request_id": "r", "router": "g", "path": "/v1/completions", "outcome": "ok", "started_at": 1.0}


def test_answers_of_another_version_are_counted() -> None:
    def row(asked: str, version: str, **more: Any) -> Row:
        return msgspec.convert({**ROW, "asked": asked, "version": version, **more}, Row)

    fine = [
        row("bench@v7", "bench-v7-0123456789ab"),
        row("bench", "bench-v8-0123456789ab"),  # whatever is current
        row("base", "base"),
        row("bench@v7", "bench-v6-0123456789ab", substituted="bench-v7-0123456789ab"),  # counted apart
    ]
    wrong = [
        row("bench@v7", "bench-v8-0123456789ab"),
        row("bench@v7", "bench-v77-0123456789ab"),
        row("bench@v7", "other-v7-0123456789ab"),
        row("bench@v7", "base"),
    ]
    assert wrong_version(fine) == 0
    assert wrong_version([*fine, *wrong]) == len(wrong)
    assert unnumbered([*fine, row("bench", "", outcome="engine_unavailable")]) == 3


def test_a_sync_is_judged_beside_its_own_save() -> None:
    """Saves are long or short: by medians of all of them a sync would take twice its save, or no more than that."""

    def steps(*syncs: tuple[float, float]) -> Callable[[int], tuple[dict[str, Any], ...]]:
        def made(seed: int) -> tuple[dict[str, Any], ...]:
            each = itertools.cycle({"save_s": save, "sync_s": sync} for save, sync in syncs)
            return tuple(line | next(each) for line in lines(seed))

        return made

    kept = result(steps=steps((0.05, 0.05), (0.05, 0.1), (0.1, 0.1), (0.1, 0.1)))
    assert "median sync of ours, each over its save" not in broken(kept)
    missed = result(steps=steps((0.05, 0.06), (0.1, 0.1), (0.15, 0.18)))
    assert "median sync of ours, each over its save" in broken(missed)


def test_both_ways_are_shown_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    show_more(result())
    shown = capsys.readouterr().out
    assert "● adaptersync   ○ TRL   ◉ both" in shown
    found = {line.split("  ")[0].strip(): line.split() for line in shown.splitlines()}
    assert found["trainer blocked by its sync, ms"][-2:] == ["100", "300"]
    assert found["each over its save, median"][-2:] == ["1.00", "3.00"]
    assert found["pauses"] == ["pauses", "0", "in", "62", "syncs", "62", "in", "62", "syncs"]
    assert found["answers of another version"][-3:] == ["0", "nobody", "looks"]
    assert found["beside its save, ms"][-2:] == ["0", "200"]
    assert found["requests without a version's number"][-3:] == ["0", "nobody", "looks"]
