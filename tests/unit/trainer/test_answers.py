"""What a rollout makes of each answer the router can give."""

from __future__ import annotations

import pytest

from adaptersync.trainer.answers import LONGEST_PAUSE_S, Answer, Verdict, judge, model_name, pause_s
from adaptersync_core.identity import adapter_id

RUN, ASKED = "sums", 7
RIGHT = adapter_id(RUN, ASKED, "a" * 64)


def verdict(answer: Answer, promoted: int = ASKED) -> Verdict:
    return judge(answer, run=RUN, asked=ASKED, promoted=promoted)


def test_a_version_is_asked_for_by_run_and_number() -> None:
    assert model_name(RUN, ASKED) == "sums@v7"


def test_the_version_that_was_asked_for_is_taken() -> None:
    assert verdict(Answer(status=200, served=RIGHT)) is Verdict.TAKE


def test_it_is_taken_also_when_there_is_a_newer_one_by_now() -> None:
    assert verdict(Answer(status=200, served=RIGHT), promoted=9) is Verdict.TAKE


@pytest.mark.parametrize(
    "served",
    [None, "", "base", "sums@v7", adapter_id(RUN, 6, "a" * 64), adapter_id("sums2", ASKED, "a" * 64)],
    ids=["nothing", "empty", "base", "echo", "older", "other-run"],
)
def test_anything_else_is_thrown_away(served: str | None) -> None:
    assert verdict(Answer(status=200, served=served)) is Verdict.MISMATCH


def test_a_completion_vllm_aborted_is_asked_for_again() -> None:
    assert verdict(Answer(status=200, served=RIGHT, aborted=True)) is Verdict.RETRY


@pytest.mark.parametrize("status", [404, 409, 410])
def test_a_withdrawn_version_gives_way_to_the_promoted_one(status: int) -> None:
    assert verdict(Answer(status=status), promoted=8) is Verdict.REPIN
    assert verdict(Answer(status=status), promoted=6) is Verdict.REPIN  # voided: the one before is served again
    assert verdict(Answer(status=status), promoted=ASKED) is Verdict.RETRY  # the news is still on its way
    assert verdict(Answer(status=status), promoted=0) is Verdict.RETRY  # nothing is served: a version may come


def test_what_a_version_wrote_while_it_was_found_bad_is_not_trained_on() -> None:
    voided = Answer(status=200, served=RIGHT, voided=True)
    assert verdict(voided, promoted=6) is Verdict.REPIN
    assert verdict(voided, promoted=ASKED) is Verdict.RETRY
    assert verdict(Answer(status=200, served="base", voided=True), promoted=6) is Verdict.MISMATCH


@pytest.mark.parametrize("status", [0, 408, 429, 500, 502, 503, 504])
def test_what_can_pass_is_tried_again(status: int) -> None:
    assert verdict(Answer(status=status)) is Verdict.RETRY


@pytest.mark.parametrize("status", [400, 401, 403, 413, 422])
def test_a_refused_request_is_not_repeated(status: int) -> None:
    assert verdict(Answer(status=status)) is Verdict.GIVE_UP


def test_pauses_grow_and_are_bounded() -> None:
    pauses = [pause_s(attempt, None) for attempt in range(1, 40)]
    assert pauses == sorted(pauses)
    assert pauses[:3] == [0.25, 0.5, 1.0]
    assert pauses[-1] == LONGEST_PAUSE_S
    assert pause_s(1, retry_after_s=2.0) == 2.0
    assert pause_s(1, retry_after_s=3600.0) == LONGEST_PAUSE_S
