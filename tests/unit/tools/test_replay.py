"""The order in which a ledger's rows are replayed, and what they tell of a prompt."""

from __future__ import annotations

from typing import Any

import pytest

from adaptersync_core.rollouts import Row
from adaptersync_tools import replay
from adaptersync_tools.replay import LATE_S, Order, Presence, Replay


def row(
    name: str, at: float, took_s: float | None = 0.5, *, outcome: str = "ok", replica: str = "r0", **more: Any
) -> Row:
    return Row(
        request_id=name,
        router="a",
        path="/v1/completions",
        asked="run-a",
        outcome=outcome,
        started_at=at,
        total_s=took_s,
        replica=replica,
        version="run-a-v1-000000000001",
        run="run-a",
        **more,
    )


def order_of(rows: list[Row]) -> list[str]:
    order = Order()
    events = [event for each in rows for event in order.read(each)]
    return [("+" if event.begins else "-") + event.row.request_id for event in (*events, *order.rest())]


def test_requests_begin_and_end_in_order_of_time_whatever_order_they_were_written_in() -> None:
    rows = [row("b", 10.2, 0.1), row("a", 10.0, 1.0), row("c", 10.1, 5.0, hold_s=2.0)]
    assert order_of(rows) == ["+a", "+b", "-b", "-a", "+c", "-c"]


def test_one_that_was_told_of_before_it_ended_begins_once_and_what_is_written_twice_counts_once() -> None:
    opened = row("a", 10.0, None, outcome="open")
    ended = row("a", 10.0, 9.0)
    assert order_of([opened, opened, row("b", 12.0), ended, ended]) == ["+a", "+b", "-b", "-a"]


def test_what_never_ended_is_over_at_some_time_and_what_went_nowhere_is_no_event() -> None:
    never = row("a", 10.0, None, outcome="unknown")
    still = row("c", 10.0, None, outcome="open")
    refused = row("b", 11.0, replica="", outcome="refused")
    assert order_of([never, refused, still, row("d", 700.0)]) == ["+a", "+c", "-a", "-c", "+d", "-d"]


def test_a_long_ledger_is_read_with_little_of_it_in_memory() -> None:
    order, most, happened = Order(), 0, 0
    for number in range(5000):
        happened += len(list(order.read(row(str(number), 10.0 + number, 3.0))))
        most = max(most, len(order._waiting))
    assert most < 2 * (LATE_S + 5)
    assert happened + len(list(order.rest())) == 10_000


def test_bounds_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "BUFFER", 10)
    order = Order()
    for number in range(100):
        list(order.read(row(str(number), 10.0, None, outcome="open")))
    assert len(order._waiting) <= 11
    assert len(order._open) <= 10
    assert len(order._ended) <= 10


def test_who_had_failed_or_was_not_there_is_no_candidate() -> None:
    presence = Presence()
    for each in (row("a", 0.0, replica="r0"), row("b", 500.0, replica="r1"), row("c", 500.0, replica="r2")):
        presence.read(each)
    assert presence.candidates(row("d", 1.0)) == ["r0"]
    assert presence.candidates(row("d", 500.0, replica="r2")) == ["r1", "r2"]
    assert presence.candidates(row("d", 500.0, replica="r2", tried="r1 unreachable")) == ["r2"]
    assert presence.candidates(row("d", 500.0, replica="r1", tried="r1 unreachable")) == ["r1", "r2"]


def test_prompts_meet_where_they_part_and_not_in_their_template() -> None:
    """A prompt of 8 blocks, itself again, and one of 12 that goes on from it; all chosen anew."""
    first = row("a", 10.0, blocks=8, boilerplate=0, chain="00000000000000a8", routing="cold", owned_blocks=0)
    again = row("b", 11.0, blocks=8, boilerplate=0, chain="00000000000000a8", routing="affinity", owned_blocks=8)
    more = row(
        "c",
        12.0,
        blocks=12,
        boilerplate=2,
        chain="8:00000000000000a8 00000000000000ac",
        routing="affinity",
        owned_blocks=6,
    )
    apart = row("d", 13.0, blocks=4, boilerplate=3, chain="00000000000000d4", routing="cold", owned_blocks=0)
    presence = Presence()
    rows = [first, again, more, apart, row("e", 14.0, replica="r1")]
    for each in rows:
        presence.read(each)
    made = Replay(presence, ("promise",), spill=8)
    for each in rows:
        made.read(each)
    recorded, anew = made.figures()
    warm = 100 * (0 + 8 + 8 + 3) / (8 + 8 + 12 + 4)
    assert recorded.warm_percent == anew.warm_percent == pytest.approx(warm, abs=0.01)
