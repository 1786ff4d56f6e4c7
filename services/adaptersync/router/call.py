"""One request on its way through the router: what its ledger row will say, and its answer's headers."""

from __future__ import annotations

import time

from adaptersync.router.policy import Choice
from adaptersync.router.resolve import Target
from adaptersync.router.server import Pair, Request
from adaptersync.router.usage import NO_USAGE, Usage
from adaptersync_core import headers
from adaptersync_core.rollouts import LABEL, Row

REASON = 200  # characters of a reason that are kept

_REQUEST_ID = headers.REQUEST_ID.encode()
_VERSION = headers.VERSION.encode()
_REPLICA = headers.REPLICA.encode()
_VOIDED = headers.VOIDED.encode()
_SUBSTITUTED = headers.SUBSTITUTED.encode()


class Call:
    """One request on its way: what its ledger row will say."""

    __slots__ = (
        "asked",
        "attempts",
        "choice",
        "engine_epoch",
        "first_byte_s",
        "gate",
        "generation",
        "hold_s",
        "outcome",
        "path",
        "reason",
        "recorded",
        "request_id",
        "route_s",
        "sent",
        "started",
        "started_at",
        "status",
        "substituted",
        "target",
        "tried",
        "usage",
        "voided",
    )

    def __init__(self, request_id: str, request: Request, *, recorded: bool, gate: bool) -> None:
        self.request_id = request_id
        self.path = request.path
        self.recorded = recorded
        self.gate = gate
        self.substituted = _printable(request.header(_SUBSTITUTED))
        self.sent = False
        self.voided = False
        self.started = time.monotonic()
        self.started_at = time.time()
        self.asked = ""
        self.target: Target | None = None
        self.choice: Choice | None = None
        self.engine_epoch = ""
        self.generation = 0
        self.attempts = 0
        self.tried: list[str] = []
        self.hold_s: float | None = None
        self.route_s: float | None = None
        self.first_byte_s: float | None = None
        self.usage: Usage = NO_USAGE
        self.outcome = "ok"
        self.status = 0
        self.reason = ""

    def headers(self) -> list[Pair]:
        ours = [(_REQUEST_ID, self.request_id.encode())]
        if self.target is not None and self.target.model:
            ours.append((_VERSION, self.target.model.encode()))
        if self.choice is not None:
            ours.append((_REPLICA, self.choice.replica.encode()))
        if self.voided:
            ours.append((_VOIDED, b"1"))
        return ours

    def row(self, router: str, outcome: str, total_s: float | None = None) -> Row:
        """As far as it has come."""
        target, choice, usage = self.target, self.choice, self.usage
        return Row(
            request_id=self.request_id,
            router=router,
            path=self.path,
            asked=self.asked,
            outcome=outcome,
            status=self.status,
            started_at=self.started_at,
            total_s=total_s,
            run=target.run if target else "",
            version=target.model if target else "",
            digest=target.digest if target else "",
            replica=choice.replica if choice else "",
            engine_epoch=self.engine_epoch,
            routing=choice.outcome if choice else "",
            owned_blocks=choice.owned if choice else None,
            attempts=self.attempts,
            tried=", ".join(self.tried),
            hold_s=self.hold_s,
            route_s=self.route_s,
            first_byte_s=self.first_byte_s,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            generation=self.generation,
            voided=self.voided,
            gated=self.gate,
            substituted=self.substituted,
            reason=self.reason[:REASON],
        )


def _printable(label: bytes) -> str:
    """What may stand in a row, whatever bytes a header held."""
    return label[: 4 * LABEL].decode(errors="replace")[:LABEL]
