"""What a trainer says of its own time."""

from __future__ import annotations

import pytest

from adaptersync.trainer.figures import Figures, Saving


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_step_is_what_lies_between_two_syncs() -> None:
    clock = Clock()
    figures = Figures(monotonic=clock)
    with figures.sync():
        clock.now += 1.0
        assert figures.timings(0) == {}  # of the first version nothing went before
    clock.now += 5.0
    with figures.sync():
        clock.now += 2.0
        assert figures.timings(1) == {"step_s": 5.0, "sync_s": 1.0}
    clock.now += 7.0
    with figures.sync():
        assert figures.timings(2) == {"step_s": 7.0, "sync_s": 2.0}


def test_a_sync_that_fails_has_held_training_up_all_the_same() -> None:
    clock = Clock()
    figures = Figures(monotonic=clock)

    def fail() -> None:
        with figures.sync():
            clock.now += 3.0
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert figures.timings(1)["sync_s"] == 3.0


def test_waits_are_of_all_steps_since_the_version_before() -> None:
    figures = Figures()
    figures.timings(4)
    figures.logged({"perf/rollout_wait_s": 0.5, "rollout/score_s": 0.25, "sample/time_in_queue_s": 2.0})
    assert figures.timings(6) == {"rollout_wait_s": 1.0, "score_s": 0.25, "sample_queue_s": 2.0}
    figures.logged({"perf/rollout_wait_s": None, "rollout/backpressure_s": 0.1})  # TRL's None: nothing was measured
    assert figures.timings(7) == {"rollout_wait_s": 0.5, "backpressure_s": 0.1}
    assert "rollout_wait_s" not in figures.timings(7)  # no step, no wait


def test_a_load_is_told_with_its_limit_or_not_at_all() -> None:
    logs = {"rollout/inflight": 30.0, "sample/rollout_queue_size": 7.0}
    figures = Figures(inflight_max=32)
    assert figures.load() == {}
    figures.logged(logs)
    assert figures.load() == {"inflight": 30.0, "inflight_max": 32.0}
    figures = Figures(inflight_max=32, queued_max=64)
    figures.logged(logs)
    assert figures.load() == {"inflight": 30.0, "inflight_max": 32.0, "queued": 7.0, "queued_max": 64.0}


class Model:
    name = "model"

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def save_pretrained(self, directory: str, *, safe: bool) -> str:
        self._clock.now += 3.0
        return f"{directory} {safe}"


def test_gathering_ends_where_saving_begins() -> None:
    clock = Clock()
    saving = Saving(Model(clock), monotonic=clock)
    clock.now += 2.0
    assert saving.save_pretrained("out", safe=True) == "out True"
    assert saving.name == "model"
    assert saving.timings() == {"gather_s": 2.0, "save_s": 3.0}


def test_a_process_that_does_not_write_has_gathered_only() -> None:
    clock = Clock()
    saving = Saving(Model(clock), monotonic=clock)
    clock.now += 2.0
    assert saving.timings() == {"gather_s": 2.0}
