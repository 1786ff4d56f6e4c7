"""What passes between a request here and a request to a replica: which headers go on, and which come back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from adaptersync.router.connection import Answer
from adaptersync.router.request import Pair, Request
from adaptersync_core.headers import EXPLAIN, GATE, RANK, REPLICA, REQUEST_ID, SUBSTITUTED, VERSION, VOIDED

RETRY_MOST_S = 60.0  # no client is told to stay away for longer, whatever a replica says

# headers that belong to one connection, as do those that `connection` names
_HOP = (
    b"connection",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
)
# written anew with each request and answer. Answers are read, for their tokens and for what a replica lacks: not packed
_WRITTEN = (b"host", b"content-length", b"expect", b"accept-encoding")
_PLAIN = (b"keep-alive", b"close")  # what `connection` says, as a rule
_NOT_SENT = frozenset((*_HOP, *_WRITTEN, GATE.encode(), SUBSTITUTED.encode(), EXPLAIN.encode(), RANK.encode()))
_RANK = RANK.encode()
_NOT_ANSWERED = frozenset(
    (*_HOP, b"content-length", *(name.encode() for name in (REQUEST_ID, VERSION, REPLICA, VOIDED, EXPLAIN)))
)


def request_headers(request: Request, request_id: bytes) -> list[Pair]:
    """What a replica is sent of a client's headers; its own request id, if it has one, stays.

    Not the rank that a client wants: which one answers is decided here.
    """
    sent = _passed_on(request.headers, _NOT_SENT)
    if not any(name == b"x-request-id" and value.strip() for name, value in sent):
        sent.append((b"x-request-id", request_id))
    return sent


def to_rank(sent: Sequence[Pair], rank: int | None) -> Sequence[Pair]:
    """The same for one rank of a replica that has several."""
    return sent if rank is None else [*sent, (_RANK, b"%d" % rank)]


def answer_headers(answer: Answer, ours: Sequence[Pair]) -> list[Pair]:
    """What a client is sent of a replica's headers, with ours in place of any of the same name."""
    return [*_passed_on(answer.headers, _NOT_ANSWERED), *ours]


def _passed_on(pairs: Sequence[Pair], but: frozenset[bytes]) -> list[Pair]:
    for name, value in pairs:
        if name == b"connection" and value not in _PLAIN:
            but = but | _named(value)
    return [pair for pair in pairs if pair[0] not in but]


@lru_cache(maxsize=64)
def _named(options: bytes) -> frozenset[bytes]:
    return frozenset(option.strip().lower() for option in options.split(b","))


def retry_after(answer: Answer) -> float:
    """How many seconds a replica asks to be left alone; 0 when it does not say, or not in seconds."""
    said = next((value for name, value in answer.headers if name == b"retry-after"), b"")
    return min(float(said), RETRY_MOST_S) if said.isdigit() and len(said) < 10 else 0.0


def with_retry_after(pairs: Sequence[Pair], wait_s: float) -> list[Pair]:
    """This one in place of the replica's."""
    return [*(pair for pair in pairs if pair[0] != b"retry-after"), (b"retry-after", b"%d" % wait_s)]
