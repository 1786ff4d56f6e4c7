"""Random lives of small fleets: whatever happens, every commit keeps the promises, and calm brings the newest version.

`support.world` checks each commit as it is made; here the walks are drawn, and what must be true at their end.
"""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptersync.coordinator.protocol import decide
from adaptersync.coordinator.waits import waits
from support.world import Action, World, apply, calm, coordinate, fleet, new_world

FLEETS = st.builds(
    new_world,
    replicas=st.integers(1, 3),
    min_ready=st.integers(1, 2),
    runs=st.integers(1, 2),
    max_staleness=st.integers(0, 2),
    routers=st.integers(0, 2),
    gate=st.booleans(),
)
STEPS = st.lists(st.integers(0, 10**6), max_size=20) | st.lists(st.integers(0, 10**6), min_size=50, max_size=150)


def enabled(world: World) -> list[Action]:
    """What may happen next. Ordinary things stand more than once, so that walks get somewhere."""
    found: list[Action] = [*[("decide",)] * 12, *[("read",), ("commit",)] * 3]
    for name, replica in world.replicas.items():
        found += [("work", name), ("report", name)] * 6
        found += [("speak", name), ("undrain", name)] * 2
        found += [("restart", name), ("refuse", name), ("break", name), ("relent", name)]
        found.append(("speak" if replica.silent else "silence", name))
        found.append(("undrain" if replica.draining else "drain", name))
    for run in world.runs:
        found += [("publish", run)] * 3
        found += [("begin", run, "1")]
        found += [("ask", "q", run, version) for version in ("", *world.table.window(run)[1:])]
    for router in world.routers:
        found += [("route", router), ("hear", router)] * 2
        found.append(("mend" if router in world.cut else "cut", router))
        found += [("inflight", router, version) for version in world.table.versions]
    for name, version in world.table.versions.items():
        if version.state == "ready":
            found += [("ask", "g", version.run, name, kind) for kind in ("admit", "admit", "refuse")]
    found += [("wait", "1"), ("wait", "6"), ("wait", "61")]
    return found


def walk(world: World, steps: list[int]) -> World:
    for step in steps:
        actions = enabled(world)
        world = apply(world, actions[step % len(actions)])
    return world


@settings(max_examples=300, deadline=None)
@given(world=FLEETS, steps=STEPS)
def test_whatever_happens_every_commit_keeps_the_promises_and_deciding_ends(world: World, steps: list[int]) -> None:
    world = coordinate(walk(world, steps))
    assert decide(fleet(world), world.config) is None


@settings(max_examples=200, deadline=None)
@given(world=FLEETS, steps=STEPS)
def test_a_healthy_quiet_fleet_ends_with_the_newest_version_current(world: World, steps: list[int]) -> None:
    """Unless that version was refused, or its trainer replaced, meanwhile; then something it was published after is."""
    world = calm(walk(world, steps))
    if len(world.replicas) < world.config.coordinator.min_ready:
        assert not world.table.versions  # nobody to serve anything
        return
    for run, versions in world.published.items():
        newest = versions[-1].adapter_id
        fate = world.records[newest].state
        assert fate in ("current", "rolled_back", "superseded", "voided", "retiring", "retired"), fate
        if fate not in ("current", "superseded"):
            assert world.table.runs[run].current != newest
        if fate == "superseded":
            assert versions[-1].epoch < world.table.runs[run].epoch
    for run in world.published:
        world = calm(apply(world, ("publish", run)))
        assert world.table.runs[run].current == world.published[run][-1].adapter_id


@settings(max_examples=200, deadline=None)
@given(world=FLEETS, steps=STEPS)
def test_at_rest_every_engine_holds_what_is_served_and_nothing_else(world: World, steps: list[int]) -> None:
    world = calm(walk(world, steps))
    for name, member in world.table.members.items():
        if member.state == "ready":
            assert set(world.replicas[name].loaded) == set(world.table.wanted())


@settings(max_examples=200, deadline=None)
@given(world=FLEETS, steps=STEPS)
def test_whatever_is_held_up_has_a_reason_and_nothing_else_has(world: World, steps: list[int]) -> None:
    """Between two decisions: what operators are told waits is what the rules leave waiting."""
    world = coordinate(walk(world, steps))
    seen, table = fleet(world), world.table
    held = {wait.version for wait in waits(seen, world.config)}
    waiting = {name for name, version in table.versions.items() if version.state in ("staging", "retiring")}
    waiting |= {name for name, version in table.versions.items() if version.state == "ready" and not version.admitted}
    waiting |= {newer[-1].adapter_id for newer in seen.published.values() if newer}
    admitted = {name for name, version in table.versions.items() if version.admitted}  # till its acks allow it
    assert waiting <= held <= waiting | admitted


@settings(max_examples=200, deadline=None)
@given(world=FLEETS, steps=STEPS)
def test_the_order_in_which_a_fleet_was_read_decides_nothing(world: World, steps: list[int]) -> None:
    world = walk(world, steps)
    seen = fleet(world)
    turned = msgspec.structs.replace(
        seen,
        replicas=dict(reversed(seen.replicas.items())),
        acks=dict(reversed(seen.acks.items())),
        routers=dict(reversed(seen.routers.items())),
    )
    one, two = decide(seen, world.config), decide(turned, world.config)
    assert (one and one.table) == (two and two.table)


@settings(max_examples=200, deadline=None)
@given(world=FLEETS, steps=STEPS)
def test_a_decision_survives_its_journey(world: World, steps: list[int]) -> None:
    """A coordinator is as good as what it writes: the next one goes on from the bytes."""
    world = walk(world, steps)
    seen = msgspec.json.decode(msgspec.json.encode(fleet(world)), type=type(fleet(world)))
    assert seen == fleet(world)
    assert decide(seen, world.config) == decide(fleet(world), world.config)
