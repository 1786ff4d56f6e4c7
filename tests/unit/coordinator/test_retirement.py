"""The way out, as cases: draining, forgetting, what operators ask for, and room for what comes."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from adaptersync_core.events import RequestRefused, VersionRetiring, VersionVoided
from adaptersync_core.records import Request
from support.stories import V, after, fate, members, ready, states
from support.world import World, apply, coordinate, name_of, new_world, settle

# the way out


def retiring(**settings: Any) -> World:
    """v1 retires: v2 is current and the window is one version."""
    return after(ready(max_staleness=0, **settings), "publish run1", "settle", "publish run1")


def test_without_routers_a_version_drains_at_once_and_goes_when_it_is_unloaded_everywhere() -> None:
    world = after(retiring(), "coordinate", "work r1", "work r2", "report", "coordinate")
    assert world.table.versions[V[1]].drained
    assert V[1] not in world.table.wanted()
    world = after(world, "works r1", "report", "coordinate")
    assert states(world) == {V[1]: "retiring", V[2]: "current"}  # r2 still holds it
    world = after(world, "works r2", "report", "coordinate")
    assert states(world) == {V[2]: "current"}
    assert fate(world, V[1]) == ("retired", "unloaded everywhere")


def test_a_version_waits_for_every_router_and_for_what_is_in_flight() -> None:
    world = after(retiring(routers=2), "coordinate", "work r1", "work r2", f"inflight g1 {V[1]}", "coordinate")
    assert states(world)[V[1]] == "retiring"
    assert not world.table.versions[V[1]].drained  # no router serves the new table yet
    world = after(world, "route g1", "coordinate")
    assert not world.table.versions[V[1]].drained  # g2 does not
    world = after(world, "route g2", f"inflight g2 {V[1]}", "coordinate")
    assert not world.table.versions[V[1]].drained  # g2 does, and has a request under way
    world = after(world, "route g2", "coordinate")
    assert world.table.versions[V[1]].drained


def test_a_router_that_is_cut_off_is_waited_for_as_long_as_it_may_serve() -> None:
    world = after(retiring(routers=2), "cut g2", "coordinate", "work r1", "work r2", "coordinate", "route g1")
    world = after(world, "later 65", "coordinate")  # it serves its last table for 60 s; the rest is for its clock
    assert not world.table.versions[V[1]].drained
    world = after(world, "later 1", "coordinate")
    assert world.table.versions[V[1]].drained


def test_a_router_that_was_cut_off_for_long_and_comes_back_is_waited_for_again() -> None:
    world = after(retiring(routers=1), "cut g1", "later 80", "mend g1", "route g1", f"inflight g1 {V[1]}")
    world = after(world, "coordinate", "work r1", "work r2", "route g1", f"inflight g1 {V[1]}", "coordinate")
    assert not world.table.versions[V[1]].drained


def test_the_word_of_a_router_counts_under_the_control_state_it_was_given_of() -> None:
    """After a restore the same generation is another table."""
    world = after(retiring(routers=1), "coordinate", "work r1", "work r2", "coordinate", "route g1")
    (seen,) = world.routers.values()
    stale = replace(seen, report=replace(seen.report, incarnation="another"))
    assert not coordinate(replace(world, routers={"g1": stale})).table.versions[V[1]].drained
    assert coordinate(world).table.versions[V[1]].drained


def test_draining_ends_at_its_time_limit() -> None:
    world = after(retiring(routers=1), "coordinate", "work r1", "work r2", "coordinate", f"inflight g1 {V[1]}")
    world = after(world, "later 100", "coordinate")
    assert not world.table.versions[V[1]].drained
    world = after(world, "later 1", "coordinate")
    assert world.table.versions[V[1]].drained


def test_a_silent_replica_does_not_keep_a_version_in_the_table() -> None:
    world = after(retiring(), "coordinate", "work r1", "work r2", "report", "coordinate", "silence r2")
    world = after(world, "works r1", "later 6", "coordinate")
    assert states(world) == {V[2]: "current"}
    world = after(world, "speak r2", "later 11", "settle")
    assert world.replicas["r2"].loaded == (V[2],)  # back, it unloads what nobody wants


# an operator asks


def three_promoted(**settings: Any) -> World:
    return after(ready(max_staleness=2, **settings), *["publish run1", "settle"] * 3)


def test_a_rollback_goes_to_the_version_before() -> None:
    world = coordinate(apply(three_promoted(), ("ask", "q", "run1", "")))
    assert world.table.runs["run1"].current == V[2]
    assert states(world)[V[3]] == "retiring"
    assert fate(world, V[3]) == ("voided", "asked")
    voided = [event for event in world.events if isinstance(event, VersionVoided)]
    assert [(event.version, event.reason, event.current) for event in voided] == [(V[3], "asked", V[2])]
    assert world.requests == {}
    world = settle(world)
    assert set(states(world)) == {V[2], V[1]}
    assert fate(world, V[3]) == ("voided", "asked")  # its fate outlives it


def test_a_rollback_goes_to_a_given_version_and_voids_all_after_it() -> None:
    world = settle(apply(three_promoted(), ("ask", "q", "run1", V[1])))
    assert states(world) == {V[1]: "current"}
    assert [fate(world, V[seq])[0] for seq in (2, 3)] == ["voided", "voided"]


def test_after_a_rollback_the_next_version_is_promoted_as_ever() -> None:
    world = settle(apply(three_promoted(), ("ask", "q", "run1", V[2])))
    world = after(world, "publish run1", "settle")
    assert world.table.window("run1") == [V[4], V[2], V[1]]


def test_a_rollback_without_a_version_voids_the_current_one_although_another_is_on_its_way() -> None:
    world = after(three_promoted(), "publish run1", "coordinate")
    world = coordinate(apply(world, ("ask", "q", "run1", "")))
    assert world.table.runs["run1"].current == V[2]
    assert states(world)[V[4]] == "staging"
    assert fate(world, V[3])[0] == "voided"


def test_a_candidate_is_given_up_when_it_is_named() -> None:
    world = after(three_promoted(), "publish run1", "coordinate")
    world = coordinate(apply(world, ("ask", "q", "run1", V[4])))
    assert fate(world, V[4]) == ("rolled_back", "asked")
    assert world.table.runs["run1"].current == V[3]


@pytest.mark.parametrize(
    ("run", "version", "reason"),
    [
        ("nowhere", "", "there is no run nowhere"),
        ("run1", V[9], f"{V[9]} is not retained; retained: {V[2]} {V[1]}"),
        ("run1", V[3], f"{V[3]} is not retained; retained: {V[2]} {V[1]}"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_reason_and_changes_nothing(run: str, version: str, reason: str) -> None:
    before = three_promoted()
    world = coordinate(apply(before, ("ask", "q", run, version)))
    assert world.events[-1] == RequestRefused(request="q", reason=reason)
    assert world.requests == {}
    assert (world.table.versions, world.table.runs) == (before.table.versions, before.table.runs)


@pytest.mark.parametrize("version", ["", V[1], V[2]])
@pytest.mark.parametrize("seen", ["", V[2]])
def test_a_rollback_that_is_answered_when_another_version_is_current_is_refused(seen: str, version: str) -> None:
    """Asked for when `seen` was current, and answered late."""
    before = three_promoted()
    asked = Request(kind="rollback", run="run1", version=version, reason="bad", current=seen)
    world = coordinate(replace(before, requests={"q": asked}))
    reason = f"{V[3]} is current by now; this was asked about {seen or 'none'}"
    assert world.events[-1] == RequestRefused(request="q", reason=reason)
    assert (world.requests, world.table.versions) == ({}, before.table.versions)


def test_two_rollbacks_of_one_version_void_it_once() -> None:
    asked = Request(kind="rollback", run="run1", reason="bad", current=V[3])
    world = settle(replace(three_promoted(), requests={"a": asked, "b": asked}))
    assert world.table.runs["run1"].current == V[2]
    assert [event.request for event in world.events if isinstance(event, RequestRefused)] == ["b"]


def test_without_an_earlier_version_there_is_nothing_to_go_back_to() -> None:
    for world in (ready(), after(ready(), "publish run1", "settle")):
        world = coordinate(apply(world, ("ask", "q", "run1", "")))
        assert isinstance(world.events[-1], RequestRefused)
        assert "an earlier version is not retained; retained: none" in world.events[-1].reason


def test_requests_are_answered_one_by_one() -> None:
    world = apply(apply(three_promoted(), ("ask", "a", "run1", "")), ("ask", "b", "run1", ""))
    world = coordinate(world)
    assert world.table.runs["run1"].current == V[1]
    assert world.requests == {}


def test_what_nobody_can_answer_is_answered_at_once_and_holds_nobody_up() -> None:
    """Somebody who writes to Redis himself puts there what he likes, and as much."""
    nonsense = {f"a{number}": Request(kind="unreadable", run="") for number in range(50)}
    world = apply(three_promoted(), ("ask", "q", "run1", ""))
    before = world.table.generation
    world = coordinate(replace(world, requests=nonsense | world.requests))
    assert world.requests == {}
    assert world.table.generation - before < 10  # not a decision for each
    assert sum(isinstance(event, RequestRefused) for event in world.events) == 50
    assert world.table.runs["run1"].current == V[2]


# capacity


def test_a_replica_with_too_few_slots_never_becomes_ready() -> None:
    """Others have enough: it would shorten the windows of all."""
    world = new_world(replicas=2, max_staleness=2, slots=4)
    small = replace(world.replicas["r1"], slots=3)
    world = settle(after(replace(world, replicas=world.replicas | {"r1": small}), "report"))
    assert members(world) == {"r1": "joining", "r2": "ready"}
    assert world.table.members["r1"].reason.startswith("capacity: holds 3 adapters, 4 are needed")


def test_an_engine_that_holds_one_adapter_could_never_change_it() -> None:
    world = settle(new_world(replicas=1, max_staleness=0, slots=1))
    assert world.table.members["r1"].reason.startswith("capacity: holds 1 adapters, 2 are needed")


def test_a_run_that_wants_more_than_the_fleet_has_keeps_no_replica_out() -> None:
    world = after(ready(max_staleness=2, slots=4), "begin run1 20", *["publish run1", "settle"] * 5)
    world = after(world, "restart r1", "restart r2", "settle")
    assert members(world) == {"r1": "ready", "r2": "ready"}
    world = after(world, "publish run1", "settle")
    assert world.table.window("run1") == [V[6], V[5], V[4], V[3]]


def test_a_load_waits_for_room() -> None:
    """Four slots: with a window of three, the fourth is the candidate's, and until v1 has left there is none."""
    world = after(ready(max_staleness=2, slots=4), *["publish run1", "settle"] * 3, "publish run1", "coordinate")
    world = after(world, "work r1", "work r2", "report", "coordinate", "publish run1", "coordinate")
    assert states(world)[V[1]] == "retiring"
    assert V[5] not in states(world)
    world = after(world, "settle")
    assert world.table.runs["run1"].current == V[5]


