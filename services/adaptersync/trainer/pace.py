"""How far training may run ahead of the fleet.

Two clocks tick apart: what the trainer has published, and what the fleet has promoted. TRL drops a sample that is
more than `max_staleness` publications old, so a trainer that ran further ahead than that would drop everything it
gets, for ever. Knows the waiting rule and the counts; knows nothing of TRL, files or Redis.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from adaptersync_core.errors import PublicationFailed

logger = logging.getLogger(__name__)


class Outcome(Protocol):
    @property
    def state(self) -> str: ...
    @property
    def reason(self) -> str: ...


class Publication(Protocol):
    @property
    def adapter_id(self) -> str: ...
    @property
    def seq(self) -> int: ...
    @property
    def outcome(self) -> Outcome | None: ...
    def wait(self, timeout_s: float) -> Outcome:
        """PublicationFailed when there is no outcome in time."""
        ...


@dataclass(slots=True)
class Counts:
    """What became of this trainer's versions, and of the answers its rollouts got."""

    published: int = 0
    promoted: int = 0
    superseded: int = 0
    rolled_back: int = 0
    served_mismatch: int = 0  # answers that came from another version than was asked for, never trained on
    repinned: int = 0  # conversations whose version was withdrawn under them

    def add(self, state: str) -> None:
        if state == "current":
            self.promoted += 1
        elif state == "superseded":
            self.superseded += 1
        else:
            self.rolled_back += 1


P = TypeVar("P", bound=Publication)


class Pace(Generic[P]):
    """Holds the trainer back after a publication, only as long as its next samples would be too old.

    With `max_staleness` S it lets the trainer be S - 1 publications ahead, so that a sample may still age by one
    while it waits in TRL's queue; S = 0 and S = 1 wait for every promotion.
    """

    def __init__(
        self,
        promoted: Callable[[], int | None],
        *,
        max_staleness: int,
        timeout_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = Counts()
        self._promoted = promoted
        self._max_staleness = max_staleness
        self._timeout_s = timeout_s
        self._monotonic = monotonic
        self._undecided: deque[P] = deque()  # at most max_staleness + 1 long: `published` waits
        self._newest: P | None = None

    @property
    def newest(self) -> P | None:
        return self._newest

    def published(self, publication: P) -> float:
        """Take note of a publication and wait as the rule says; seconds waited.

        PublicationFailed when the fleet serves nothing fresh enough to train on: it did not answer in time, or it
        refused version after version.
        """
        self._newest = publication
        self.counts.published += 1
        self._undecided.append(publication)
        return self._wait(allowed=max(self._max_staleness - 1, 0))

    def settle(self) -> None:
        """Wait for the outcome of everything published. Training is over: what is late is only logged."""
        deadline = self._monotonic() + self._timeout_s
        try:
            while self._undecided:
                self._decide_oldest(deadline - self._monotonic())
        except PublicationFailed as late:
            logger.warning("training is over, and the fleet has not decided: %s", late)

    def _wait(self, allowed: int) -> float:
        started = self._monotonic()
        deadline = started + self._timeout_s
        while self._undecided and (self._undecided[0].outcome is not None or self._behind() > allowed):
            self._decide_oldest(deadline - self._monotonic())
        if self._behind() > self._max_staleness:
            promoted, newest = self._promoted(), self._newest
            served = "no version of this run" if promoted is None else f"version {promoted}"
            why = newest.outcome.reason if newest and newest.outcome else ""
            raise PublicationFailed(
                f"the fleet serves {served} and took none of the versions since"
                f"{f' ({why})' if why else ''}: what it generates is too old to train on",
                next_step="mend the cause and train on from the last checkpoint",
                version=newest.adapter_id if newest else None,
                max_staleness=self._max_staleness,
            )
        return self._monotonic() - started

    def _behind(self) -> float:
        """Publications the fleet is behind; infinite while it serves none of them."""
        promoted = self._promoted()
        if promoted is None or self._newest is None:
            return float("inf")
        return self._newest.seq - promoted

    def _decide_oldest(self, timeout_s: float) -> None:
        publication = self._undecided[0]
        outcome = publication.outcome or publication.wait(max(timeout_s, 0.0))
        self._undecided.popleft()
        self.counts.add(outcome.state)
        if outcome.state not in ("current", "superseded"):
            logger.warning("%s was %s: %s", publication.adapter_id, outcome.state, outcome.reason)
