"""What is no answer, and what a client hears of it."""

from __future__ import annotations

import pytest

from adaptersync.router.faults import WORDS, fault, unanswered
from adaptersync_core.rollouts import Row


@pytest.mark.parametrize("status", [200, 400, 404, 422, 429, 501])
def test_successes_and_refusals_are_answers(status: int) -> None:
    assert fault(status) == ""


@pytest.mark.parametrize(
    "status",
    [201, 204, 206, 301, 302, 304, 307, 399, 401, 403, 407, 408, 500, 502, 503, 504, 505, 507, 520, 999],
)
def test_anything_else_is_the_replicas_fault(status: int) -> None:
    assert fault(status).startswith(f"replica answered {status}")


def test_where_it_was_asked_as_the_client_that_may_be_who_is_not_let_in() -> None:
    assert [bool(fault(status, as_client=True)) for status in (401, 403, 407, 408)] == [False, False, True, True]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error":{"message":"out of\\n memory","code":500}}', "reason: out of memory ("),
        (b'{"message":"old form"}', "reason: old form ("),
        (b'{"detail":"of FastAPI"}', "reason: of FastAPI ("),
        (b'{"error":"plain"}', "reason: plain ("),
        (b'{"detail":[1]}', 'reason: {"detail":[1]} ('),
        (b"<html>\n <b>Bad Gateway", "reason: <html> <b>Bad Gateway ("),
        (b"[" * 5000, "reason: [[["),
        (b"\xff\xfe", "reason: \ufffd\ufffd ("),
        (b"", "reason ("),
    ],
)
def test_words_are_found_in_every_form(body: bytes, words: str) -> None:
    assert words in str(unanswered(_row(500), "reason", body, 0.0))


def test_words_are_bounded() -> None:
    said = str(unanswered(_row(500), "reason", b'{"message":"%b"}' % (b"x" * 100_000), 0.0))
    assert said.count("x") < WORDS + 5


@pytest.mark.parametrize(
    ("status", "told"), [(500, 500), (503, 503), (302, 502), (204, 502), (200, 502), (507, 502), (401, 502), (999, 502)]
)
def test_who_failed_gives_the_status(status: int, told: int) -> None:
    error = unanswered(_row(status), "reason", b"", 7.0)
    assert (error.status, error.retry_after_s) == (told, 7.0)


def _row(status: int) -> Row:
    return Row(
        request_id="id", router="r", path="/", asked="", outcome="ok", started_at=0.0, status=status, replica="one"
    )