def test_a_version_that_was_given_up_takes_room_until_it_is_unloaded() -> None:
    world = after(ready(max_staleness=2, slots=4), *["publish run1", "settle"] * 3, "publish run1", "coordinate")
    world = after(world, "work r1", "report", "refuse r2", "work r2", "publish run1", "coordinate")
    assert fate(world, V[4])[0] == "rolled_back"
    assert V[5] not in states(world)
    world = after(world, "works r1", "report", "coordinate")
    assert states(world)[V[5]] == "staging"


def test_a_run_that_fills_the_slots_gives_up_its_oldest_version() -> None:
    world = ready(max_staleness=1, slots=3)
    world = after(world, "begin run1 5", *["publish run1", "settle"] * 4)
    assert world.table.window("run1") == [V[4], V[3], V[2]]
    assert fate(world, V[1])[0] == "retired"
    told = [event.reason for event in world.events if isinstance(event, VersionRetiring)]
    assert told == [f"capacity: {V[4]} needs one of the 3 adapters that replicas can hold"]


def test_the_longest_window_makes_room_for_another_run() -> None:
    """Three runs with windows of three in six slots: nobody is shut out, and nobody's current version goes."""
    world = ready(runs=3, max_staleness=2, slots=6)
    world = after(world, *["publish run1", "settle"] * 3, *["publish run2", "settle"] * 3)
    world = after(world, *["publish run3", "settle"] * 2)
    assert [len(world.table.window(run)) for run in ("run1", "run2", "run3")] == [2, 2, 2]
    for run in ("run1", "run2", "run3", "run1"):
        world = after(world, f"publish {run}", "settle")
        assert world.table.runs[run].current == world.published[run][-1].adapter_id
        assert [len(world.table.window(run)) for run in ("run1", "run2", "run3")] == [2, 2, 2]


def test_a_run_that_would_take_the_last_slot_is_refused_and_the_others_go_on() -> None:
    world = ready(runs=3, max_staleness=1, slots=3)
    world = after(world, *(word for run in (1, 2, 3, 1, 2) for word in (f"publish run{run}", "settle")))
    reason = (
        "capacity: 2 of 3 adapters that replicas can hold are current versions; end a run with adaptersync end, "
        "or raise --max-loras"
    )
    assert fate(world, name_of("run3", 1)) == ("rolled_back", reason)
    assert world.records[name_of("run3", 1)].want == "room"
    assert [world.table.runs[f"run{run}"].current for run in (1, 2)] == [name_of(f"run{run}", 2) for run in (1, 2)]


def test_one_that_does_not_say_its_slots_does_not_hide_the_limit_of_another() -> None:
    world = ready(max_staleness=1, slots=3)
    blind = replace(world.replicas["r1"], slots=0)
    world = after(replace(world, replicas=world.replicas | {"r1": blind}), "report", "begin run1 5")
    world = after(world, *["publish run1", "settle"] * 4)
    assert world.table.window("run1") == [V[4], V[3], V[2]]
