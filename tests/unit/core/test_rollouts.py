"""Entries of the ledger's stream, joined to one row a rollout."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from adaptersync_core.rollouts import NEVER_ENDED, OPEN, UNKNOWN, Row, join, to_fields

V1 = "run-v1-0123456789ab"


def row(outcome: str, **fields: object) -> Row:
    made = Row(request_id="a-1", router="g1", path="/v1/completions", asked="run", outcome=outcome, started_at=12.5)
    return msgspec.structs.replace(made, **fields)


def entry(made: Row) -> dict[str, str]:
    """As the stream gives it back."""
    flat = iter(to_fields(msgspec.to_builtins(made)))
    return {str(name): str(value) for name, value in zip(flat, flat, strict=True)}


def test_a_row_comes_back_as_it_was_written() -> None:
    made = row("ok", version=V1, status=200, total_s=0.25, attempts=2, cached_tokens=0, voided=True, gated=True)
    assert join([entry(made)]) == [made]
    assert entry(made)["voided"] == "true"
    assert "prompt_tokens" not in entry(made)


def test_entries_of_one_rollout_are_one_row_in_whatever_order_they_come() -> None:
    opened, unknown, ended = row(OPEN, replica="r1"), row(UNKNOWN, reason="router died"), row("ok", status=200)
    for entries in itertools.permutations([opened, opened, unknown, ended, ended]):
        assert join(map(entry, entries)) == [ended]
    for entries in itertools.permutations([opened, unknown, unknown]):
        assert join(map(entry, entries)) == [unknown]


def test_what_was_opened_and_never_ended_is_unknown() -> None:
    (found,) = join([entry(row(OPEN, replica="r1", version=V1))])
    assert (found.outcome, found.reason, found.replica, found.version) == (UNKNOWN, NEVER_ENDED, "r1", V1)


def test_an_open_row_that_went_elsewhere_names_the_later_replica() -> None:
    (found,) = join([entry(row(OPEN, replica="r1")), entry(row(OPEN, replica="r2"))])
    assert found.replica == "r2"


def test_rows_of_a_voided_version_are_voided_also_when_they_ended_before() -> None:
    good, bad = row("ok", request_id="a-2", version="run-v2-0123456789ab"), row("ok", version=V1)
    assert [each.voided for each in join([entry(good), entry(bad)], voided={V1})] == [False, True]


def test_rows_come_in_the_order_in_which_they_began() -> None:
    opened, other = row(OPEN), row("ok", request_id="a-2")
    assert [each.request_id for each in join(map(entry, [opened, other, row("ok")]))] == ["a-1", "a-2"]


@pytest.mark.parametrize("fields", [{}, {"request_id": "x"}, {**entry(row("ok")), "status": "many"}])
def test_an_entry_that_cannot_be_read_is_left_out(fields: dict[str, str]) -> None:
    assert join([fields, entry(row("ok"))]) == [row("ok")]


def test_fields_of_a_later_release_are_ignored() -> None:
    assert join([{**entry(row("ok")), "mood": "good"}]) == [row("ok")]
