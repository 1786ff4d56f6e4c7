"""What became of rollouts, on its way from the trainer to the `fates` stream.

    publisher.rollouts.trained(request_ids, step=7)
    publisher.rollouts.dropped(request_ids, "too old", step=7)

A request's id is in its answer's `x-adaptersync-request-id`. Said by any thread and written by the publisher's own,
within a second; while Redis is away the latest `WAITING` wait. Nothing waits for it: what is not told is unknown.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from adaptersync_core.fates import DROPPED, TRAINED, in_entries, write_fates
from adaptersync_core.registry import Registry

WAITING = 65_536  # requests: some 10 MB
AT_ONCE = 4096  # requests of one write
REASON = 200  # characters of a reason that are kept
MENTIONED = 1024  # that one sample tells of beside its own

log = logging.getLogger(__name__)


class Written(int):
    """The number of the version that wrote a sample, as TRL carries it from the rollout process to the trainer.

    With it come the ids of the `requests` that it was made of, and those that were `dropped` meanwhile, with reasons.
    """

    requests: tuple[str, ...] = ()
    dropped: tuple[tuple[str, str], ...] = ()


def written(seq: int, requests: Iterable[str]) -> Written:
    found = Written(seq)
    found.requests = tuple(requests)
    return found


def tag(samples: Sequence[Any], rollouts: Sequence[str], written_by: dict[str, Written]) -> Sequence[Any]:
    """Let each sample say what wrote it, by the rollout that it is of; these are then forgotten."""
    for sample, rollout in zip(samples, rollouts, strict=True):
        sample.model_version = written_by[rollout]
    for rollout in set(rollouts):
        del written_by[rollout]
    return samples


class Dropped:
    """Requests that gave no sample, in the rollout process: the next sample takes them along."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, str]] = deque(maxlen=WAITING)

    def note(self, requests: Iterable[str], reason: str) -> None:
        self._waiting.extend((name, reason[:REASON]) for name in requests if name)

    def ride(self, samples: Sequence[Any]) -> Sequence[Any]:
        """With the first of these, whose `model_version` is a `Written`."""
        if samples and self._waiting:
            first = samples[0]
            first.model_version = written(first.model_version, first.model_version.requests)  # others may share it
            first.model_version.dropped = tuple(
                self._waiting.popleft() for _ in range(min(len(self._waiting), MENTIONED))
            )
        return samples


class RolloutFates:
    """Of one publisher's run."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, str, int, str]] = deque()
        self._lock = threading.Lock()
        self._lost = 0

    def trained(self, requests: Iterable[str], *, step: int = 0) -> None:
        self._say((name, TRAINED, step, "") for name in requests)

    def dropped(self, requests: Iterable[str], reason: str, *, step: int = 0) -> None:
        self._say((name, DROPPED, step, reason) for name in requests)

    def _say(self, told: Iterable[tuple[str, str, int, str]]) -> None:
        with self._lock:
            self._waiting.extend(told)
            while len(self._waiting) > WAITING:
                self._waiting.popleft()
                self._lost += 1

    async def write(self, registry: Registry, run: str, epoch: int) -> None:
        """All that waits. ControlError when it could not be; then it waits on, and some of it may be written twice."""
        while self._waiting:
            with self._lock:
                batch = list(islice(self._waiting, AT_ONCE))
                lost, self._lost = self._lost, 0
            if lost:
                log.warning("what became of %d rollouts is lost: Redis was away for too long", lost)
            entries = in_entries(run, epoch, batch)
            stream = registry.keys.fates
            await registry.client.pipeline([("XADD", stream, "*", *write_fates(entry)) for entry in entries])
            with self._lock:
                for told in batch:
                    if self._waiting and self._waiting[0] == told:  # or it has given way meanwhile
                        self._waiting.popleft()
