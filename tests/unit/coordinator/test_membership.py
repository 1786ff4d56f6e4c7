"""Who counts, as cases: refusal and silence, ejection and the floor, joining, restarting, draining."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from adaptersync_core.events import ReplicaState
from support.stories import V, after, fate, members, ready, states
from support.world import coordinate, name_of, new_world

# refusal and silence


@pytest.mark.parametrize(("replicas", "refusing"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_half_or_more_refusing_is_the_versions_fault(replicas: int, refusing: int) -> None:
    world = after(ready(replicas=replicas), "publish run1", "coordinate")
    world = after(world, *[f"refuse r{number}" for number in range(1, refusing + 1)], "settle")
    assert fate(world, V[1])[0] == "rolled_back"
    assert "r1: no" in fate(world, V[1])[1]
    assert states(world) == {}
    assert set(members(world).values()) == {"ready"}
    assert all(replica.loaded == () for replica in world.replicas.values())  # who accepted it has given it up


def test_one_of_three_refusing_is_its_own_fault() -> None:
    world = after(ready(replicas=3), "publish run1", "coordinate", "refuse r2", "settle")
    assert members(world) == {"r1": "ready", "r2": "ejected", "r3": "ready"}
    assert states(world) == {V[1]: "current"}
    assert world.table.members["r2"].reason == f"refused {V[1]}: no"
    assert not world.table.members["r2"].silent  # it answers


def test_two_of_three_refusing_is_the_versions_fault_before_the_third_has_spoken() -> None:
    world = after(ready(replicas=3), "publish run1", "coordinate", "refuse r1", "refuse r2", "work r1", "work r2")
    world = after(world, "coordinate")
    assert fate(world, V[1])[0] == "rolled_back"
    assert fate(world, V[1])[1] == "r1: no; r2: no"


def test_one_of_two_that_cannot_is_ejected_and_the_version_comes() -> None:
    """A full disk says nothing of the version."""
    world = after(ready(replicas=2), "publish run1", "coordinate", "break r1", "settle")
    assert states(world) == {V[1]: "current"}
    assert members(world) == {"r1": "ejected", "r2": "ready"}
    assert world.table.members["r1"].reason == f"cannot take {V[1]}: disk full"
    world = after(world, "later 10", "settle")
    assert members(world)["r1"] == "joining"
    assert world.table.members["r1"].reason == f"refused {V[1]}: disk full"
    world = after(world, "relent r1", "settle")
    assert members(world)["r1"] == "ready"


def test_most_that_cannot_are_outvoted_by_the_one_that_can() -> None:
    world = after(ready(replicas=3), "publish run1", "coordinate", "break r1", "break r3", "settle")
    assert states(world) == {V[1]: "current"}
    assert members(world) == {"r1": "ejected", "r2": "ready", "r3": "ejected"}


def test_who_cannot_is_not_taken_out_before_all_have_spoken() -> None:
    """It serves what is current as well as the others do, and the version may yet be refused."""
    world = after(ready(replicas=3), "publish run1", "coordinate", "break r1", "work r1", "work r2", "coordinate")
    assert states(world) == {V[1]: "staging"}
    assert members(world)["r1"] == "ready"


def test_who_cannot_has_no_vote() -> None:
    """Of the two that could judge, one refuses."""
    world = after(ready(replicas=3), "publish run1", "coordinate", "break r1", "refuse r2", "settle")
    assert fate(world, V[1])[0] == "rolled_back"
    assert fate(world, V[1])[1] == "r2: no"
    assert set(members(world).values()) == {"ready"}


@pytest.mark.parametrize(("replicas", "broken", "floor"), [(2, 2, 1), (2, 1, 2), (1, 1, 1)])
def test_where_those_that_cannot_are_not_to_be_spared_the_version_waits_for_nobody(
    replicas: int, broken: int, floor: int
) -> None:
    world = after(ready(replicas=replicas, min_ready=floor), "publish run1", "coordinate")
    world = after(world, *[f"break r{number}" for number in range(1, broken + 1)], "settle")
    assert fate(world, V[1])[0] == "rolled_back"
    assert f"r1: cannot take {V[1]}: disk full" in fate(world, V[1])[1]
    assert set(members(world).values()) == {"ready"}


def test_one_of_three_refusing_waits_for_the_others_word() -> None:
    world = after(ready(replicas=3), "publish run1", "coordinate", "refuse r1", "work r1", "work r2", "coordinate")
    assert states(world) == {V[1]: "staging"}
    assert members(world)["r1"] == "ready"


def test_a_lone_refusal_at_the_floor_rolls_back() -> None:
    world = after(ready(replicas=3, min_ready=3), "publish run1", "coordinate", "refuse r2", "settle")
    assert fate(world, V[1])[0] == "rolled_back"
    assert world.records[V[1]].want == ""
    assert set(members(world).values()) == {"ready"}


def test_a_version_rolled_back_is_not_tried_again_and_the_next_one_is() -> None:
    world = after(ready(), "publish run1", "settle", "publish run1", "coordinate", "refuse r1", "settle", "settle")
    assert states(world) == {V[1]: "current"}
    assert fate(world, V[2])[0] == "rolled_back"
    world = after(world, "publish run1", "settle")
    assert world.table.runs["run1"].current == V[3]
    assert world.table.window("run1") == [V[3], V[1]]


def test_silence_past_the_deadline_ejects() -> None:
    world = after(ready(replicas=3), "publish run1", "coordinate", "work r1", "work r2", "later 60", "coordinate")
    assert states(world) == {V[1]: "staging"}
    world = after(world, "later 1", "coordinate")
    assert states(world) == {V[1]: "current"}
    assert members(world)["r3"] == "ejected"
    assert world.table.members["r3"].reason == f"no ack of {V[1]} in 60 s"


def test_silence_of_all_past_the_deadline_rolls_back() -> None:
    world = after(ready(replicas=2), "publish run1", "coordinate", "later 61", "coordinate")
    assert fate(world, V[1])[0] == "rolled_back"
    assert fate(world, V[1])[1].count("no ack of") == 2
    assert world.records[V[1]].want == "time"  # nobody said that it is bad
    assert set(members(world).values()) == {"ready"}


def test_who_became_ready_later_has_the_whole_deadline() -> None:
    """A fleet that was away while a version was staged is not the version's fault."""
    world = after(ready(replicas=1), "publish run1", "settle", "publish run1", "coordinate", "restart r1", "report")
    world = after(world, "coordinate", "later 61", "coordinate")
    assert members(world) == {"r1": "joining"}
    world = after(world, "work r1", "report", "coordinate")
    assert members(world) == {"r1": "ready"}  # it holds v1 again
    assert states(world) == {V[1]: "current", V[2]: "staging"}
    world = after(world, "later 60", "coordinate", "work r1", "coordinate")
    assert world.table.runs["run1"].current == V[2]


