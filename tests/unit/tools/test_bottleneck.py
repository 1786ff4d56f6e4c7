"""From evidence to what limits a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from adaptersync.coordinator.phases import Rollouts, Share
from adaptersync_core.records import DecodeRate, Decoding, ReplicaReport, RequestTimes
from adaptersync_tools.bottleneck import LEAST, Decoded, Evidence, evidence, judge, longest_of_sync
from support.artifacts import manifest_of, small_adapter


def told(trained_s: float, sync_s: float, wait_s: float, **more: Any) -> Evidence:
    return Evidence(versions=10, steps=10, trained_s=trained_s, sync_s=sync_s, wait_s=wait_s, **more)


CAPPED = {"inflight": 31.0, "inflight_max": 32.0}
BELOW = {"inflight": 8.0, "inflight_max": 32.0}
FEWER = Decoded(batch=16, tokens_per_s=800)
GAINS = {"fewer": FEWER, "more": Decoded(batch=32, tokens_per_s=1200)}
GAINS_NOTHING = {"fewer": FEWER, "more": Decoded(batch=32, tokens_per_s=1100)}


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        (told(9, 0.5, 0.5), "trainer"),
        (told(2, 7, 1), "sync"),
        (told(2, 1, 7), "generation or in-flight"),
        (told(2, 1, 7, **CAPPED), "generation or in-flight"),
        (told(2, 1, 7, **CAPPED, engine_queue=0.0), "generation or in-flight"),  # a slow batch queues nobody
        (told(2, 1, 7, **CAPPED, engine_queue=0.0, batch=32, batch_max=256), "generation or in-flight"),
        (told(2, 1, 7, **CAPPED, engine_queue=0.5), "generation"),
        (told(2, 1, 7, **CAPPED, engine_queue=0.5, **GAINS), "generation"),
        (told(2, 1, 7, **CAPPED, engine_queue=0.0, batch=31, batch_max=32, **GAINS), "generation"),
        (told(2, 1, 7, **CAPPED, engine_queue=0.0, **GAINS), "in-flight"),
        (told(2, 1, 7, **CAPPED, engine_queue=0.0, **GAINS_NOTHING), "generation"),
        (told(2, 1, 7, **CAPPED, fewer=FEWER, more=Decoded(batch=160, tokens_per_s=4000)), "generation or in-flight"),
        (told(2, 1, 7, **CAPPED, fewer=FEWER, more=Decoded(batch=160, tokens_per_s=1000)), "generation"),
        (told(2, 1, 7, **GAINS), "in-flight"),
        (told(2, 1, 7, **BELOW, engine_queue=0.0), "generation"),
        (told(2, 1, 7, **BELOW, **GAINS), "generation"),  # more would not be in flight
        (told(9, 0, 1, **CAPPED, engine_queue=0.0), "trainer"),  # nobody waits for what is capped
        (told(2, 1, 7, rollouts=100, refused_full=20), "in-flight"),
        (told(2, 1, 7, rollouts=100, refused_full=1, **GAINS_NOTHING), "generation"),
        (told(2, 1, 7, held=0.8), "sync"),
        (told(2, 1, 7, held=0.1, **GAINS_NOTHING), "generation"),
        (told(9, 0.5, 0.5, held=1.0), "trainer"),
        (told(3.5, 3.2, 3.3), "balanced"),
        (told(0, 0, 0), "unknown"),
        (Evidence(), "unknown"),
        (replace(told(9, 0.5, 0.5), versions=LEAST - 1), "unknown"),
        (replace(told(9, 0.5, 0.5), versions=LEAST), "trainer"),
    ],
)
def test_what_the_trainer_waits_for_limits_the_run(given: Evidence, limit: str) -> None:
    verdict = judge(given)
    assert verdict.limit == limit
    assert verdict.says
    assert verdict.evidence
    assert verdict.change


def test_what_to_change_first() -> None:
    assert judge(told(2, 1, 7, **GAINS_NOTHING)).change == ["more replicas, or faster ones"]
    assert judge(told(2, 1, 7, **CAPPED, **GAINS)).change == [
        "a larger in-flight limit (max_inflight_tasks); then look again"
    ]
    assert judge(told(2, 1, 7, **CAPPED)).change[0].startswith("a larger in-flight limit (max_inflight_tasks), once")
    assert "if the trainer has one" in judge(told(2, 1, 7)).change[0]
    assert "weight_sync_steps" in judge(told(2, 7, 1)).change[0]
    assert judge(told(2, 7, 1, phase="loaded", phase_s=0.25)).change[0].startswith("look at `loaded`")
    assert len(judge(told(9, 0.2, 0.5)).change) == 1
    rarely = replace(told(9, 0.2, 0.5), steps=40)  # four steps a sync
    assert "smaller sync interval" in judge(rarely).change[1]
    assert len(judge(replace(rarely, sync_s=2.0)).change) == 1  # where a sync costs something it is not proposed


def test_the_evidence_says_what_was_gone_by() -> None:
    engines = {"engine_requests": 40, "engine_queue": 0.02, "batch": 30.0, "batch_max": 64.0, **GAINS}
    verdict = judge(told(2, 1, 7, **CAPPED, queued=3.0, queued_max=64.0, **engines))
    assert verdict.evidence == [
        "10.0 s of the trainer, over 10 versions: 20% trained, 10% held up by syncs, 70% waited for rollouts",
        "31 of at most 32 rollouts were in flight",
        "3 of at most 64 samples waited for the trainer",
        "of the time that the latest 40 requests spent in engines, they queued 2%",
        "engines decode 30 of at most 64 sequences at once",
        "with 32 at once they decoded 1200 tokens a second, with 16 800",
    ]
    assert verdict.shares == {"training": 0.2, "sync": 0.1, "rollouts": 0.7}
    held = judge(told(2, 1, 7, held=0.8, backpressure_s=0.5)).evidence
    assert "held for a version for 80% of their time" in held[1]
    assert "waited 500 ms each" in held[2]


def replica(**said: Any) -> ReplicaReport:
    limits: dict[str, Any] = {"max_loras": 4, "max_cpu_loras": 8, "max_lora_rank": 16, "block_size": 16}
    return ReplicaReport(url="http://engine", base_model="base", engine_epoch="1", **limits, **said)


def decoding(now: float, *rates: tuple[float, float], batch_max: int = 64) -> Decoding:
    rated = tuple(DecodeRate(batch=batch, tokens_per_s=tokens, over_s=5.0) for batch, tokens in rates)
    return Decoding(batch=now, batch_max=batch_max, rates=rated)


def seen(*engines: Decoding) -> Evidence:
    return evidence([], [], Rollouts([]), [replica(decoding=each) for each in engines])


def test_engines_are_compared_with_themselves_at_another_batch() -> None:
    found = seen(decoding(30, (15, 600), (30, 900)), decoding(20, (20, 400)))  # one was seen with one size only
    assert (found.batch, found.batch_max) == (50, 128)
    assert (found.fewer, found.more) == (Decoded(batch=15, tokens_per_s=600), Decoded(batch=30, tokens_per_s=900))
    found = seen(decoding(16, (4, 100), (16, 300), (64, 320)))  # what it does with more says more than with fewer
    assert (found.fewer, found.more) == (Decoded(batch=16, tokens_per_s=300), Decoded(batch=64, tokens_per_s=320))
    assert found.gain is not None
    assert found.gain < 0.1
    together = seen(decoding(30, (15, 600), (30, 900)), decoding(10, (4, 100), (10, 100)))
    assert (together.fewer, together.more) == (
        Decoded(batch=19, tokens_per_s=700),
        Decoded(batch=40, tokens_per_s=1000),
    )


def test_sizes_that_are_nearly_the_same_say_nothing() -> None:
    found = seen(decoding(16, (12, 100), (16, 300)))
    assert (found.fewer, found.more, found.gain) == (None, None, None)
    found = seen(Decoding(batch_max=64), decoding(8, (8, 100), batch_max=0))
    assert (found.batch, found.batch_max, found.gain) == (8, None, None)


def test_evidence_is_of_versions_whose_trainer_says_all_of_it(tmp_path: Path) -> None:
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
    found = evidence(
        [silent[0], *telling, silent[1]], [], Rollouts([]), [replica(request_times=each) for each in served]
    )
    assert found == Evidence(
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
    found = evidence([made], [], Rollouts([]), [])
    assert (found.trained_s, found.wait_s) == (0.0, 4.0)


@pytest.mark.parametrize(
    ("save_s", "taken_up_s", "phase"),
    [
        (0.1, 0.7, "loaded"),  # the wait for the one before, which takes as long
        (0.1, 1.6, "taken up"),  # something else keeps it
        (0.8, 0.7, "save"),  # most of a sync of a second and a half
    ],
)
def test_a_wait_for_the_version_before_is_not_what_to_look_at(save_s: float, taken_up_s: float, phase: str) -> None:
    seconds = {"step": 9.0, "save": save_s, "taken up": taken_up_s, "loaded": 0.5, "proved": 0.3, "first token": 5.0}
    phases = [Share(phase=name, count=9, p50_s=took, p95_s=took, share=0.1) for name, took in seconds.items()]
    found = longest_of_sync(phases, sync_s=1.5)
    assert found is not None
    assert found.phase == phase
