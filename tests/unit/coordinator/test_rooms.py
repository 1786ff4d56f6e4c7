"""Room for several runs, runs that ended, and replicas that do not let go."""

from __future__ import annotations

from msgspec.structs import replace

from adaptersync.coordinator.retirement import spare
from support.stories import V, after, fate, members, ready, states
from support.world import World, name_of, settle


def ended(world: World, run: str, at: float = 1.0) -> World:
    return settle(replace(world, runs=world.runs | {run: replace(world.runs[run], ended_at=at)}))


def full(**settings: int) -> World:
    """Four slots; run1 has promoted two versions, run2 two."""
    world = ready(runs=2, max_staleness=1, slots=4, **settings)
    world = after(world, *["publish run1", "settle"] * 2, "publish run2", "settle", "publish run2", "settle")
    assert len(states(world)) == 4
    return world


def test_an_ended_run_keeps_its_window_while_nobody_needs_the_room() -> None:
    world = ended(full(), "run1")
    assert world.table.runs["run1"].ended_at == 1.0
    assert world.table.window("run1") == [V[2], V[1]]


def test_a_run_has_ended_once_what_it_published_is_considered() -> None:
    """Until then a request for it is held: more of it may be served."""
    world = after(ready(), "publish run1", "settle", "publish run1", "coordinate", "publish run1")
    world = after(replace(world, runs={"run1": replace(world.runs["run1"], ended_at=1.0)}), "decide")
    assert world.table.runs["run1"].ended_at == 0.0
    world = settle(world)
    assert (world.table.runs["run1"].current, world.table.runs["run1"].ended_at) == (V[3], 1.0)


def test_an_ended_run_gives_up_what_is_behind_its_current_version_when_another_needs_room() -> None:
    world = after(ended(full(), "run1"), "publish run2", "settle")
    assert world.table.runs["run2"].current == name_of("run2", 3)
    assert world.table.window("run1") == [V[2]]
    assert fate(world, V[1]) == ("retired", "unloaded everywhere")


def test_its_current_version_goes_last_and_nothing_is_current_then() -> None:
    world = after(ended(full(), "run1"), *["publish run2", "settle"] * 2)
    assert world.table.window("run1") == [V[2]]
    wider = after(world, "begin run2 3", *["publish run2", "settle"] * 4)
    assert wider.table.window("run1") == []
    assert wider.table.runs["run1"].current is None
    assert fate(wider, V[2])[0] == "retired"


def test_the_run_that_ended_first_goes_first_and_one_that_goes_on_never() -> None:
    assert spare(full().table) is None
    world = ended(ended(full(), "run1", at=5.0), "run2", at=4.0)
    assert spare(world.table) == name_of("run2", 1)


def test_a_joiner_needs_room_for_what_all_runs_serve() -> None:
    world = after(full(), "restart r1", "report", "settle")
    assert members(world)["r1"] == "ready"  # four are served, and it holds four
    smaller = replace(world, replicas=world.replicas | {"r1": replace(world.replicas["r1"], slots=3)})
    world = after(smaller, "restart r1", "report", "settle")
    assert world.table.members["r1"].reason.startswith("capacity: holds 3 adapters, 4 are needed")


def test_a_replica_that_cannot_unload_in_time_is_ejected_and_holds_nothing_up() -> None:
    world = after(ready(max_staleness=0, replicas=3), "publish run1", "settle", "publish run1", "coordinate")
    world = after(world, "work r1", "work r2", "work r3", "report", "coordinate", "works r1", "works r2")
    world = after(world, "later 60", "coordinate")
    assert states(world)[V[1]] == "retiring"
    assert members(world)["r3"] == "ready"
    world = after(world, "later 2", "coordinate")
    assert states(world) == {V[2]: "current"}
    assert world.table.members["r3"].reason == f"has not unloaded {V[1]}"
    world = after(world, "later 11", "coordinate")
    assert world.table.members["r3"].reason == f"has yet to unload {V[1]}"
    assert members(after(world, "settle"))["r3"] == "ready"


def test_at_the_floor_nobody_is_ejected_for_holding_a_version() -> None:
    world = after(ready(max_staleness=0, replicas=1), "publish run1", "settle", "publish run1", "coordinate")
    world = after(world, "work r1", "report", "coordinate", "later 62", "coordinate")
    assert members(world) == {"r1": "ready"}
    assert states(world)[V[1]] == "retiring"
