"""The way of one request from replica to replica: who may be asked next, and when there is nobody. Knows no network.

A request is sent to `ATTEMPTS` replicas at most, and to no third where it may be what ended or silenced two. Who is
found at once not to be there was sent nothing, and is passed over: many may die together. While no replica holds its
version any more, though all should, it waits until one does. What a failure says of a replica is for `outages` to know.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from adaptersync.router.outages import Outages
from adaptersync.router.resolve import RETRY_S
from adaptersync.router.table import TableView
from adaptersync_core.errors import Unroutable

ATTEMPTS = 3  # replicas asked for one request
AT_ONCE_S = 0.5  # who is not there, and shows it within this time, costs none of them
ASKED_ANEW = frozenset({"unreachable", "cut"})  # connections that failed say little of a replica
FATAL = frozenset({"cut", "silent"})  # the request may be what ended the engine: one more, and no third


class Elsewhere(Exception):
    """This replica did not do; nothing has reached the client yet. `kind` is a word for the metrics.

    `wait_s` is how long it asked to be left alone.
    """

    def __init__(self, kind: str, reason: str, *, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.kind = kind
        self.wait_s = wait_s


class Leg(Struct, frozen=True):
    """Whom to ask now; without `candidates`, wait for one who may be.

    `trial`: this finds out whether the one candidate is back. `whole`: these are all that are ready. `last`: its answer
    is the client's, whatever it says.
    """

    candidates: Sequence[str]
    trial: bool = False
    whole: bool = False
    last: bool = False


class Course:
    """`wait_s` is the longest that a replica asked to be left alone; `failure` says what the last one did.

    From `until` on the request waits for nobody who has lost its version.
    """

    def __init__(self, view: TableView, outages: Outages, version: str, *, until: float) -> None:
        self._view = view
        self._outages = outages
        self._version = version
        self._until = until
        self._left = ATTEMPTS
        self._anew = False
        self._asked_at = 0.0
        self.tried: set[str] = set()
        self.failure = ""
        self.wait_s = 0.0

    def next(self, now: float) -> Leg | None:
        """None when nobody is left."""
        outages, ready = self._outages, self._view.ready
        self._asked_at = now
        if not self._left:
            return None
        if outages.circuits and not self.failure and (trial := outages.trial(ready, self._version, now)):
            self._left -= 1
            return Leg((trial,), trial=True)
        candidates = outages.candidates(ready, self._version, self.tried, now)
        if not candidates and self._anew:
            candidates = outages.candidates(ready, self._version, (), now)
        if candidates:
            self._left -= 1
            whole, last = len(candidates) == len(ready), not self._left or len(candidates) == 1
            return Leg(candidates, whole=whole, last=last)
        if self.tried or not outages.lacking.any(ready, self._version):
            return None
        return Leg(())

    def failed(self, replica: str, failure: Elsewhere, now: float) -> None:
        self.failure = str(failure)  # the exception would keep all that led to it, the request's body among it
        self.wait_s = max(self.wait_s, failure.wait_s)
        self._anew = failure.kind in ASKED_ANEW
        if failure.kind == "missing_version":
            # whoever lacks it is not asked again before its agent has confirmed it: this ends in time
            self._left += now < self._until
            return
        if failure.kind == "unreachable" and now - self._asked_at < AT_ONCE_S:
            self._left += replica not in self.tried  # each of them once: this ends
        self.tried.add(replica)
        if failure.kind in FATAL:
            self._left = min(self._left, 1)

    def end(self) -> Unroutable:
        """Why nobody is left."""
        if not self.failure:
            return Unroutable("no replica is ready for this", status=503, retry_after_s=RETRY_S, version=self._version)
        return Unroutable(
            f"no replica could answer: {self.failure}",
            status=503,
            retry_after_s=max(RETRY_S, self.wait_s),
            version=self._version,
        )
