"""The rollout queue as the trainer reads it: each sample's age is counted in syncs, and its fate is told."""

from __future__ import annotations

import queue
from typing import Any, Protocol

from adaptersync.trainer.fates import RolloutFates, Written
from adaptersync.trainer.pace import Pace

TOO_OLD = "too old"
TOO_LONG = "longer than token_budget"


class Queue(Protocol):
    def get(self, block: bool = True, timeout: float | None = None) -> Any: ...
    def qsize(self) -> int: ...


class Trainer(Protocol):
    """What is asked of TRL's: its optimizer step, and how many tokens of a sample it takes."""

    @property
    def state(self) -> Any: ...
    @property
    def args(self) -> Any: ...


class Samples:
    """What TRL reads of a queue. The rollout process tags samples with the number of the version that wrote them.

    TRL takes a sample up, or drops it by the same two rules, right after it was read here. So what is told is that it
    was taken up: a micro-batch that training ended before, and one that was prefetched, count as trained.
    """

    def __init__(
        self,
        samples: Queue,
        pace: Pace,
        fates: RolloutFates | None = None,
        trainer: Trainer | None = None,
    ) -> None:
        self._samples = samples
        self._pace = pace
        self._fates = fates
        self._trainer = trainer

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        try:
            sample = self._samples.get(block, timeout)
        except queue.Empty:
            self._pace.check()
            raise
        wrote = sample.model_version
        sample.model_version = self._pace.sync_of(wrote)
        if self._fates is not None and self._trainer is not None and isinstance(wrote, Written):
            self._tell(self._fates, self._trainer, wrote, sample)
        return sample

    def qsize(self) -> int:
        return self._samples.qsize()

    def _tell(self, fates: RolloutFates, trainer: Trainer, wrote: Written, sample: Any) -> None:
        step, budget = trainer.state.global_step, trainer.args.token_budget
        for request_id, reason in wrote.dropped:
            fates.dropped((request_id,), reason, step=step)
        if self._pace.too_old(sample.model_version):
            fates.dropped(wrote.requests, TOO_OLD, step=step)
        elif budget and len(sample.input_ids) > budget:
            fates.dropped(wrote.requests, TOO_LONG, step=step)
        else:
            fates.trained(wrote.requests, step=step)
