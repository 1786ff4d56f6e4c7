"""The way in, as cases: what is staged, promoted, superseded, and what a new trainer changes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from adaptersync.coordinator.protocol import decide
from adaptersync_core.events import ReplicaState, VersionPromoted, VersionStaging
from adaptersync_core.records import VersionRecord
from adaptersync_core.registry import PUBLICATIONS_AT_ONCE
from support.stories import V, after, fate, ready, states
from support.world import apply, fleet, name_of, new_world

# the way in


def test_a_version_becomes_current_when_all_have_accepted_it() -> None:
    world = after(ready(replicas=3), "publish run1", "coordinate")
    assert states(world) == {V[1]: "staging"}
    world = after(world, "work r1", "work r2", "coordinate")
    assert states(world) == {V[1]: "staging"}
    world = after(world, "work r3", "coordinate")
    assert states(world) == {V[1]: "current"}
    assert world.table.runs["run1"].current == V[1]


def test_what_was_decided_before_redis_lost_it_keeps_what_is_known_of_it() -> None:
    """Also that nobody found it bad: an unmodified trainer ends at one that is."""
    seen = fleet(after(ready(), "publish run1"))
    known = VersionRecord(state="rolled_back", reason="capacity", want="room", generation=3, at=1.0)
    decision = decide(replace(seen, fates={V[1]: known}), new_world().config)
    assert decision is not None
    record = decision.records[V[1]]
    assert (record.state, record.reason, record.want) == ("rolled_back", "capacity", "room")


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


@pytest.mark.parametrize("count", [PUBLICATIONS_AT_ONCE, PUBLICATIONS_AT_ONCE + 1, 3 * PUBLICATIONS_AT_ONCE])
def test_of_what_piled_up_only_the_newest_is_staged(count: int) -> None:
    world = after(ready(), *["publish run1"] * count, "settle")
    assert [event.version for event in world.events if isinstance(event, VersionStaging)] == [name_of("run1", count)]
    assert world.table.runs["run1"].current == name_of("run1", count)
    assert {world.records[name_of("run1", seq)].state for seq in range(1, count)} == {"superseded"}


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


# the shape of a decision


def test_a_fleet_at_rest_needs_no_decision() -> None:
    world = after(ready(max_staleness=2, routers=1), *["publish run1", "settle"] * 3, "later 1")
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
