"""The order in which a ledger's rows are replayed, and what they tell of a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from adaptersync.router.policy import Policy
from adaptersync_core.blocks import BY_BYTES
from adaptersync_core.rollouts import Row
from adaptersync_tools import replay
from adaptersync_tools.cli import main
from adaptersync_tools.replay import LATE_S, Figures, Order, Presence, Replay


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


def replayed(rows: list[Row], *policies: Policy) -> list[Figures]:
    """As it was recorded, and by each policy."""
    presence = Presence()
    for each in rows:
        presence.read(each)
    made = Replay(presence, policies, spill=8)
    for each in rows:
        made.read(each)
    return made.figures()


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


def test_ranks_are_candidates_each_for_itself_and_fail_together() -> None:
    presence = Presence()
    for rank in (10, 2):
        presence.read(row("a", 0.0, replica="r1", rank=rank))
    presence.read(row("b", 0.0, replica="r2"))
    presence.read(row("c", 0.0, replica="r10", rank=0))
    assert presence.candidates(row("d", 1.0, replica="r2")) == ["r1/2", "r1/10", "r10/0", "r2"]
    assert presence.candidates(row("d", 1.0, replica="r2", tried="r1 unreachable")) == ["r10/0", "r2"]


def test_what_was_cached_at_one_rank_was_not_at_another() -> None:
    """The prompt of the first rank comes again, at the second: by the rule it would have stayed."""
    first = row("a", 10.0, rank=0, blocks=4, chain="00000000000000a4", routing="cold", owned_blocks=0)
    other = row("b", 11.0, rank=1, blocks=4, chain="00000000000000b4", routing="cold", owned_blocks=0)
    again = row("c", 12.0, rank=1, blocks=4, chain="00000000000000a4", routing="spill", owned_blocks=0)
    stays = row("d", 13.0, rank=1, blocks=4, chain="00000000000000b4", routing="affinity", owned_blocks=4)
    recorded, anew = replayed([first, other, again, stays], "threshold")
    assert (recorded.warm_percent, anew.warm_percent) == (25.0, 50.0)
    assert anew.elsewhere >= 1


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
    recorded, anew = replayed([first, again, more, apart, row("e", 14.0, replica="r1")], "promise")
    warm = 100 * (0 + 8 + 8 + 3) / (8 + 8 + 12 + 4)
    assert recorded.warm_percent == anew.warm_percent == pytest.approx(warm, abs=0.01)


@pytest.mark.parametrize(
    ("size", "end", "at", "elsewhere"),
    [
        (16, "a8", 11.0, {"promise": 1, "expected": 0}),  # 1000 blocks of 16 tokens take two seconds
        (16, "a8", 12.5, {"promise": 1, "expected": 1}),  # and then are over
        (16, "a8" + BY_BYTES, 11.0, {"promise": 1, "expected": 1}),  # of bytes it is half a second
        (0, "a8", 11.0, {"promise": 1, "expected": 1}),  # from a router that did not say
    ],
)
def test_by_expected_a_prompt_goes_past_one_that_is_prefilled(
    size: int, end: str, at: float, elsewhere: dict[str, int]
) -> None:
    """Nothing is in flight any more where the first went, so the others see two replicas alike."""
    long = row("a", 10.0, 0.1, blocks=1000, chain=f"{0:014x}{end}", routing="cold", owned_blocks=0, block_size=size)
    short = row("b", at, 0.1, blocks=4, chain="00000000000000b4", routing="cold", owned_blocks=0, block_size=size)
    short.replica = "r1"
    _, promise, expected = replayed([long, short], "promise", "expected")
    assert {each.policy: each.elsewhere for each in (promise, expected)} == elsewhere
    assert (promise.tokens_per_s, expected.tokens_per_s) == (None, 8000)


def test_what_a_prompt_shares_with_the_one_that_it_goes_on_from_is_not_prefilled_again() -> None:
    first = row("a", 10.0, 0.1, blocks=1000, chain="00000000000000a8", routing="cold", owned_blocks=0, block_size=16)
    onward: dict[str, Any] = {"blocks": 1004, "chain": "1000:00000000000000a8 00000000000000ac", "block_size": 16}
    more = row("b", 13.0, 0.1, routing="affinity", owned_blocks=1000, **onward)
    other = row("c", 13.2, 0.1, blocks=4, chain="00000000000000b4", routing="cold", owned_blocks=0, block_size=16)
    presence = Presence()
    rows = [first, more, other, row("d", 14.0, replica="r1")]
    for each in rows:
        presence.read(each)
    made = Replay(presence, ("expected",), spill=8)
    for each in rows[:3]:
        made.read(each)
    assert made.figures()[1].elsewhere == 0  # four blocks more are no queue


@pytest.mark.parametrize(
    "damaged",
    [
        {"chain": "5:"},
        {"chain": "zz"},
        {"chain": "x:y z w"},
        {"chain": "5:00000000000000a4 "},
        {"started_at": 1e18},
        {"hold_s": 1e18},
        {"total_s": -1e18},
    ],
)
def test_a_damaged_row_is_named_by_file_and_line(
    damaged: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = row("a", 10.0, hold_s=2.0, chain="4:00000000000000a4~ 00000000000000a8~", blocks=8)
    file = tmp_path / "rollouts.jsonl"
    file.write_bytes(b"\n".join(msgspec.json.encode(each) for each in (good, replace(good, **damaged))))
    assert main(["route", "replay", str(file)]) != 0
    assert f"line 2 is no row of a ledger: `{next(iter(damaged))}` is no" in capsys.readouterr().err.replace("\n", " ")
    file.write_bytes(msgspec.json.encode(good))
    assert main(["route", "replay", str(file)]) == 0
