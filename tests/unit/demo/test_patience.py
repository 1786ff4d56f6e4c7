"""How long a training is waited for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from adaptersync_core.config import load_config
from adaptersync_tools import quickstart
from adaptersync_tools.bench.training import Bench, Settings
from adaptersync_tools.demo import patience
from adaptersync_tools.demo.lessons import CARRY
from adaptersync_tools.demo.patience import START_S, Patience
from adaptersync_tools.quickstart import Tour
from adaptersync_tools.servers import HOST
from adaptersync_tools.supervisor import Service, StackFailed
from adaptersync_tools.up import Progress, Stack, free_ports

LOG = Path("train.log")


def test_a_start_may_take_minutes_and_a_step_its_own_time() -> None:
    now = 0.0
    waiting = Patience(60.0, LOG, clock=lambda: now)
    now = START_S + 60.0  # torch, TRL, the engines' first adapter, and the step
    waiting.look(0)
    now += 1.0
    with pytest.raises(StackFailed, match=r"for 661 s, .* step 1 \(log=train.log\).*start again.*base model is kept"):
        waiting.look(0)
    waiting.look(1)
    now += 60.0
    waiting.look(1)
    now += 1.0
    with pytest.raises(StackFailed, match="no step for 61 s, and was waited for to make step 2"):
        waiting.look(1)
    waiting.look(3)
    now += 60.0
    waiting.look(3)


class Training:
    """One that makes no step until it ends well."""

    log_path = LOG

    def __init__(self) -> None:
        self.asked = 0

    @property
    def returncode(self) -> int | None:
        self.asked += 1
        return 0 if self.asked > 3 else None


def watched_by_quickstart(out: Path) -> None:
    (port,) = free_ports(1)
    config = load_config(environment={"ADAPTERSYNC_REDIS__CONTROL_URL": f"redis://{HOST}:{port}/0"})
    stack = SimpleNamespace(run=lambda *_: Training(), check=lambda: None, config=config)
    tour = Tour(steps=3, replicas=1, simulated=True, lesson=CARRY, reward=None, out=out)
    tour._train(cast(Stack, stack), out)


def watched_by_bench(out: Path) -> None:
    bench = Bench(Settings(), out, Progress())
    bench._watched(cast(Service, Training()), out, lambda: None, "ours")


@pytest.mark.parametrize("watched", [watched_by_quickstart, watched_by_bench])
def test_who_watches_a_training_has_this_patience(
    watched: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quickstart, "LOOK_S", 0.0)
    watched(tmp_path)
    monkeypatch.setattr(patience, "START_S", -CARRY.step_s - 1.0)
    with pytest.raises(StackFailed, match="was waited for to make step 1"):
        watched(tmp_path)
