"""How far training may run ahead of the fleet, and how old a sample is.

Two clocks tick apart: what was trained, and what the fleet serves. The first is TRL's own and counts syncs, the
moments at which an adapter is handed over for publication. The second is a sequence number: that of the version last
promoted, and of the one that wrote a sample. Numbers have gaps, and not every sync gets one (a newer adapter may
replace it before it is published), so ages are counted in syncs alone, and this keeps which version is of which.

TRL drops a sample that is more than `max_staleness` syncs old, so a trainer that ran further ahead than that would drop
everything it gets, for ever. Knows the waiting rule and the counts; knows nothing of TRL, files or Redis.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from adaptersync.trainer.submissions import Submission
from adaptersync_core.errors import AdapterSyncError, PublicationFailed

logger = logging.getLogger(__name__)

NEVER = -(1 << 31)  # the sync of a version that is none of this trainer's, or long past: older than anything may be


@dataclass(slots=True)
class Counts:
    """What became of this trainer's versions, and of the answers its rollouts got."""

    published: int = 0  # handed over for it; those that came to nothing are `replaced` or `failed`
    promoted: int = 0
    superseded: int = 0
    rolled_back: int = 0
    replaced: int = 0
    failed: int = 0
    served_mismatch: int = 0  # answers that came from another version than was asked for, never trained on
    repinned: int = 0  # conversations whose version was withdrawn under them
    doomed: int = 0  # conversations cut off and begun again, too old to be trained on

    def add(self, state: str) -> None:
        match state:
            case "current":
                self.promoted += 1
            case "superseded" | "replaced" | "failed":
                setattr(self, state, getattr(self, state) + 1)
            case _:
                self.rolled_back += 1


class Pace:
    """Holds the trainer back after a sync, only as long as its next samples would be too old.

    With `max_staleness` S it lets the trainer be S - 1 syncs ahead, so that a sample may still age by one while it
    waits in TRL's queue; S = 0 and S = 1 wait for every promotion. All of it is called by the training thread.
    """

    def __init__(
        self,
        promoted: Callable[[], int | None],
        *,
        max_staleness: int,
        timeout_s: float,
        counts: Counts | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = counts or Counts()
        self._promoted = promoted
        self._max_staleness = max_staleness
        self._timeout_s = timeout_s
        self._monotonic = monotonic
        self._clock = 0
        self._undecided: deque[tuple[int, Submission]] = deque()  # at most max_staleness + 1 long: `wait` sees to it
        self._syncs: dict[int, int] = {}  # number of a promoted version → its sync, oldest first
        self._newest: Submission | None = None
        self._failure = ""  # of the version last decided, unless it was promoted
        self._too_old_since: float | None = None

    @property
    def newest(self) -> Submission | None:
        return self._newest

    def submitted(self, clock: int, submission: Submission) -> None:
        """Sync number `clock` handed over `submission`."""
        self._clock = clock
        self._newest = submission
        self.counts.published += 1
        self._undecided.append((clock, submission))

    def wait(self) -> float:
        """Wait as the rule says; seconds waited.

        PublicationFailed when the fleet serves nothing fresh enough to train on: it did not answer in time, or it
        refused version after version.
        """
        return self._wait(allowed=max(self._max_staleness - 1, 0))

    def settle(self) -> None:
        """Wait for the outcome of everything submitted. Training is over: what keeps it from coming is only logged."""
        deadline = self._monotonic() + self._timeout_s
        try:
            while self._undecided:
                self._decide_oldest(deadline - self._monotonic())
        except AdapterSyncError as error:
            logger.warning("training is over, and what became of its last versions is not known: %s", error)

    def sync_of(self, seq: int) -> int:
        """The sync a version is of; NEVER when it is none that this trainer may still train on."""
        known = self._syncs.get(seq)
        if known is not None:
            return known
        return next((sync for sync, submission in self._undecided if submission.seq == seq), NEVER)

    def too_old(self, sync: int) -> bool:
        """Whether TRL drops a sample of that sync now."""
        return self._clock - sync > self._max_staleness

    @property
    def ahead(self) -> float:
        """Syncs the fleet is behind; infinite while it serves none of this trainer's versions."""
        promoted = self._promoted()
        sync = NEVER if promoted is None else self.sync_of(promoted)
        return float("inf") if sync == NEVER else self._clock - sync

    @property
    def oldest_useful(self) -> int:
        """The lowest number whose samples would not be dropped if they were trained on now.

        While nothing known is young enough it is one above all that is known: what comes next will be.
        """
        numbers = {**self._syncs, **{one.seq: sync for sync, one in self._undecided if one.seq is not None}}
        useful = [seq for seq, sync in numbers.items() if self._clock - sync <= self._max_staleness]
        return min(useful) if useful else max(numbers, default=0) + 1

    def check(self) -> None:
        """For a trainer that finds no samples; PublicationFailed when none it could use have come for too long."""
        if self.ahead <= self._max_staleness:
            self._too_old_since = None
            return
        now = self._monotonic()
        self._too_old_since = now if self._too_old_since is None else self._too_old_since
        if now - self._too_old_since > self._timeout_s:
            raise self._too_old()

    def _wait(self, allowed: int) -> float:
        started = self._monotonic()
        deadline = started + self._timeout_s
        while self._undecided and (self._undecided[0][1].outcome is not None or self.ahead > allowed):
            self._decide_oldest(deadline - self._monotonic())
        if self.ahead > self._max_staleness:
            raise self._too_old()
        return self._monotonic() - started

    def _too_old(self) -> PublicationFailed:
        promoted, newest = self._promoted(), self._newest
        served = "no version of this run" if promoted is None else f"version {promoted}"
        return PublicationFailed(
            f"the fleet serves {served} and took none of the versions since"
            f"{f' ({self._failure})' if self._failure else ''}: what it generates is too old to train on",
            next_step="mend the cause and train on from the last checkpoint",
            version=newest.adapter_id if newest else None,
            max_staleness=self._max_staleness,
        )

    def _decide_oldest(self, timeout_s: float) -> None:
        sync, submission = self._undecided[0]
        outcome = submission.outcome or submission.wait(max(timeout_s, 0.0))
        self._undecided.popleft()
        self.counts.add(outcome.state)
        if outcome.state == "current" and submission.seq is not None:
            self._syncs[submission.seq] = sync
            while len(self._syncs) > 2 * (self._max_staleness + 2):  # the fleet keeps max_staleness + 1 of them
                del self._syncs[next(iter(self._syncs))]
        self._failure = "" if outcome.state == "current" else outcome.reason
        if outcome.state in ("rolled_back", "voided", "failed"):
            logger.warning("%s was %s: %s", submission.adapter_id, outcome.state.replace("_", " "), outcome.reason)
