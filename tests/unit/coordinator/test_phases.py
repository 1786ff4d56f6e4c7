"""Where the time of a version and of a rollout goes, from what was kept of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from adaptersync.coordinator.phases import Rollouts, Told, VersionPhases, shares, version_phases
from adaptersync_core.manifest import Manifest
from adaptersync_core.rollouts import OPEN, Row
from support.artifacts import manifest_of, small_adapter

V = "run-v1-0123456789ab"
AT = 1_700_000_000.0  # announced, on the server's clock


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    made = manifest_of(small_adapter(tmp_path), step=3)
    timings = {"step_s": 8.0, "gather_s": 0.5, "save_s": 0.25, "hashed_s": 0.125, "sync_s": 9.0}
    return replace(made, timings=timings)


def told(at_s: float, kind: str, **fields: object) -> Told:
    return AT + at_s, {"type": kind, "version": V, **{name: str(value) for name, value in fields.items()}}


def acked(at_s: float, replica: str, *, accepted: bool = True, **phases: float) -> Told:
    return told(at_s, "replica.acked", replica=replica, accepted="true" if accepted else "false", **phases)


def story(*more: Told) -> list[Told]:
    """Announced, taken up after half a second, promoted at 5."""
    begun = [told(0, "adapter.published", stored_s=1.0), told(0.5, "version.staging")]
    quick = acked(2.0, "r1", visible_s=0.25, staged_s=0.5, loaded_s=0.25)
    slow = acked(4.0, "r2", visible_s=0.5, staged_s=1.0, loaded_s=1.0)
    return sorted([*begun, quick, slow, told(5.0, "version.promoted"), *more], key=lambda each: each[0])


def of(events: list[Told], manifest: Manifest | None = None, **first_tokens: float) -> VersionPhases:
    moments = {replica: AT + at_s for replica, at_s in first_tokens.items()}
    found = version_phases(V, manifest, events, moments)
    assert found is not None
    return found


def starts(found: VersionPhases) -> dict[str, tuple[float, float]]:
    return {span.phase: (span.start_s, span.seconds) for span in found.spans}


def test_a_trainers_phases_end_where_the_version_was_announced(manifest: Manifest) -> None:
    """Whatever its wall clock says: it is not asked."""
    assert starts(of(story(), replace(manifest, created_at=AT - 9999)))["publish"] == (-1.0, 1.0)
    found = starts(of(story(), manifest))
    assert found["digest"] == (-1.125, 0.125)
    assert found["save"] == (-1.375, 0.25)
    assert found["gather"] == (-1.875, 0.5)
    assert found["step"] == (-9.875, 8.0)
    assert found["taken up"] == (0.0, 0.5)


def test_a_replicas_phases_end_where_it_was_acked_and_begin_when_it_noticed() -> None:
    r1, r2 = of(story()).replicas
    assert [(span.phase, span.start_s, span.seconds) for span in r1.spans] == [
        ("noticed", 0.5, 0.5),
        ("visible", 1.0, 0.25),
        ("staged", 1.25, 0.5),
        ("loaded", 1.75, 0.25),
    ]
    assert (r2.acked_s, r2.spans[0].seconds) == (4.0, 1.0)


def test_the_way_goes_by_the_slowest_replica_and_adds_up(manifest: Manifest) -> None:
    found = of(story(), manifest, r1=7.0, r2=6.0)
    assert (found.slowest, found.promoted_s, found.outcome, found.step) == ("r2", 5.0, "promoted", 3)
    assert starts(found)["committed"] == (4.0, 1.0)
    assert starts(found)["first token"] == (5.0, 1.0)  # the first of all
    assert [each.first_token_s for each in found.replicas] == [7.0, 6.0]
    assert sum(found.path().values()) == pytest.approx(9.875 + 6.0)


def test_a_replica_that_came_later_held_nobody_up_and_noticed_nothing_late() -> None:
    late = acked(60.0, "r3", visible_s=0.0, staged_s=1.0, loaded_s=1.0)
    found = of(story(late))
    assert found.slowest == "r2"
    r3 = found.replicas[2]
    assert r3.late
    assert [span.phase for span in r3.spans] == ["visible", "staged", "loaded"]


def test_an_engine_that_restarts_and_says_it_again_is_not_slower_for_it() -> None:
    again = acked(4.5, "r1", visible_s=0.0, staged_s=0.0, loaded_s=1.0)
    assert of(story(again)).replicas[0].acked_s == 2.0
    first_no = acked(1.0, "r1", accepted=False, visible_s=0.0)
    r1 = of(story(first_no)).replicas[0]
    assert (r1.accepted, r1.acked_s) == (True, 2.0)


def test_a_refusal_is_waited_for_and_is_not_the_way() -> None:
    no = acked(4.5, "r3", accepted=False, visible_s=4.0)
    found = of(story(no))
    assert found.slowest == "r2"
    assert [each.accepted for each in found.replicas] == [True, True, False]


def test_a_gate_is_not_the_coordinators_time() -> None:
    found = starts(of(story(told(4.25, "version.ready"))))
    assert found["committed"] == (4.0, 0.25)
    assert found["gate"] == (4.25, 0.75)


def test_what_was_never_promoted_has_no_way() -> None:
    found = of(story()[:3])
    assert (found.slowest, found.promoted_s, found.outcome) == ("", None, "staging")
    assert shares([found]) == []
    assert version_phases(V, None, story()[1:], {}) is None  # nobody knows when it was announced


def test_shares_are_of_the_whole_way(manifest: Manifest) -> None:
    found = {each.phase: each for each in shares([of(story(), manifest, r2=6.0), of(story(), r2=7.0)])}
    assert sum(each.share for each in found.values()) == pytest.approx(1.0)
    assert (found["first token"].p50_s, found["first token"].p95_s, found["first token"].count) == (1.5, 2.0, 2)
    assert found["step"].share == pytest.approx(8.0 / (15.875 + 8.0), abs=0.01)


# rollouts


def row(number: int = 0, **fields: object) -> Row:
    made = Row(
        request_id=f"a-{number}", router="g1", path="/v1/completions", asked="run", outcome="ok", started_at=50.0,
        status=200, total_s=2.0, version=V, replica="r1", attempts=1, hold_s=0.5, route_s=0.25, first_byte_s=1.25,
    )  # fmt: skip
    return replace(made, **fields)


def seen(*rows: tuple[float, Row]) -> Rollouts:
    found = Rollouts([V])
    for at, each in rows:
        found.see(at, each)
    return found


def first_tokens(found: Rollouts) -> dict[str, float]:
    """From AT: of the moments themselves a relative tolerance would forgive minutes."""
    return {replica: at - AT for replica, at in found.first_tokens(V).items()}


def test_a_routers_clock_is_read_by_the_rows_it_wrote() -> None:
    """It is years behind, and rows before and after had to wait long for a server that was away."""
    quick = AT + 2.0 + 0.04  # of a request that came at AT, and took 2 s
    found = seen((quick + 30, row(1)), (quick, row(2)), (quick + 100, row(3, started_at=60.0)))
    assert first_tokens(found) == {"r1": pytest.approx(2.04, abs=1e-5)}


def test_each_router_has_its_own_clock() -> None:
    other = row(2, router="g2", started_at=9000.0, replica="r2")
    found = seen((AT + 2.0, row(1)), (AT + 1.0, other))
    assert first_tokens(found) == {"r1": pytest.approx(2.0, abs=1e-5), "r2": pytest.approx(1.0, abs=1e-5)}


def test_of_a_stream_first_token_and_decoding_are_told_apart() -> None:
    found = seen((AT + 2.0, row(first_token_s=0.75, first_byte_s=0.01)))
    assert first_tokens(found) == {"r1": pytest.approx(1.5, abs=1e-5)}
    (r1,) = found.phases()
    assert {each.phase: each.p50_s for each in r1.phases} == {
        "hold": 0.5, "route": 0.25, "first token": 0.75, "decode": 0.5,
    }  # fmt: skip


def test_of_an_answer_that_comes_whole_they_are_not() -> None:
    (r1,) = seen((AT + 2.0, row())).phases()
    assert {each.phase: each.p50_s for each in r1.phases} == {"hold": 0.5, "route": 0.25, "whole answer": 1.25}


def test_what_another_replica_took_is_not_this_ones_time() -> None:
    rows = [row(1, attempts=2), row(2, outcome="upstream_error"), row(3, version="other"), row(4, outcome=OPEN)]
    found = seen(*((AT, each) for each in rows))
    assert found.phases() == []
    assert found.first_tokens(V) == {}
    assert found.count == 2  # the ends of this version's rollouts, however they were


def test_rollouts_that_a_full_router_turned_away_are_counted() -> None:
    full = "router is full (in_flight=2, router=g1)"
    found = seen((AT, row(1, outcome="refused", status=503, reason=full)), (AT, row(2)))
    assert (found.count, found.full, found.held_s, found.total_s) == (2, 1, 1.0, 4.0)
