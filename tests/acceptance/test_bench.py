"""Benches measure what they say, small and quickly; how large the figures are is not judged here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from adaptersync_core.events import PHASES
from adaptersync_tools.bench import decision, engine, promotion, training
from adaptersync_tools.bench.result import Figure, Result
from adaptersync_tools.demo.synthetic import SMALL
from adaptersync_tools.demo.train import GENERATIONS
from adaptersync_tools.engines import EngineSettings, simulator_spec
from adaptersync_tools.supervisor import Spec
from adaptersync_tools.up import Progress, StackSettings
from support.processes import family
from support.tiny_model import build_tiny_model
from support.trainers import roomy_model
from support.wait import wait_until_sync

pytestmark = pytest.mark.timeout(150)

VISIBLE_S, BLIND_S = 0.5, 4.0
BEGUN_S = GONE_S = 60.0


def figure(result: Result, name: str) -> Figure:
    (found,) = (each for each in result.figures if each.name == name)
    assert found.samples_s
    return found


def p50(result: Result, name: str) -> float:
    return figure(result, name).p50_s


def test_promotion(tmp_path: Path) -> None:
    settings = promotion.Settings(
        publications=1, replicas=2, visible_s=VISIBLE_S, blind_s=(BLIND_S,), sizes=SMALL, every_s=0.1
    )
    result = promotion.run(settings, tmp_path, Progress())
    assert p50(result, "fast lane, blind 4 s") < p50(result, "polling, blind 4 s")
    assert p50(result, "polling, blind 4 s") >= BLIND_S
    assert p50(result, "mount alone, blind 4 s") >= VISIBLE_S
    assert not result.targets  # nothing is promised for a blind time of 4 s
    assert family(tmp_path) == []


def test_decision(tmp_path: Path) -> None:
    result = decision.run(decision.Settings(replicas=(2, 5), promotions=2, rounds=1), tmp_path, Progress())
    for name in ("2 replicas", "5 replicas"):
        assert 0 < p50(result, name) < 10
    assert [len(each.samples_s) for each in result.figures] == [2] * 8
    (target,) = result.targets
    assert target.value == pytest.approx(p50(result, "5 replicas") / p50(result, "2 replicas"))
    assert family(tmp_path) == []


@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_engine(tmp_path: Path) -> None:
    """On one real engine: what its gaps and rates are is not judged, that they are measured and nobody pauses it is."""
    model = build_tiny_model(tmp_path / "model")
    # enough answers, long enough: some token must come on either side of a load
    settings = engine.Settings(replicas=1, concurrency=4, answer_tokens=64, repeats=2, rounds=1, step_s=2.0)
    result = engine.run(settings, model, tmp_path / "bench", Progress())
    assert figure(result, "replica-0, load").max_s > 0
    assert {each.name.removeprefix("replica-0, ") for each in result.figures} >= {"proof", "unload", "before load"}
    kept = {target.name: target.kept for target in result.targets}
    assert kept["pauses sent to engines"]
    assert kept["answers that failed"]
    assert result.proofs["content: proved"] == settings.repeats
    paced, hurried = result.promotions
    assert paced.promotions == 1
    assert hurried.promotions >= 1
    assert paced.steady_tokens_per_s > 0
    assert paced.engine_cpu is not None
    assert set(result.phases["replica-0"]) == set(PHASES)
    assert family(tmp_path) == []


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "adaptersync_tools.cli", "bench", "promotion", "--keep", str(tmp_path / "bench")]
    with log.open("wb") as output:
        bench = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "BENCH_IN": str(tmp_path)})
    try:
        wait_until_sync(lambda: "fast lane, blind 30 s" in log.read_text(), timeout_s=BEGUN_S)
        bench.send_signal(signal.SIGINT)
        assert bench.wait(GONE_S) == 130
        wait_until_sync(lambda: not family(tmp_path), timeout_s=GONE_S)
    finally:
        bench.kill()
        bench.wait()


@pytest.mark.trl
@pytest.mark.timeout(500)
def test_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both trainers as they are, on engines that are simulated: what is learnt is not judged, that both train is.

    On real engines ours is what the quickstart's test runs; both are what the command is for.
    """
    monkeypatch.setattr(training, "plain_spec", simulated_spec)
    monkeypatch.setattr(training, "StackSettings", partial(StackSettings, simulated=True))
    monkeypatch.setattr(training, "pauses_in_logs", lambda _: 0)  # only vLLM's logs tell
    settings = training.Settings(steps=2, repeats=1, prompts=16)
    result = training.run(settings, roomy_model(tmp_path / "model"), tmp_path / "bench", Progress())
    theirs, ours = result.runs
    assert [(each.way, [step["step"] for step in each.steps]) for each in (theirs, ours)] == [
        ("TRL", [1, 2]),
        ("adaptersync", [1, 2]),
    ]
    assert all(step["sync_s"] > step["save_s"] + step["pause_s"] > step["save_s"] for step in theirs.steps)
    assert "promotion_wait_s" not in theirs.steps[0]
    assert ours.steps[-1]["promoted"]
    assert ours.answers is not None
    assert ours.answers >= 2 * 16 * GENERATIONS
    assert (ours.wrong_version, ours.substituted, ours.unnumbered, theirs.wrong_version) == (0, 0, 0, None)
    assert figure(result, "step, TRL").max_s > 0
    assert family(tmp_path) == []


def simulated_spec(settings: EngineSettings, *, port: int, gpus: int) -> Spec:
    return simulator_spec(settings, number=gpus, port=port, token_file=None)
