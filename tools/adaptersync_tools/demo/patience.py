"""How long a training may go without a step. Knows no trainer: whoever watches one tells which step it has made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import monotonic

from adaptersync_tools.supervisor import StackFailed

START_S = 600.0  # on top of the first step: torch and TRL, and the engines' first adapter, take minutes on busy cores


class Patience:
    """`step_s` is the most that a step may take. `log` says why it took longer, `read` how one comes to see it."""

    def __init__(
        self, step_s: float, log: Path, *, read: str = "read its log", clock: Callable[[], float] = monotonic
    ) -> None:
        self._step_s = step_s
        self._log = log
        self._read = read
        self._clock = clock
        self._step = 0
        self._since = clock()

    def look(self, step: int) -> None:
        """`step` is the last one made, 0 before the first. StackFailed when the next one is overdue."""
        if step > self._step:
            self._step, self._since = step, self._clock()
        limit_s = self._step_s if self._step else START_S + self._step_s
        waited_s = self._clock() - self._since
        if waited_s > limit_s:
            raise StackFailed(
                f"training made no step for {waited_s:.0f} s, and was waited for to make step {self._step + 1}",
                next_step=f"{self._read}; if it tells of no failure this machine was too busy: start again when it "
                "is less so, the base model is kept",
                log=str(self._log),
            )