def test_a_replica_without_a_heartbeat_is_ejected_and_the_others_go_on() -> None:
    world = after(ready(replicas=3), "publish run1", "coordinate", "silence r2", "later 6", "settle")
    assert members(world) == {"r1": "ready", "r2": "ejected", "r3": "ready"}
    assert "silent: no heartbeat for 6" in world.table.members["r2"].reason
    assert [name for name, member in world.table.members.items() if member.silent] == ["r2"]
    assert states(world) == {V[1]: "current"}


def test_the_word_of_one_that_fell_silent_at_the_floor_is_not_taken_and_holds_nobody_up() -> None:
    world = after(ready(replicas=2, min_ready=2, runs=2), "publish run1", "coordinate", "work r1", "work r2")
    world = after(world, "silence r1", "later 6", "publish run2", "coordinate")
    assert members(world) == {"r1": "ready", "r2": "ready"}
    assert states(world) == {V[1]: "staging", name_of("run2", 1): "staging"}
    world = after(world, "later 61", "coordinate")
    assert fate(world, V[1])[0] == "rolled_back"
    assert f"r1: no ack of {V[1]}" in fate(world, V[1])[1]


@pytest.mark.parametrize("min_ready", [1, 2, 3])
def test_never_ejected_below_the_floor(min_ready: int) -> None:
    world = ready(replicas=3, min_ready=min_ready)
    world = after(world, *[f"silence r{number}" for number in (1, 2, 3)], "later 6", "coordinate")
    assert list(members(world).values()).count("ready") == min_ready


def test_who_falls_silent_at_the_floor_is_kept_and_marked_until_it_is_heard_again() -> None:
    world = after(ready(replicas=2, min_ready=2), "silence r1", "later 6", "coordinate")
    member, generation = world.table.members["r1"], world.table.generation
    assert members(world) == {"r1": "ready", "r2": "ready"}
    assert (member.silent, world.table.silent()) == (True, frozenset({"r1"}))
    assert member.reason == "silent: no heartbeat for 6.0 s; kept, since no fewer than 2 are to be ready"
    assert after(world, "later 6", "coordinate").table.generation == generation
    world = after(world, "speak r1", "report", "coordinate")
    assert world.table.members["r1"] == replace(member, silent=False, reason="holds all that is served")
    assert world.table.silent() == frozenset()


