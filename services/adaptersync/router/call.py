"""One request on its way through the router: its ledger row, filled as it goes, and its answer's headers."""

from __future__ import annotations

import time
from functools import lru_cache

from adaptersync.router.chains import Chains
from adaptersync.router.explanation import Explanation
from adaptersync.router.policy import Choice
from adaptersync.router.request import Pair, Request
from adaptersync.router.resolve import Target
from adaptersync.router.usage import read_usage
from adaptersync_core import headers
from adaptersync_core.rollouts import LABEL, Row
from adaptersync_core.table import Table

REASON = 200  # characters of a reason that are kept
TRIED = 8  # replicas that did not do are named, of others the number: a row has its bounds

_REQUEST_ID = headers.REQUEST_ID.encode()
_VERSION = headers.VERSION.encode()
_REPLICA = headers.REPLICA.encode()
_VOIDED = headers.VOIDED.encode()
_SUBSTITUTED = headers.SUBSTITUTED.encode()
_SESSION = headers.SESSION.encode()
_EXPLAIN = headers.EXPLAIN.encode()


class Call:
    """`recorded`: its row belongs in the ledger. `sent`: a replica was asked, and the row is opened.

    `session` is what the client calls the session that it asks in. `explained`: it wants to know why; `explanation` is
    what it is told.
    """

    __slots__ = ("explained", "explanation", "gate", "recorded", "row", "sent", "session", "started")

    def __init__(self, request_id: str, router: str, request: Request, *, recorded: bool, gate: bool) -> None:
        self.started = time.monotonic()
        self.recorded = recorded
        self.gate = gate
        self.sent = False
        self.row = Row(
            request_id=request_id, router=router, path=request.path, asked="", outcome="ok", started_at=time.time()
        )
        if gate:
            self.row.gated = True
        self.session = b""
        self.explained = False
        self.explanation: Explanation | None = None
        for name, value in request.headers:
            if name == _SESSION:
                self.session = value
            elif name == _EXPLAIN:
                self.explained = value not in (b"", b"0")
            elif name == _SUBSTITUTED:
                self.row.substituted = _printable(value)

    def headers(self) -> list[Pair]:
        row = self.row
        ours = [(_REQUEST_ID, row.request_id.encode())]
        if row.version:
            ours.append((_VERSION, _encoded(row.version)))
        if row.replica:
            ours.append((_REPLICA, _encoded(row.replica)))
        if row.voided:
            ours.append((_VOIDED, b"1"))
        if self.explanation is not None:
            ours.append((_EXPLAIN, self.explanation.line(row)))
        return ours

    def admitted(self, target: Target, generation: int) -> None:
        row = self.row
        row.run, row.version, row.digest, row.generation = target.run, target.model, target.digest, generation
        row.hold_s = time.monotonic() - self.started

    def held(self, since: float) -> None:
        """Once more, for a version that every replica had lost."""
        self.row.hold_s = (self.row.hold_s or 0.0) + time.monotonic() - since

    def routed(self, choice: Choice, chains: Chains, block_size: int, took_s: float) -> None:
        """By the first of its `chains`, of which two hashes are recorded.

        Another prompt's last block is met at this one's last, or, when this one goes on from it, at the last that was
        known; anywhere else prompts part, and what they share there is boilerplate. Not met again: a beginning of a
        longer prompt, and what engines said of their caches.
        """
        row, hashes, tokens = self.row, chains.first, chains.tokens
        row.replica, row.rank, row.routing, row.owned_blocks = choice.replica, None, choice.outcome, choice.owned
        row.weight, row.blocks, row.boilerplate = choice.weight, len(hashes), choice.boilerplate
        if hashes:
            row.chain, row.block_size = hashes[-1], block_size
            if choice.boilerplate < choice.known < len(hashes):
                row.chain = f"{choice.known}:{hashes[choice.known - 1]} {row.chain}"
        if tokens and choice.outcome != "local":
            # an engine computes at least the last token anew, and with it the block
            row.predicted_tokens = min(choice.owned + choice.boilerplate, (tokens - 1) // block_size) * block_size
        row.attempts += 1
        row.route_s = took_s if row.route_s is None else row.route_s + took_s

    def failed(self, kind: str) -> None:
        """The replica that it was routed to did not do."""
        row, said = self.row, f"{self.row.replica} {kind}"
        if row.attempts > TRIED:
            named = row.tried.split(", ")[:TRIED]
            row.tried = ", ".join([*named, f"and {row.attempts - TRIED} more"])
        else:
            row.tried = f"{row.tried}, {said}" if row.tried else said

    def answered(self, tail: bytes) -> None:
        """By a replica, with these bytes at the end."""
        row = self.row
        if row.status < 400:
            row.prompt_tokens, row.completion_tokens, row.cached_tokens = read_usage(tail)
        else:
            self.end("refused" if row.status < 500 else "upstream_error", row.status, tail.decode(errors="replace"))

    def look_for_void(self, table: Table) -> None:
        """Has the version been found bad while this ran?"""
        if table.voided(self.row.version):
            self.row.voided = True

    def end(self, outcome: str, status: int, reason: str = "") -> None:
        row = self.row
        row.outcome, row.status, row.reason = outcome, status, reason[:REASON]


@lru_cache(maxsize=4096)
def _encoded(name: str) -> bytes:
    """Of versions and replicas there are few."""
    return name.encode()


def _printable(label: bytes) -> str:
    """What may stand in a row, whatever bytes a header held."""
    return label[: 4 * LABEL].decode(errors="replace")[:LABEL]
