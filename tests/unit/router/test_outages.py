"""Replicas that are left out: circuits, the silent, and who lacks a version."""

from __future__ import annotations

import pytest

from adaptersync.router.outages import IN_A_ROW, LONGEST_S, SHORTEST_S, SPREAD, Outages
from support.router_fleet import V1, V2
from support.tables import make_table

READY = ["r0", "r1", "r2"]
URLS = {name: f"http://{name}" for name in READY}
LIFE = "r0-life-1"


def made(*, spread: float = 0.5) -> Outages:
    """Pauses are as long as they should be, give or take nothing."""
    return Outages(lambda: spread)


def silent(*names: str) -> dict[str, dict[str, bool]]:
    return {name: {"silent": True} for name in names}


def away(outages: Outages, name: str, now: float) -> None:
    outages.failed(name, f"{name}-life-1", now, "refused", away=True)


def test_everybody_may_be_asked_at_first() -> None:
    assert Outages().candidates(READY, V1, (), 0.0) == READY
    assert Outages().candidates(READY, V1, {"r1"}, 0.0) == ["r0", "r2"]


def test_who_cannot_be_reached_comes_last_at_once() -> None:
    outages = made()
    away(outages, "r0", 10.0)
    assert outages.candidates(READY, V1, (), 10.1) == ["r1", "r2"]
    assert outages.candidates(READY, V1, {"r1", "r2"}, 10.1) == ["r0"]
    assert outages.why("r0", 10.1) == "left out by this router, asked again in 0.9 s: refused"
    outages.answered("r0")
    assert outages.candidates(READY, V1, (), 10.1) == READY
    assert outages.why("r0", 10.1) == ""


def test_other_failures_count_in_a_row() -> None:
    outages = made()
    for _ in range(3):
        for _ in range(IN_A_ROW - 1):
            outages.failed("r0", LIFE, 10.0, "500")
        assert outages.candidates(READY, V1, (), 10.0) == READY
        outages.answered("r0")
    for _ in range(IN_A_ROW):
        outages.failed("r0", LIFE, 10.0, "500")
    assert outages.candidates(READY, V1, (), 10.0) == ["r1", "r2"]


def test_one_request_at_a_time_tries_it_again() -> None:
    outages = made()
    away(outages, "r0", 10.0)
    assert outages.trial(READY, V1, 10.9) == ""
    now = 10.0 + SHORTEST_S
    assert outages.state("r0", now) == "half open"
    assert outages.candidates(READY, V1, (), now) == ["r1", "r2"]  # the others go on without it
    assert [outages.trial(READY, V1, now) for _ in range(3)] == ["r0", "", ""]
    outages.tried("r0")  # its client went away, say
    assert outages.trial(READY, V1, now) == "r0"
    outages.answered("r0")
    outages.tried("r0")
    assert outages.candidates(READY, V1, (), now) == READY
    assert outages.trial(READY, V1, now) == ""


def test_a_connection_is_enough_where_nobody_was_there() -> None:
    outages = made()
    away(outages, "r0", 10.0)
    assert outages.trial(READY, V1, 11.0) == "r0"
    outages.reached("r0")
    assert outages.candidates(READY, V1, (), 11.0) == READY
    assert outages.trial(READY, V1, 11.0) == ""
    for _ in range(IN_A_ROW - 1):  # that it was away is the first of them: nothing has been answered since
        assert outages.state("r0", 11.0) == "closed"
        outages.failed("r0", LIFE, 11.0, "500")
    assert outages.state("r0", 11.0) == "open"
    outages.reached("r0")
    assert outages.state("r0", 11.0) == "open"


def test_a_connection_is_not_enough_for_one_that_fails_what_it_is_asked() -> None:
    outages = made()
    for _ in range(IN_A_ROW):
        outages.failed("r0", LIFE, 10.0, "500")
    outages.reached("r0")
    assert outages.candidates(READY, V1, (), 20.0) == ["r1", "r2"]
    away(outages, "r0", 20.0)  # restarted by somebody, say
    outages.reached("r0")
    assert outages.candidates(READY, V1, (), 30.0) == ["r1", "r2"]
    outages.answered("r0")
    assert outages.candidates(READY, V1, (), 30.0) == READY


def test_where_there_is_nobody_else_nobody_tries_it_alone() -> None:
    outages = made()
    away(outages, "r0", 10.0)
    assert outages.trial(["r0"], V1, 20.0) == ""
    assert outages.candidates(["r0"], V1, (), 20.0) == ["r0"]


