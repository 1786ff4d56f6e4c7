"""What a rollout does with one answer of the router.

A rollout asks for `{run}@v{seq}`, the version its conversation is pinned to, and trains on the answer only if that
very version wrote it and was not found bad meanwhile. Knows the rule; knows nothing of HTTP clients or TRL.
"""

from __future__ import annotations

import enum

import msgspec

from adaptersync_core.errors import NameInvalid
from adaptersync_core.identity import parse_adapter_id

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 8.0  # also caps what `Retry-After` may ask for: promotions come every few seconds


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a reply the decision needs. `status` 0: there was no reply."""

    status: int
    served: str | None = None  # adapter id the router says wrote it
    aborted: bool = False  # vLLM stopped half-way and still said 200
    voided: bool = False  # the version was found bad while it wrote
    retry_after_s: float | None = None
    reason: str = ""
    request_id: str = ""  # by which the router's ledger knows it


class Verdict(enum.Enum):
    TAKE = "take"
    MISMATCH = "mismatch"  # some other version wrote it: throw it away and ask again
    REPIN = "repin"  # the version was withdrawn and there is another: ask for that one
    RETRY = "retry"
    GIVE_UP = "give up"


WITHDRAWN = frozenset({404, 409, 410})
PASSING = frozenset({0, 408, 425, 429})


def model_name(run: str, seq: int) -> str:
    return f"{run}@v{seq}"


def judge(answer: Answer, *, run: str, asked: int, promoted: int) -> Verdict:
    """`asked` is the sequence number in the request, `promoted` the one the fleet serves by now, 0 while it is none."""
    if answer.status == 200:
        if answer.aborted:
            return Verdict.RETRY
        if writer(answer, run) != asked:
            return Verdict.MISMATCH
        if not answer.voided:
            return Verdict.TAKE
    if answer.status in WITHDRAWN or answer.voided:
        # With nothing newer to ask for yet, the news of it is on its way: a withdrawn version has a successor.
        return Verdict.REPIN if promoted not in (0, asked) else Verdict.RETRY
    if answer.status in PASSING or answer.status >= 500:
        return Verdict.RETRY
    return Verdict.GIVE_UP


def pause_s(attempt: int, retry_after_s: float | None) -> float:
    """Seconds to wait after `attempt` attempts; doubles from FIRST_PAUSE_S."""
    wanted = FIRST_PAUSE_S * 2 ** min(attempt - 1, 10) if retry_after_s is None else retry_after_s
    return min(max(wanted, 0.0), LONGEST_PAUSE_S)


def writer(answer: Answer, run: str) -> int | None:
    """The number of this run's version that wrote an answer, as the router says; None when it was another's."""
    try:
        name = parse_adapter_id(answer.served or "")
    except NameInvalid:
        return None
    return name.seq if name.run == run else None
