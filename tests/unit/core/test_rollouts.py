"""Entries of the ledger's stream, joined to one row a rollout."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from adaptersync_core.rollouts import FIELD, NEVER_ENDED, OPEN, UNKNOWN, Row, decode, join

V1 = "run-v1-0123456789ab"


def row(outcome: str, **fields: object) -> Row:
    made = Row(request_id="a-1", router="g1", path="/v1/completions", asked="run", outcome=outcome, started_at=12.5)
    return msgspec.structs.replace(made, **fields)


def entry(made: Row) -> dict[str, str]:
    """As the stream gives it back."""
    return {FIELD: msgspec.json.encode(made).decode()}


def test_a_row_comes_back_as_it_was_written() -> None:
    made = row("ok", version=V1, status=200, total_s=0.25, attempts=2, cached_tokens=0, voided=True, gated=True)
    assert decode(entry(made)) == made
    assert "prompt_tokens" not in entry(made)[FIELD]


def test_entries_of_one_rollout_are_one_row_in_whatever_order_they_come() -> None:
    opened, unknown, ended = row(OPEN, replica="r1"), row(UNKNOWN, reason="router died"), row("ok", status=200)
    for entries in itertools.permutations([opened, opened, unknown, ended, ended]):
        assert join(entries) == [ended]
    for entries in itertools.permutations([opened, unknown, unknown]):
        assert join(entries) == [unknown]


def test_what_was_opened_and_never_ended_is_unknown() -> None:
    (found,) = join([row(OPEN, replica="r1", version=V1)])
    assert (found.outcome, found.reason, found.replica, found.version) == (UNKNOWN, NEVER_ENDED, "r1", V1)


def test_an_open_row_that_went_elsewhere_names_the_later_replica() -> None:
    (found,) = join([row(OPEN, replica="r1"), row(OPEN, replica="r2")])
    assert found.replica == "r2"


def test_rows_of_a_voided_version_are_voided_also_when_they_ended_before() -> None:
    good, bad = row("ok", request_id="a-2", version="run-v2-0123456789ab"), row("ok", version=V1)
    assert [each.voided for each in join([good, bad], voided={V1})] == [False, True]


def test_rows_come_in_the_order_in_which_they_began() -> None:
    opened, other = row(OPEN), row("ok", request_id="a-2")
    assert [each.request_id for each in join([opened, other, row("ok")])] == ["a-1", "a-2"]


def test_an_entry_of_the_former_form_is_read() -> None:
    known = {name: str(value) for name, value in msgspec.to_builtins(row("ok", status=200, total_s=0.25)).items()}
    assert decode(known | {"voided": "true"}) == row("ok", status=200, total_s=0.25, voided=True)


@pytest.mark.parametrize("fields", [{}, {FIELD: "{"}, {FIELD: '{"request_id": "x"}'}, {FIELD: "\udcff"}])
def test_an_entry_that_cannot_be_read_is_left_out(fields: dict[str, str]) -> None:
    assert decode(fields) is None
    assert join([None, row("ok")]) == [row("ok")]


def test_what_a_later_release_adds_is_ignored() -> None:
    said = entry(row("ok"))[FIELD].replace("{", '{"mood": "good", ')
    assert decode({FIELD: said}) == row("ok")
