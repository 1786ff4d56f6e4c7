"""Which figures stand against which, and what is promised of them."""

from __future__ import annotations

import pytest

from adaptersync_tools.bench.decision import BenchFailed, Decision, judge, moments
from adaptersync_tools.bench.promotion import promised
from adaptersync_tools.bench.result import Figure


def decisions(*totals_s: float) -> list[Decision]:
    return [Decision(total_s=total, decided_s=total / 4, script_s=0.001, served_s=total * 3 / 4) for total in totals_s]


def test_sizes_stand_against_the_smallest() -> None:
    figures, (target,) = judge({4: decisions(0.01, 0.02, 0.03), 64: decisions(0.04), 256: decisions(0.05, 0.06, 0.4)})
    assert [figure.ratio for figure in figures[::4]] == [None, 2.0, pytest.approx(3.0)]
    assert {figure.against for figure in figures[4::4]} == {"4 replicas"}
    assert figures[1].p50_s == pytest.approx(0.005)
    assert (target.bound, target.kind) == (3.0, "at most")
    assert target.value == pytest.approx(3.0)


def test_the_servers_clock_says_when_the_last_ack_came_and_when_it_was_committed() -> None:
    """Whatever the program that plays the replicas was busy with."""
    ack, promoted = {"type": "replica.acked"}, {"type": "version.promoted"}
    told = [("2050-0", promoted), ("2040-3", ack), ("2009-0", ack), ("1500-0", {"type": "adapter.published"})]
    assert moments(told, 2) == (2.04, 2.05)
    for size, entries in ((3, told), (2, told[1:])):
        with pytest.raises(BenchFailed, match="other events"):
            moments(entries, size)


def test_one_size_promises_nothing() -> None:
    figures, targets = judge({16: decisions(0.01)})
    assert len(figures) == 4
    assert targets == ()


@pytest.mark.parametrize(
    ("blind_s", "lane_s", "polled_s", "kept"),
    [
        (30.0, 0.4, 30.0, [True, True]),
        (30.0, 0.6, 30.0, [False, True]),
        (30.0, 0.4, 3.9, [True, False]),
        (1.0, 0.5, 2.0, [True, True]),
        (1.0, 0.5, 1.9, [True, False]),
        (5.0, 9.0, 1.0, []),
    ],
)
def test_what_is_promised_depends_on_the_blind_time(
    blind_s: float, lane_s: float, polled_s: float, kept: list[bool]
) -> None:
    lane, polled = Figure.of("lane", [lane_s]), Figure.of("polling", [polled_s])
    assert [target.kept for target in promised(blind_s, lane, polled)] == kept
