"""The rollout queue as the trainer reads it: each sample's age is counted in syncs."""

from __future__ import annotations

import queue
from typing import Any, Protocol

from adaptersync.trainer.pace import Pace


class Queue(Protocol):
    def get(self, block: bool = True, timeout: float | None = None) -> Any: ...
    def qsize(self) -> int: ...


class Samples:
    """What TRL reads of a queue. The rollout process tags samples with the number of the version that wrote them."""

    def __init__(self, samples: Queue, pace: Pace) -> None:
        self._samples = samples
        self._pace = pace

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        try:
            sample = self._samples.get(block, timeout)
        except queue.Empty:
            self._pace.check()
            raise
        sample.model_version = self._pace.sync_of(sample.model_version)
        return sample

    def qsize(self) -> int:
        return self._samples.qsize()