def test_one_kept_at_the_floor_is_ejected_once_it_can_be_spared() -> None:
    world = after(ready(replicas=3, min_ready=2), "drain r3", "report", "coordinate", "silence r1", "later 6")
    world = after(world, "coordinate")
    assert (members(world)["r1"], world.table.silent()) == ("ready", frozenset({"r1"}))
    world = after(world, "undrain r3", "report", "coordinate")
    assert members(world) == {"r1": "ejected", "r2": "ready", "r3": "ready"}


def test_one_kept_at_the_floor_that_comes_back_to_drain_is_heard() -> None:
    world = after(ready(replicas=1), "silence r1", "later 6", "coordinate", "speak r1", "drain r1", "report")
    assert world.table.silent() == {"r1"}
    world = after(world, "coordinate")
    assert (members(world), world.table.members["r1"].silent) == ({"r1": "draining"}, False)


def test_an_ejected_replica_that_falls_silent_is_said_to_be_and_once_only() -> None:
    """Routers wait for what it was sent before it was ejected, as long as it answers."""
    world = after(ready(replicas=3), "publish run1", "coordinate", "refuse r2", "settle")
    assert not world.table.members["r2"].silent
    world = after(world, "silence r2", "later 6", "coordinate")
    member, generation = world.table.members["r2"], world.table.generation
    assert (member.state, member.silent) == ("ejected", True)
    assert member.reason.startswith(f"refused {V[1]}: no; silent since: no heartbeat for 6")
    assert after(world, "later 6", "coordinate").table.generation == generation


def test_an_ejected_replica_stays_out_for_a_while_and_then_joins_again() -> None:
    world = after(ready(replicas=3), "publish run1", "coordinate", "refuse r2", "settle", "later 9", "settle")
    assert members(world)["r2"] == "ejected"
    world = after(world, "later 1", "settle")
    assert members(world)["r2"] == "joining"
    assert world.table.members["r2"].reason == f"refused {V[1]}: no"
    world = after(world, "relent r2", "settle")
    assert members(world)["r2"] == "ready"


def test_a_joining_replica_that_falls_silent_is_gone() -> None:
    world = after(ready(), "publish run1", "settle", "restart r1", "report", "silence r1", "coordinate")
    assert members(world)["r1"] == "joining"
    world = after(world, "later 6", "coordinate")
    assert "r1" not in members(world)


def test_a_replica_whose_record_expired_is_gone_unless_it_is_the_last() -> None:
    world = after(ready(replicas=2), "silence r1", "later 6", "coordinate")
    assert members(world)["r1"] == "ejected"
    expired = replace(world, replicas=world.replicas | {"r1": replace(world.replicas["r1"], said=None)})
    assert members(coordinate(expired)) == {"r2": "ready"}


# joining, restarting, draining


def test_a_joiner_needs_the_whole_window() -> None:
    world = after(ready(max_staleness=1), *["publish run1", "settle"] * 2)
    world = after(world, "restart r2", "report", "coordinate")
    assert members(world)["r2"] == "joining"
    world = after(world, "work r2", "report", "coordinate")
    assert members(world)["r2"] == "joining"
    assert world.table.members["r2"].reason.startswith("has yet to load")
    world = after(world, "work r2", "report", "coordinate")
    assert members(world)["r2"] == "ready"


def test_who_becomes_ready_during_staging_must_accept_it_too() -> None:
    world = after(ready(replicas=2), "restart r2", "report", "coordinate", "publish run1")
    world = replace(world, replicas=world.replicas | {"r2": replace(world.replicas["r2"], silent=True)})
    world = after(world, "coordinate")
    world = after(world, "work r1", "speak r2", "report", "coordinate")
    assert members(world) == {"r1": "ready", "r2": "ready"}
    assert states(world) == {V[1]: "staging"}
    world = after(world, "work r2", "coordinate")
    assert states(world) == {V[1]: "current"}


def test_a_restarted_engine_is_out_at_once_even_below_the_floor_and_its_acks_are_void() -> None:
    world = after(ready(replicas=1), "publish run1", "settle", "restart r1", "report", "coordinate")
    assert members(world) == {"r1": "joining"}
    assert world.table.members["r1"].engine_epoch == "2"
    assert world.table.runs["run1"].current == V[1]
    world = after(world, "settle")
    assert members(world) == {"r1": "ready"}
    assert world.replicas["r1"].loaded == (V[1],)


