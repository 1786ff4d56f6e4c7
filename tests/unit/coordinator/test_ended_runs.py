"""What a run that has ended still serves is given up when an operator says so, and then nothing is lost by it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from adaptersync_core.events import RequestRefused, VersionRetiring
from support.stories import V, after, fate, ready, states
from support.world import World, apply, coordinate, settle


def ended(**settings: int) -> World:
    """v1 and v2 are served, and nothing more comes."""
    world = after(ready(**settings), "publish run1", "settle", "publish run1", "settle")
    return settle(replace(world, runs={"run1": replace(world.runs["run1"], ended_at=1.0)}))


def test_all_that_it_serves_retires_and_goes() -> None:
    world = settle(apply(ended(), ("ask", "q", "run1", "", "retire")))
    assert states(world) == {}
    assert world.table.runs["run1"].current is None
    assert world.table.runs["run1"].ended_at
    assert fate(world, V[1]) == fate(world, V[2]) == ("retired", "unloaded everywhere")
    told = [(event.version, event.reason) for event in world.events if isinstance(event, VersionRetiring)]
    assert sorted(told) == [(V[1], "asked"), (V[2], "asked")]


def test_what_is_in_flight_ends_first() -> None:
    world = coordinate(apply(after(ended(routers=1), "route g1"), ("ask", "q", "run1", "", "retire")))
    world = after(world, f"inflight g1 {V[2]}", "coordinate", "works r1", "works r2", "report", "coordinate")
    assert states(world)[V[2]] == "retiring"
    assert settle(after(world, "route g1")).table.versions == {}


@pytest.mark.parametrize(
    ("world", "reason"),
    [
        (after(ready(), "publish run1", "settle"), "run run1 has not ended: adaptersync end"),
        (settle(apply(ended(), ("ask", "p", "run1", "", "retire"))), "run run1 serves nothing any more"),
    ],
)
def test_a_run_that_goes_on_keeps_what_it_serves(world: World, reason: str) -> None:
    again = coordinate(apply(world, ("ask", "q", "run1", "", "retire")))
    assert again.events[-1] == RequestRefused(request="q", reason=reason)
    assert again.table.versions == world.table.versions


def test_a_run_that_nobody_knows_is_refused() -> None:
    world = coordinate(apply(ended(), ("ask", "q", "nobody", "", "retire")))
    assert world.events[-1] == RequestRefused(request="q", reason="there is no run nobody")
