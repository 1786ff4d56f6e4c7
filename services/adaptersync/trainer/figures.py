"""What a trainer says of its own time with each version it publishes, under the names of `Manifest`.

Knows what a sync, a step and TRL's figures are; knows nothing of torch, files or Redis. Durations are of one monotonic
clock, this process's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# TRL's name → ours. TRL has reduced them to means over what it logged: of a step, a group, a sample, a look.
TIMINGS = {
    "rollout/score_s": "score_s",
    "sample/time_in_queue_s": "sample_queue_s",
    "rollout/backpressure_s": "backpressure_s",
}
LOAD = {"rollout/inflight": "inflight", "sample/rollout_queue_size": "queued"}
WAIT = "perf/rollout_wait_s"


class Figures:
    """`inflight_max` rollouts may be under way, and `queued_max` samples wait; 0 or less where there is no limit."""

    def __init__(
        self, *, inflight_max: int = 0, queued_max: int = 0, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = {"inflight_max": inflight_max, "queued_max": queued_max}
        self._monotonic = monotonic
        self._ended: float | None = None
        self._step = 0
        self._of_sync: dict[str, float] = {}
        self._logged: dict[str, float] = {}
        self._wait_s: float | None = None

    @contextlib.contextmanager
    def sync(self) -> Iterator[None]:
        """Around all that keeps training from its next step: what lies between two of these is training."""
        began = self._monotonic()
        if self._ended is not None:
            self._of_sync["step_s"] = began - self._ended
        try:
            yield
        finally:
            self._ended = self._monotonic()
            self._of_sync["sync_s"] = self._ended - began

    def logged(self, logs: Mapping[str, Any]) -> None:
        """What TRL logs, once it has put the rollout process's figures in. What it no longer says is forgotten."""
        self._logged = {name: float(logs[name]) for name in (*TIMINGS, *LOAD) if logs.get(name) is not None}
        if logs.get(WAIT) is not None:
            self._wait_s = float(logs[WAIT])

    def timings(self, step: int) -> dict[str, float]:
        """Of the version that is saved after `step`. Waits are those of the steps last logged."""
        steps, self._step = step - self._step, step
        told = {ours: self._logged[theirs] for theirs, ours in TIMINGS.items() if theirs in self._logged}
        if self._wait_s is not None and steps > 0:
            told["rollout_wait_s"] = self._wait_s * steps
        return self._of_sync | told

    def load(self) -> dict[str, float]:
        """A limit without what is held against it says nothing, and the other way round."""
        told: dict[str, float] = {}
        for theirs, ours in LOAD.items():
            limit = self._limits[f"{ours}_max"]
            if theirs in self._logged and limit > 0:
                told |= {ours: self._logged[theirs], f"{ours}_max": float(limit)}
        return told


class Saving:
    """A model as TRL's saving sees it; notes when it has been gathered from all processes, and is written."""

    def __init__(self, model: Any, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._model = model
        self._monotonic = monotonic
        self._began = monotonic()
        self._gathered_at: float | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        self._gathered_at = self._monotonic()
        return self._model.save_pretrained(*args, **kwargs)

    def timings(self) -> dict[str, float]:
        """Once it is saved; a process that does not write has gathered only."""
        if self._gathered_at is None:
            return {"gather_s": self._monotonic() - self._began}
        return {"gather_s": self._gathered_at - self._began, "save_s": self._monotonic() - self._gathered_at}
