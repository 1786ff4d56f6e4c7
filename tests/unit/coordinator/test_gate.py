"""The gate, as cases: what every replica proved waits there until an operator has said yes or no."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from adaptersync.coordinator.gate import UNASKED, overdue
from adaptersync_core.events import RequestRefused, VersionHeld, VersionReady, VersionRolledBack
from support.stories import V, after, fate, ready, states
from support.world import World, apply, coordinate, fleet, settle


def at_the_gate() -> World:
    """v1 is current, v2 waits."""
    world = after(ready(gate=True), "publish run1", "settle", f"ask q run1 {V[1]} admit", "settle")
    return after(world, "publish run1", "settle")


def test_a_version_waits_at_the_gate_and_says_so() -> None:
    world = at_the_gate()
    assert states(world) == {V[1]: "current", V[2]: "ready"}
    assert fate(world, V[2])[0] == "ready"
    told = [event for event in world.events if isinstance(event, VersionReady)]
    assert [(event.version, event.replicas) for event in told] == [(V[1], "r1 r2"), (V[2], "r1 r2")]
    assert states(after(world, "later 1000", "settle"))[V[2]] == "ready"  # for as long as it takes


def test_without_a_gate_nothing_waits() -> None:
    world = after(ready(), "publish run1", "settle")
    assert states(world) == {V[1]: "current"}
    assert not [event for event in world.events if isinstance(event, VersionReady)]


def test_what_is_admitted_becomes_current() -> None:
    world = settle(apply(at_the_gate(), ("ask", "q", "run1", V[2], "admit")))
    assert world.table.runs["run1"].current == V[2]
    assert world.requests == {}


def test_what_is_refused_is_rolled_back_with_the_reason_and_unloaded() -> None:
    world = settle(apply(at_the_gate(), ("ask", "q", "run1", V[2], "refuse")))
    assert fate(world, V[2]) == ("rolled_back", "asked")
    assert states(world) == {V[1]: "current"}
    assert [event.version for event in world.events if isinstance(event, VersionRolledBack)] == [V[2]]
    assert all(V[2] not in replica.loaded for replica in world.replicas.values())


def test_acks_are_looked_at_once_more_when_it_is_promoted() -> None:
    world = after(at_the_gate(), f"ask q run1 {V[2]} admit", "decide", "read", "restart r2", "report", "commit")
    assert world.table.runs["run1"].current == V[1]  # between reading and committing r2 lost what it held
    world = settle(world)
    assert world.table.runs["run1"].current == V[2]  # the admission stands


def test_an_admitted_version_waits_for_the_floor() -> None:
    world = after(ready(gate=True, min_ready=2), "publish run1", "settle", "restart r2", "report", "coordinate")
    world = coordinate(apply(world, ("ask", "q", "run1", V[1], "admit")))
    assert states(world)[V[1]] == "ready"
    assert world.requests == {}
    assert settle(world).table.runs["run1"].current == V[1]


def test_one_that_refuses_at_the_last_moment_counts() -> None:
    world = after(at_the_gate(), "restart r1", "restart r2", "report", "coordinate", "refuse r1", "refuse r2")
    world = settle(apply(world, ("ask", "q", "run1", V[2], "admit")))
    assert fate(world, V[2])[0] == "rolled_back"
    assert world.table.runs["run1"].current == V[1]


@pytest.mark.parametrize("kind", ["admit", "refuse", "inconclusive"])
@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (V[1], f"{V[1]} is current, not at the gate"),
        (V[9], f"{V[9]} is not on its way in run run1"),
        ("", "no version is not on its way in run run1"),
    ],
)
def test_only_what_waits_there_can_be_admitted_or_refused(kind: str, version: str, reason: str) -> None:
    before = at_the_gate()
    world = coordinate(apply(before, ("ask", "q", "run1", version, kind)))
    assert world.events[-1] == RequestRefused(request="q", reason=reason)
    assert (world.table.versions, world.table.runs) == (before.table.versions, before.table.runs)


def test_a_version_is_not_admitted_before_it_is_proved() -> None:
    world = after(ready(gate=True), "publish run1", "coordinate", f"ask q run1 {V[1]} admit", "coordinate")
    assert world.events[-1] == RequestRefused(request="q", reason=f"{V[1]} is staging, not at the gate")


def test_a_new_trainer_supersedes_what_waits() -> None:
    world = after(at_the_gate(), "begin run1 1", "coordinate")
    assert fate(world, V[2])[0] == "superseded"


def test_a_request_of_no_known_kind_is_refused() -> None:
    world = coordinate(apply(at_the_gate(), ("ask", "q", "run1", V[2], "praise")))
    assert world.events[-1] == RequestRefused(request="q", reason="there is no request of kind praise")


# a function that answers

ASKS: dict[str, Any] = {"gate": True, "gate_function": "my.module:judge", "gate_timeout_s": 90.0}


def asked(**settings: Any) -> World:
    """v1 waits for what the function says."""
    return after(ready(**ASKS, **settings), "publish run1", "settle")


@pytest.mark.parametrize(("policy", "state"), [("hold", "ready"), ("admit", "current"), ("refuse", "rolled_back")])
def test_what_nobody_can_say_is_done_as_the_settings_say(policy: str, state: str) -> None:
    world = settle(apply(asked(gate_inconclusive=policy), ("ask", "q", "run1", V[1], "inconclusive")))
    assert fate(world, V[1])[0] == state
    assert world.requests == {}
    held = [event.reason for event in world.events if isinstance(event, VersionHeld)]
    assert held == (["asked"] if policy == "hold" else [])


@pytest.mark.parametrize(("policy", "state"), [("hold", "ready"), ("admit", "current"), ("refuse", "rolled_back")])
def test_a_function_that_does_not_say_in_time_is_not_waited_for(policy: str, state: str) -> None:
    world = after(asked(gate_inconclusive=policy), "later 90", "settle")
    assert (fate(world, V[1])[0], world.table.versions[V[1]].held) == ("ready", "")
    world = after(world, "later 1", "settle")
    assert fate(world, V[1])[0] == state
    if policy == "hold":
        assert world.table.versions[V[1]].held == "my.module:judge has not said in 90 s"
        assert after(world, "later 1000", "settle").table == world.table  # said once


def test_a_function_that_nobody_asked_is_not_said_to_be_silent() -> None:
    world = after(asked(), "later 91")
    draft = overdue(replace(fleet(world), unasked=frozenset({V[1]})), world.config)
    assert draft is not None
    assert draft.versions[V[1]].held == f"my.module:judge has not said in 90 s, for {UNASKED}"


def test_what_is_held_an_operator_decides() -> None:
    held = after(asked(), "later 91", "settle")
    assert settle(apply(held, ("ask", "q", "run1", V[1], "admit"))).table.runs["run1"].current == V[1]
    assert fate(settle(apply(held, ("ask", "q", "run1", V[1], "refuse"))), V[1])[0] == "rolled_back"


def test_a_gate_of_operators_has_no_time_limit() -> None:
    world = after(ready(gate=True, gate_timeout_s=90.0), "publish run1", "settle", "later 1000", "settle")
    assert world.table.versions[V[1]].held == ""


def test_a_verdict_that_comes_with_the_last_second_counts() -> None:
    world = after(asked(gate_inconclusive="refuse"), "later 91", f"ask q run1 {V[1]} admit", "settle")
    assert world.table.runs["run1"].current == V[1]
