"""Which saved adapter is published next, and what becomes of one that could not be.

One is under way and at most one waits. A newer one takes the place of the one that waits, and of one that failed and
is about to be tried again: the fleet would supersede it anyway, rollouts are worth more the newer their policy is, and
a trainer that had to wait for its publisher in turn would be as slow as the store. No order is lost by it, and no
bound: how far training may be ahead counts what was trained (`pace`), not what was published. Knows nothing of files,
threads or Redis.
"""

from __future__ import annotations

import enum
from typing import Generic, TypeVar

from adaptersync_core.errors import AdapterInvalid, AdapterSyncError, Fenced, PublicationFailed

FIRST_REST_S = 1.0  # a publisher has insisted for half a minute itself before it fails
LONGEST_REST_S = 30.0

T = TypeVar("T")


class Disposition(enum.Enum):
    RETRY = "retry"
    SKIP = "skip"  # these bytes would fail again, the next ones need not
    END = "end"  # nothing of this trainer will ever be published again


def disposition(error: Exception) -> Disposition:
    """Servers and stores come back; another trainer does not go away, and neither does a mistake in the code."""
    match error:
        case Fenced() | PublicationFailed():  # the latter: closed
            return Disposition.END
        case AdapterInvalid():
            return Disposition.SKIP
        case AdapterSyncError() | OSError():
            return Disposition.RETRY
        case _:
            return Disposition.END


class Outgoing(Generic[T]):
    """What is under way and what waits. Times are the caller's, monotonic."""

    def __init__(self) -> None:
        self.ended: Exception | None = None
        self._under_way: T | None = None
        self._waiting: T | None = None
        self._attempts = 0
        self._rests_until: float | None = None  # None: it is being published, or nothing is under way

    @property
    def idle(self) -> bool:
        return self._under_way is None and self._waiting is None

    def put(self, item: T) -> T | None:
        """The newest; returns the one it replaces."""
        if self.ended is not None:
            raise self.ended
        if self._rests_until is not None:
            replaced, self._under_way, self._waiting = self._under_way, None, item
            self._rests_until = None
            return replaced
        replaced, self._waiting = self._waiting, item
        return replaced

    def take(self, now: float) -> T | None:
        """What to publish now; None when there is nothing to do before `rest_s`."""
        if self.ended is not None:
            return None
        if self._under_way is None:
            self._under_way, self._waiting = self._waiting, None
            self._attempts = 0
            return self._under_way
        if self._rests_until is None or now < self._rests_until:
            return None
        self._rests_until = None
        return self._under_way

    def rest_s(self, now: float) -> float | None:
        """Seconds until the next attempt; None when only news can change anything."""
        return None if self._rests_until is None else max(self._rests_until - now, 0.0)

    def done(self) -> None:
        """What was taken is published."""
        self._under_way = None

    def failed(self, error: Exception, now: float) -> Disposition | None:
        """What was taken could not be published. None: given up, since a newer one waits."""
        found = disposition(error)
        if found is Disposition.END:
            self.ended = error
        elif found is Disposition.RETRY and self._waiting is None:
            self._rests_until = now + min(FIRST_REST_S * 2**self._attempts, LONGEST_REST_S)
            self._attempts = min(self._attempts + 1, 10)
            return found
        self._under_way = None
        return None if found is Disposition.RETRY else found

    def end(self, error: Exception) -> list[T]:
        """Nothing more is taken; returns what is left, oldest first."""
        self.ended = self.ended or error
        left = [item for item in (self._under_way, self._waiting) if item is not None]
        self._under_way = self._waiting = self._rests_until = None
        return left
