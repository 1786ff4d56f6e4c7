"""Replicas that are left out for a moment."""

from __future__ import annotations

from adaptersync.router.outages import MISSING_S, UNREACHABLE_S, Outages

READY = ["r0", "r1", "r2"]


def test_everybody_may_be_asked_at_first() -> None:
    assert Outages().candidates(READY, "v1", (), 0.0) == READY
    assert Outages().candidates(READY, "v1", {"r1"}, 0.0) == ["r0", "r2"]


def test_the_unreachable_come_last() -> None:
    outages = Outages()
    outages.unreachable("r0", 10.0)
    assert outages.candidates(READY, "v1", (), 10.1) == ["r1", "r2"]
    assert outages.candidates(READY, "v1", {"r1", "r2"}, 10.1) == ["r0"]
    assert outages.candidates(READY, "v1", (), 10.0 + UNREACHABLE_S) == READY
    outages.unreachable("r0", 10.0)
    outages.reached("r0")
    assert outages.candidates(READY, "v1", (), 10.1) == READY


def test_the_silent_come_after_the_unreachable() -> None:
    outages = Outages()
    outages.renew(frozenset({"r0"}))
    assert outages.candidates(READY, "v1", (), 10.0) == ["r1", "r2"]
    outages.unreachable("r1", 10.0)
    outages.reached("r0")  # the table knows better
    assert outages.candidates(READY, "v1", {"r2"}, 10.1) == ["r1"]
    assert outages.candidates(READY, "v1", {"r1", "r2"}, 10.1) == ["r0"]
    assert outages.candidates(["r0"], "v1", (), 10.1) == ["r0"]
    outages.renew(frozenset())
    assert outages.candidates(READY, "v1", (), 10.1) == READY


def test_who_lacks_a_version_is_not_asked_for_it_and_only_for_it() -> None:
    outages = Outages()
    for name in READY:
        outages.missing(name, "v1", 10.0)
    assert outages.candidates(READY, "v1", (), 10.1) == []
    assert outages.candidates(READY, "v2", (), 10.1) == READY
    assert outages.candidates(READY, "v1", (), 10.0 + MISSING_S) == READY
    outages.missing("r0", "v1", 10.0)
    outages.renew(frozenset())
    assert outages.candidates(READY, "v1", (), 10.1) == READY