@pytest.mark.parametrize("spread", [0.0, 0.5, 0.999])
def test_it_is_open_for_twice_as_long_each_time_within_bounds(spread: float) -> None:
    outages, now, pauses = made(spread=spread), 0.0, []
    for _ in range(100):
        away(outages, "r0", now)
        away(outages, "r0", now)  # of those that were under way: nothing new
        until = outages.circuits["r0"].until
        pauses.append((until - now) / (1 + SPREAD * (2 * spread - 1)))
        now = until
    assert pauses[:5] == pytest.approx([1.0, 2.0, 4.0, 8.0, LONGEST_S])
    assert max(pauses) == pytest.approx(LONGEST_S)
    outages.answered("r0")
    away(outages, "r0", now)
    assert outages.state("r0", now + SHORTEST_S * 2) == "half open"


def test_when_all_are_open_the_least_bad_are_asked() -> None:
    outages = made()
    for now in (0.0, 1.0):
        away(outages, "r1", now)
    away(outages, "r0", 1.0)
    away(outages, "r2", 1.0)
    assert outages.candidates(READY, V1, (), 1.1) == ["r0", "r2"]
    assert outages.candidates(READY, V1, {"r0", "r2"}, 1.1) == ["r1"]


def test_another_life_begins_with_a_clean_slate() -> None:
    outages = made()
    away(outages, "r0", 10.0)
    outages.renew(make_table({V1: "current"}, URLS))
    assert outages.candidates(READY, V1, (), 10.1) == ["r1", "r2"]  # a table says nothing of it
    outages.renew(make_table({V1: "current"}, URLS, members={"r0": {"engine_epoch": "r0-life-2"}}))
    assert outages.candidates(READY, V1, (), 10.1) == READY
    away(outages, "r1", 10.0)
    outages.renew(make_table({V1: "current"}, {"r0": "http://r0"}))
    assert not outages.circuits


def test_the_silent_come_after_those_that_failed() -> None:
    outages = made()
    outages.renew(make_table({V1: "current"}, URLS, members=silent("r0")))
    assert outages.candidates(READY, V1, (), 10.0) == ["r1", "r2"]
    away(outages, "r1", 10.0)
    outages.answered("r0")  # the table knows better
    assert outages.candidates(READY, V1, {"r2"}, 10.1) == ["r1"]
    assert outages.candidates(READY, V1, {"r1", "r2"}, 10.1) == ["r0"]
    assert outages.candidates(["r0"], V1, (), 10.1) == ["r0"]
    outages.answered("r1")
    outages.renew(make_table({V1: "current"}, URLS))
    assert outages.candidates(READY, V1, (), 10.1) == READY


def test_who_lacks_a_version_is_not_asked_for_it_and_only_for_it() -> None:
    outages = made()
    for name in READY:
        outages.lacking.found(name, V1, f"{name}-life-1")
    assert outages.candidates(READY, V1, (), 1e9) == []
    assert outages.candidates(READY, V2, (), 10.1) == READY
    outages.renew(make_table({V1: "current"}, URLS))
    assert outages.candidates(READY, V1, (), 10.1) == []
    outages.renew(make_table({V1: "current"}, URLS, members={"r1": {"engine_epoch": "r1-life-2"}}))
    assert outages.candidates(READY, V1, (), 10.1) == ["r1"]
    away(outages, "r0", 10.0)
    assert outages.trial(READY, V1, 20.0) == ""  # it lacks the version: nobody tries it with that
    outages.renew(make_table({V2: "current"}, URLS))
    assert not outages.lacking.pairs


def test_it_says_why_one_was_not_asked() -> None:
    outages = made()
    outages.renew(make_table({V1: "current"}, URLS, members=silent("r2")))
    away(outages, "r0", 10.0)
    assert [outages.left_out(name, V1, 10.1) for name in ("r0", "r2")] == ["circuit open", "silent"]
    assert outages.trial(READY, V1, 11.0) == "r0"
    assert outages.left_out("r1", V1, 11.0) == "another is tried"
    assert outages.left_out("r0", V1, 11.0) == "circuit half open"  # of the next request
    outages.lacking.found("r0", V1, LIFE)
    assert outages.left_out("r0", V1, 11.0) == "missing version"
