"""A request's row as it is filled: what has no end in life has one there."""

from __future__ import annotations

from typing import cast

from adaptersync.router.call import TRIED, Call
from adaptersync.router.chains import NONE
from adaptersync.router.ledger import ROW_BYTES, _encode
from adaptersync.router.policy import Choice
from adaptersync.router.request import Client, Request

NOBODY = cast(Client, None)


def test_of_many_replicas_that_did_not_do_the_first_are_named_and_the_row_stays_small() -> None:
    call = Call("a-1", "router", Request(NOBODY, target="/v1/completions"), recorded=True, gate=False)
    for number in range(100):
        call.routed(Choice(replica=f"r{number}", outcome="cold", owned=0), NONE, 16, 0.0)
        call.failed("missing_version")
        if number == TRIED - 1:
            assert call.row.tried == ", ".join(f"r{each} missing_version" for each in range(TRIED))
    named = [f"r{each} missing_version" for each in range(TRIED)]
    assert call.row.tried.split(", ") == [*named, f"and {100 - TRIED} more"]
    assert call.row.attempts == 100
    assert len(_encode(call.row)) < ROW_BYTES
