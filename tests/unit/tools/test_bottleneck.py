"""From figures to what limits a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from adaptersync_core.records import RequestTimes
from adaptersync_tools.bottleneck import LEAST, Figures, figures, judge
from adaptersync_tools.phases import Rollouts
from support.artifacts import manifest_of, small_adapter


def told(trained_s: float, sync_s: float, wait_s: float, **more: Any) -> Figures:
    return Figures(versions=10, steps=10, trained_s=trained_s, sync_s=sync_s, wait_s=wait_s, **more)


CAPPED = {"inflight": 31.0, "inflight_max": 32.0}
ROOM = {"inflight": 8.0, "inflight_max": 32.0}


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        (told(9, 0.5, 0.5), "trainer"),
        (told(2, 7, 1), "sync"),
        (told(2, 1, 7), "generation"),
        (told(2, 1, 7, **ROOM, engine_queue=0.0), "generation"),
        (told(2, 1, 7, **CAPPED, engine_queue=0.5), "generation"),
        (told(2, 1, 7, **CAPPED, engine_queue=0.01), "in-flight"),
        (told(2, 1, 7, **CAPPED), "unknown"),  # whether engines have room is what it hangs on
        (told(9, 0, 1, **CAPPED, engine_queue=0.0), "trainer"),  # nobody waits for what is capped
        (told(2, 1, 7, rollouts=100, refused_full=20), "in-flight"),
        (told(2, 1, 7, rollouts=100, refused_full=1), "generation"),
        (told(2, 1, 7, held=0.8), "sync"),
        (told(2, 1, 7, held=0.1), "generation"),
        (told(9, 0.5, 0.5, held=1.0), "trainer"),
        (told(3.5, 3.2, 3.3), "balanced"),
        (told(0, 0, 0), "unknown"),
        (Figures(), "unknown"),
        (replace(told(9, 0.5, 0.5), versions=LEAST - 1), "unknown"),
        (replace(told(9, 0.5, 0.5), versions=LEAST), "trainer"),
    ],
)
def test_what_the_trainer_waits_for_limits_the_run(given: Figures, limit: str) -> None:
    verdict = judge(given)
    assert verdict.limit == limit
    assert verdict.says
    assert verdict.evidence
    assert verdict.change


def test_what_to_change_first() -> None:
    assert judge(told(2, 1, 7)).change[0] == "more replicas, or faster ones"
    assert judge(told(2, 1, 7, engine_queue=0.0)).change[0].startswith("a larger in-flight limit, if")
    assert "weight_sync_steps" in judge(told(2, 7, 1)).change[0]
    assert judge(told(2, 7, 1, phase="loaded", phase_s=0.25)).change[0].startswith("look at `loaded`")
    assert len(judge(told(9, 0.2, 0.5)).change) == 1
    rarely = replace(told(9, 0.2, 0.5), steps=40)  # four steps a sync
    assert "smaller sync interval" in judge(rarely).change[1]
    assert len(judge(replace(rarely, sync_s=2.0)).change) == 1  # where a sync costs something it is not proposed


def test_the_evidence_says_what_was_gone_by() -> None:
    verdict = judge(told(2, 1, 7, **CAPPED, queued=3.0, queued_max=64.0, engine_requests=40, engine_queue=0.02))
    assert verdict.evidence == [
        "10.0 s of the trainer, over 10 versions: 20% trained, 10% held up by syncs, 70% waited for rollouts",
        "31 of at most 32 rollouts were in flight",
        "3 of at most 64 samples waited for the trainer",
        "of the time that the latest 40 requests spent in engines, they queued 2%",
    ]
    assert verdict.shares == {"training": 0.2, "sync": 0.1, "rollouts": 0.7}
    held = judge(told(2, 1, 7, held=0.8, backpressure_s=0.5)).evidence
    assert "held for a version for 80% of their time" in held[1]
    assert "waited 500 ms each" in held[2]


def test_figures_are_of_versions_whose_trainer_says_all_of_it(tmp_path: Path) -> None:
    made = manifest_of(small_adapter(tmp_path))
    timings = {"step_s": 4.0, "sync_s": 1.0, "rollout_wait_s": 3.0}
    load = {"inflight": 8.0, "inflight_max": 16.0}
    telling = [replace(made, seq=seq, step=2 * seq, timings=timings, load=load) for seq in (2, 3)]
    silent = [replace(made, seq=1), replace(made, seq=4, timings={"step_s": 400.0, "sync_s": 1.0})]
    served = [
        RequestTimes(requests=4, queue_s=1.0, prefill_s=1.0, decode_s=2.0),
        RequestTimes(requests=1, decode_s=4.0),
        RequestTimes(),
    ]
    found = figures([silent[0], *telling, silent[1]], [], Rollouts([]), served)
    assert found == Figures(
        versions=2,
        steps=2,
        trained_s=2.0,
        sync_s=2.0,
        wait_s=6.0,
        inflight=8.0,
        inflight_max=16.0,
        engine_requests=5,
        engine_queue=0.125,
    )


def test_a_wait_logged_of_other_steps_does_not_make_training_less_than_nothing(tmp_path: Path) -> None:
    timings = {"step_s": 4.0, "sync_s": 1.0, "rollout_wait_s": 5.0}
    made = replace(manifest_of(small_adapter(tmp_path)), timings=timings)
    found = figures([made], [], Rollouts([]), [])
    assert (found.trained_s, found.wait_s) == (0.0, 4.0)