def test_a_commit_does_not_count_acks_of_an_engine_that_restarted_meanwhile() -> None:
    world = after(ready(), "publish run1", "coordinate", "work r1", "work r2", "read", "restart r1", "report", "commit")
    assert states(world) == {V[1]: "staging"}


def test_a_commit_does_not_count_who_fell_silent_meanwhile() -> None:
    world = after(
        ready(), "publish run1", "coordinate", "work r1", "work r2", "read", "silence r1", "later 6", "commit"
    )
    assert states(world) == {V[1]: "staging"}


def test_a_replica_does_not_become_ready_in_a_life_that_ended_although_nothing_is_served() -> None:
    world = after(new_world(replicas=1), "coordinate", "drain r1", "report", "coordinate", "undrain r1", "report")
    world = after(world, "decide", "read", "restart r1", "report", "commit")
    assert members(world) == {"r1": "joining"}


def test_a_decision_that_was_overtaken_is_not_committed() -> None:
    world = after(ready(), "publish run1", "coordinate", "work r1", "work r2", "read")
    overtaken = replace(after(world, "coordinate"), read=world.read)
    assert after(overtaken, "commit").table == overtaken.table


def test_a_draining_replica_is_out_and_need_not_answer() -> None:
    world = after(ready(replicas=2), "drain r1", "report", "publish run1", "coordinate", "work r2", "coordinate")
    assert members(world) == {"r1": "draining", "r2": "ready"}
    assert states(world) == {V[1]: "current"}
    world = after(world, "undrain r1", "report", "settle")
    assert members(world) == {"r1": "ready", "r2": "ready"}


def test_who_leaves_after_it_drained_is_not_told_of_as_one_that_failed() -> None:
    drained = after(ready(replicas=2), "drain r1", "report", "settle", "silence r1", "later 6", "coordinate")
    assert members(drained) == {"r2": "ready"}
    last = drained.events[-1]
    assert isinstance(last, ReplicaState)
    assert (last.replica, last.state) == ("r1", "gone")
    assert last.reason.startswith("it drained: no heartbeat for 6")


def test_the_last_one_may_drain_and_then_nothing_is_promoted() -> None:
    world = after(ready(replicas=1), "drain r1", "report", "publish run1", "settle")
    assert members(world) == {"r1": "draining"}
    assert states(world) == {}


def test_another_base_model_never_becomes_ready() -> None:
    world = new_world(replicas=1)
    said = world.replicas["r1"].said
    assert said is not None
    replica = replace(world.replicas["r1"], said=replace(said, base_model="other"))
    world = coordinate(replace(world, replicas={"r1": replica}))
    assert members(world) == {"r1": "joining"}
    assert world.table.members["r1"].reason == "serves base model other, the group serves base"


def test_a_replica_that_moved_is_found_at_its_new_address() -> None:
    world = ready(replicas=1)
    said = world.replicas["r1"].said
    assert said is not None
    replica = replace(world.replicas["r1"], said=replace(said, url="http://elsewhere", block_size=32))
    world = coordinate(replace(world, replicas={"r1": replica}))
    member = world.table.members["r1"]
    assert (member.state, member.url, member.block_size) == ("ready", "http://elsewhere", 32)


def test_a_member_has_the_ranks_that_its_agent_says_and_stays_ready_when_that_changes() -> None:
    world = ready(replicas=2)
    assert {member.ranks for member in world.table.members.values()} == {1}
    for ranks in (4, 1):
        said = world.replicas["r1"].said
        assert said is not None
        replica = replace(world.replicas["r1"], said=replace(said, ranks=ranks))
        world = coordinate(replace(world, replicas=world.replicas | {"r1": replica}))
        assert {name: (member.state, member.ranks) for name, member in world.table.members.items()} == {
            "r1": ("ready", ranks),
            "r2": ("ready", 1),
        }


def test_a_replica_that_joins_has_its_ranks_from_the_beginning() -> None:
    world = ready(replicas=1)
    said = world.replicas["r1"].said
    assert said is not None
    another = replace(world.replicas["r1"], said=replace(said, ranks=2, engine_epoch="another"))
    world = coordinate(replace(world, replicas={"r1": another}))
    member = world.table.members["r1"]
    assert (member.engine_epoch, member.ranks) == ("another", 2)
