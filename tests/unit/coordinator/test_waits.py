"""Who holds what up, in words and seconds."""

from __future__ import annotations

from msgspec.structs import replace

from adaptersync.coordinator.gate import UNASKED
from adaptersync.coordinator.waits import waits
from support.stories import V, after, ready
from support.world import World, fleet, name_of


def told(world: World) -> list[tuple[str, str, float | None]]:
    found = [(each.version, each.waits_for, each.left_s) for each in waits(fleet(world), world.config)]
    return [(version, what, None if left_s is None else round(left_s)) for version, what, left_s in found]


def retiring(**settings: int) -> World:
    """v1 retires: v2 is current and the window is one version."""
    world = after(ready(max_staleness=0, **settings), "publish run1", "settle", "publish run1", "coordinate")
    return after(world, "works r1", "works r2", "report")


def test_a_fleet_at_rest_waits_for_nothing() -> None:
    assert told(after(ready(routers=1), "publish run1", "settle", "route g1")) == []


def test_a_router_that_fell_silent_is_named_with_what_is_left_of_its_time() -> None:
    world = after(retiring(routers=2), "cut g2", "coordinate", "route g1", "later 24")
    assert told(world) == [(V[1], "the acknowledgement of router g2", 41)]
    assert told(after(world, "wait 30", "route g1")) == [(V[1], "the acknowledgement of router g2", 11)]


def test_requests_in_flight_are_counted() -> None:
    world = after(retiring(routers=1), "coordinate", "route g1", f"inflight g1 {V[1]}", "wait 10")
    assert told(world) == [(V[1], "1 requests in flight at router g1", 90)]


def test_after_a_loss_routers_that_nobody_knows_are_waited_for() -> None:
    world = after(retiring(), "coordinate")
    lost = replace(world, table=replace(world.table, restored_at=world.now - 5))
    undrained = replace(lost.table.versions[V[1]], drained=False)
    lost = replace(lost, table=replace(lost.table, versions=lost.table.versions | {V[1]: undrained}))
    assert told(lost) == [(V[1], "routers that a rebuilt Redis may not know of", 60)]


def test_replicas_that_have_yet_to_unload_are_named() -> None:
    world = after(retiring(), "coordinate", "works r1", "report", "coordinate")
    assert told(world) == [(V[1], "r2 to unload it", 60)]


def test_a_candidate_waits_for_the_words_that_are_missing() -> None:
    world = after(ready(), "publish run1", "coordinate", "works r1", "later 20")
    assert told(world) == [(V[1], "the word of r2", 40)]


def test_a_publication_waits_for_the_one_before_it() -> None:
    world = after(ready(), "publish run1", "coordinate", "works r1", "publish run1")
    assert told(world)[0] == (V[2], f"{V[1]}, which is on its way", None)


def test_a_publication_that_waits_for_room_says_what_is_to_make_it() -> None:
    world = after(ready(max_staleness=1, slots=3, routers=1), *["publish run1", "settle"] * 2, "route g1")
    world = after(world, "publish run1", "coordinate", "works r1", "works r2", "report", "coordinate", "publish run1")
    assert told(world) == [
        (V[4], f"capacity: 3 of 3 adapters are held, {V[1]} among them", None),
        (V[1], "the acknowledgement of router g1", 65),
    ]


def test_with_too_few_replicas_everything_waits_for_them() -> None:
    world = after(ready(replicas=1), "publish run1", "coordinate")
    world = replace(world, config=replace(world.config, coordinator=replace(world.config.coordinator, min_ready=2)))
    world = after(world, "publish run1")
    assert told(world)[:2] == [
        (V[2], "2 replicas to be ready, 1 are", None),
        (V[1], "2 replicas to be ready, 1 are", None),
    ]


def test_what_stands_at_the_gate_waits_for_an_operator() -> None:
    world = after(ready(gate=True), "publish run1", "settle")
    assert [what for _, what, _ in told(world)] == ["the gate: adaptersync gate admit, or refuse"]


def test_another_run_is_told_of_beside() -> None:
    world = after(ready(runs=2), "publish run1", "publish run2", "coordinate", "works r1")
    assert [version for version, _, _ in told(world)] == [V[1], name_of("run2", 1)]


def test_a_gate_says_whom_it_waits_for() -> None:
    asks = {"gate": True, "gate_function": "my.module:judge", "gate_timeout_s": 90.0}
    world = after(ready(**asks), "publish run1", "settle", "later 20")
    assert told(world) == [(V[1], "the gate: my.module:judge", 70)]
    (wait,) = waits(replace(fleet(world), unasked=frozenset({V[1]})), world.config)
    assert wait.waits_for == f"the gate: my.module:judge; {UNASKED}"
    what = "the gate: my.module:judge has not said in 90 s; adaptersync gate admit, or refuse"
    assert told(after(world, "later 71", "settle")) == [(V[1], what, None)]
