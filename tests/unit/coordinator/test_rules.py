"""Every rule of the coordinator, as a case each: what happened, and what the table says afterwards."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from adaptersync.coordinator.protocol import decide
from adaptersync_core.events import ReplicaState, RequestRefused, VersionPromoted, VersionVoided
from support.world import World, apply, coordinate, fleet, name_of, new_world, report_all, settle

V = ["", *(name_of("run1", seq) for seq in range(1, 20))]


def after(world: World, *actions: str) -> World:
    """Actions as words: "publish run1", "refuse r1", "settle", ..."""
    for action in actions:
        match action.split():
            case ["settle"]:
                world = settle(world)
            case ["coordinate"]:
                world = coordinate(world)
            case ["report"]:
                world = report_all(world)
            case ["works", name]:  # its agent does all it has to do
                before = None
                while world != before:
                    before, world = world, apply(world, ("work", name))
            case ["later", seconds]:  # time passes, and everybody who speaks has spoken since
                world = report_all(apply(world, ("wait", seconds)))
            case words:
                world = apply(world, tuple(words))
    return world


def states(world: World) -> dict[str, str]:
    return {name: version.state for name, version in world.table.versions.items()}


def members(world: World) -> dict[str, str]:
    return {name: member.state for name, member in world.table.members.items()}


def fate(world: World, name: str) -> tuple[str, str]:
    record = world.records[name]
    return record.state, record.reason


def ready(**settings: int) -> World:
    """A fleet at rest, everybody ready, nothing published."""
    return settle(new_world(**settings))


# the way in


def test_a_version_becomes_current_when_all_have_accepted_it() -> None:
    world = after(ready(replicas=3), "publish run1", "coordinate")
    assert states(world) == {V[1]: "staging"}
    world = after(world, "work r1", "work r2", "coordinate")
    assert states(world) == {V[1]: "staging"}
    world = after(world, "work r3", "coordinate")
    assert states(world) == {V[1]: "current"}
    assert world.table.runs["run1"].current == V[1]


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
def test_the_window_is_the_current_version_and_max_staleness_before_it(staleness: int) -> None:
    world = ready(max_staleness=staleness)
    for seq in range(1, 7):
        world = after(world, "publish run1", "settle")
        first = max(1, seq - staleness)
        assert world.table.window("run1") == [V[number] for number in range(seq, first - 1, -1)]
        assert world.table.runs["run1"].current == V[seq]
        assert set(states(world)) == set(world.table.window("run1"))  # what is beyond is unloaded and gone
        for replica in world.replicas.values():
            assert set(replica.loaded) == set(world.table.window("run1"))
    assert fate(world, V[1])[0] in ("retired", "retained", "current")


def test_staleness_counts_promotions_not_numbers() -> None:
    world = after(ready(max_staleness=1), "publish run1", "settle")
    world = after(world, *["publish run1"] * 3, "settle")  # v2 and v3 are passed over
    assert world.table.window("run1") == [V[4], V[1]]


def test_the_newest_publication_is_taken_and_older_ones_are_superseded() -> None:
    world = after(ready(), "publish run1", "publish run1", "publish run1", "coordinate")
    assert states(world) == {V[3]: "staging"}
    assert fate(world, V[1]) == ("superseded", f"{V[3]} came before it was staged")
    assert fate(world, V[2])[0] == "superseded"


def test_what_is_published_meanwhile_waits_for_the_candidate() -> None:
    world = after(ready(), "publish run1", "coordinate", "publish run1", "publish run1", "coordinate")
    assert states(world) == {V[1]: "staging"}
    world = after(world, "work r1", "work r2", "coordinate")
    assert states(world) == {V[1]: "current", V[3]: "staging"}
    assert fate(world, V[2])[0] == "superseded"


def test_an_empty_fleet_promotes_nothing_and_forgets_nothing() -> None:
    world = after(new_world(replicas=0), "publish run1", "publish run1", "coordinate")
    assert states(world) == {}
    assert V[1] not in world.records
    assert world.table.runs["run1"].considered == 0


@pytest.mark.parametrize("min_ready", [2, 3])
def test_nothing_is_staged_or_promoted_below_the_floor(min_ready: int) -> None:
    world = after(ready(replicas=1, min_ready=min_ready), "publish run1", "settle", "later 1000", "settle")
    assert states(world) == {}


def test_runs_do_not_wait_for_each_other() -> None:
    world = after(ready(runs=2), "publish run1", "coordinate", "publish run2", "coordinate")
    assert states(world) == {V[1]: "staging", name_of("run2", 1): "staging"}
    world = after(world, "settle")
    assert set(states(world).values()) == {"current"}


# trainers


def test_a_new_epoch_supersedes_what_the_old_one_had_on_its_way() -> None:
    world = after(ready(), "publish run1", "settle", "publish run1", "coordinate", "work r1", "begin run1 1")
    world = after(world, "coordinate")
    assert states(world) == {V[1]: "current", V[2]: "retiring"}  # r1 has it still
    assert fate(world, V[2]) == ("superseded", "trainer epoch 2 began")
    world = after(world, "settle")
    assert states(world) == {V[1]: "current"}  # it serves until the new trainer has something better


def test_what_an_old_epoch_published_is_superseded_unseen() -> None:
    world = after(ready(), "publish run1", "begin run1 1", "publish run1", "coordinate")
    assert states(world) == {V[2]: "staging"}
    assert fate(world, V[1]) == ("superseded", "published by trainer epoch 1, which 2 replaced")


def test_nothing_of_an_old_epoch_is_staged_when_the_new_one_has_published_nothing() -> None:
    world = after(ready(), "publish run1", "begin run1 1", "settle")
    assert states(world) == {}
    assert fate(world, V[1])[0] == "superseded"


def test_the_window_holds_one_epoch() -> None:
    world = after(ready(max_staleness=2), *["publish run1", "settle"] * 3, "begin run1 2", "publish run1", "settle")
    assert world.table.window("run1") == [V[4]]
    assert fate(world, V[3]) == ("retired", "unloaded everywhere")


def test_a_smaller_window_takes_effect_with_the_next_promotion() -> None:
    world = after(ready(max_staleness=2), *["publish run1", "settle"] * 3, "begin run1 0", "settle")
    assert len(world.table.window("run1")) == 3
    assert world.table.runs["run1"].max_staleness == 0
    world = after(world, "publish run1", "settle")
    assert world.table.window("run1") == [V[4]]


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


def test_two_of_three_refusing_is_the_versions_fault_before_the_third_has_spoken() -> None:
    world = after(ready(replicas=3), "publish run1", "coordinate", "refuse r1", "refuse r2", "work r1", "work r2")
    world = after(world, "coordinate")
    assert fate(world, V[1])[0] == "rolled_back"
    assert fate(world, V[1])[1] == "r1: no; r2: no"


def test_one_of_three_refusing_waits_for_the_others_word() -> None:
    world = after(ready(replicas=3), "publish run1", "coordinate", "refuse r1", "work r1", "work r2", "coordinate")
    assert states(world) == {V[1]: "staging"}
    assert members(world)["r1"] == "ready"


def test_a_lone_refusal_at_the_floor_rolls_back() -> None:
    world = after(ready(replicas=3, min_ready=3), "publish run1", "coordinate", "refuse r2", "settle")
    assert fate(world, V[1])[0] == "rolled_back"
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


# the way out


def retiring(**settings: int) -> World:
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


def three_promoted(**settings: int) -> World:
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


# capacity


def test_a_replica_with_too_few_slots_never_becomes_ready() -> None:
    world = settle(new_world(replicas=1, max_staleness=2, slots=3))
    assert members(world) == {"r1": "joining"}
    assert world.table.members["r1"].reason.startswith("capacity: holds 3 adapters, 4 are needed")


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


def test_what_will_never_have_room_is_refused_with_the_reason() -> None:
    world = ready(max_staleness=1, slots=3)
    world = after(world, "begin run1 5", *["publish run1", "settle"] * 4)
    assert world.table.window("run1") == [V[3], V[2], V[1]]
    assert fate(world, V[4]) == ("rolled_back", "capacity: all 3 adapters that replicas can hold are served")


def test_one_that_does_not_say_its_slots_does_not_hide_the_limit_of_another() -> None:
    world = ready(max_staleness=1, slots=3)
    blind = replace(world.replicas["r1"], slots=0)
    world = after(replace(world, replicas=world.replicas | {"r1": blind}), "report", "begin run1 5")
    world = after(world, *["publish run1", "settle"] * 4)
    assert fate(world, V[4])[0] == "rolled_back"


# the shape of a decision


def test_a_fleet_at_rest_needs_no_decision() -> None:
    world = after(three_promoted(routers=1), "later 1")
    assert decide(fleet(world), world.config) is None


def test_every_decision_is_one_generation_with_the_time_and_a_reason() -> None:
    world = new_world()
    while (decision := decide(fleet(world), world.config)) is not None:
        assert decision.table.generation == world.table.generation + 1
        assert decision.table.written_at == world.now
        world = apply(world, ("decide",))
    assert [event.state for event in world.events if isinstance(event, ReplicaState)] == ["joining"] * 2 + ["ready"] * 2
    assert all(event.reason for event in world.events if isinstance(event, ReplicaState))


def test_a_promotion_says_how_long_it_took_and_what_was_before() -> None:
    world = after(ready(), "publish run1", "settle", "publish run1", "later 3", "settle")
    promoted = [event for event in world.events if isinstance(event, VersionPromoted)]
    assert [(event.previous, event.waited_s) for event in promoted] == [("", 0.0), (V[1], 3.0)]
