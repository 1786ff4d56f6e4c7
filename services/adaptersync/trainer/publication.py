"""A published version, and what became of it."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Literal

from msgspec import Struct

from adaptersync_core.errors import PublicationFailed
from adaptersync_core.manifest import Manifest
from adaptersync_core.records import Want


class Outcome(Struct, frozen=True, kw_only=True):
    """What became of a version. `current` says that it was promoted, even if another has followed since.

    `want` says what the fleet lacked for one that was rolled back although nobody found it bad: room, or time.
    Of what was submitted and never published: `replaced` by something newer, or `failed`.
    """

    state: Literal["current", "superseded", "rolled_back", "voided", "replaced", "failed"]
    reason: str = ""
    want: Want = ""


class Publication:
    """A published version."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.adapter_id = manifest.adapter_id
        self.seq = manifest.seq
        self.digest = manifest.digest
        self.timings = dict(manifest.timings)  # and, as they become known, `stored_s` and `promoted_s`
        self._announced_at = 0.0
        self._settled: Future[Outcome] = Future()

    @property
    def outcome(self) -> Outcome | None:
        """None while the fleet is still at it, and when its publisher was closed before it was known."""
        return None if not self._settled.done() or self._settled.exception() else self._settled.result()

    def wait(self, timeout_s: float) -> Outcome:
        """The outcome; PublicationFailed when there is none in time, or nobody looks for it any more."""
        try:
            return self._settled.result(timeout_s)
        except TimeoutError:
            raise PublicationFailed(
                f"no outcome in {timeout_s:g} s",
                next_step="look at adaptersync status: is a coordinator leading, are replicas ready?",
                version=self.adapter_id,
            ) from None

    def announced(self, stored_s: float) -> None:
        self._announced_at = time.monotonic()
        self.timings["stored_s"] = stored_s

    def settle(self, outcome: Outcome) -> None:
        if not self._settled.done():
            if outcome.state == "current":
                self.timings["promoted_s"] = time.monotonic() - self._announced_at
            self._settled.set_result(outcome)

    def abandon(self) -> None:
        if not self._settled.done():
            reason = "publisher was closed before the outcome was known"
            self._settled.set_exception(PublicationFailed(reason, version=self.adapter_id))
