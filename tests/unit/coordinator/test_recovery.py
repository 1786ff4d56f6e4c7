"""What counts as lost, and what is made of what is left."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from adaptersync.coordinator.journal import Recollection
from adaptersync.coordinator.protocol import decide
from adaptersync.coordinator.recovery import (
    exposed,
    highest_numbers,
    lost,
    refused,
    renewed,
    restored,
    restored_records,
)
from adaptersync_core.events import VersionVoided
from adaptersync_core.records import Leadership, RunRecord, VersionRecord
from adaptersync_core.table import Table
from support.stories import V, after, members, ready, states
from support.world import fleet, manifest


def lease(generation: int) -> Leadership:
    return Leadership(token=1, generation=generation, incarnation="t2", leader="c")


@pytest.mark.parametrize(
    ("control", "present", "journaled", "is_lost"),
    [
        (0, 0, 0, False),  # a new group
        (7, 7, 7, False),
        (7, 7, 6, False),  # the last decision was not noted
        (0, 0, 7, True),  # emptied
        (6, 6, 7, True),  # set back
        (7, 0, 7, True),  # the table alone is gone
        (0, 7, 7, True),  # the control state alone is gone
        (0, 7, 0, True),  # and there is no journal either
    ],
)
def test_lost(control: int, present: int, journaled: int, is_lost: bool) -> None:
    def table(generation: int) -> Table:
        return Table(generation=generation, incarnation="t1" if generation else "")

    assert lost(lease(control), table(present), table(journaled)) is is_lost


def test_another_history_of_the_same_length_is_lost_too() -> None:
    assert lost(lease(7), Table(generation=7, incarnation="t1"), Table(generation=7, incarnation="t0"))


def test_what_is_restored_is_newer_than_both_and_gives_everybody_time() -> None:
    world = after(ready(), "publish run1", "settle", "publish run1", "coordinate")
    known = Recollection(table=world.table)
    table = restored(known, Table(generation=90), incarnation="t9", now=5000.0)
    assert (table.generation, table.incarnation, table.restored_at) == (91, "t9", 5000.0)
    assert {member.since for member in table.members.values()} == {5000.0}
    assert {name: version.exposed for name, version in table.versions.items()} == {V[1]: False, V[2]: True}
    forgotten = replace(world, table=table, now=5000.0, replicas={})
    assert decide(fleet(forgotten), world.config) is None  # nobody is ejected for not having spoken yet
    late = after(forgotten, "wait 6", "coordinate")
    assert members(late) == {"r2": "ready"}  # down to the floor, and who is out and unheard of is gone


def test_what_was_about_to_be_voided_is_not_restored_and_the_one_before_is_current() -> None:
    world = after(ready(), *["publish run1", "settle"] * 2)
    known = Recollection(table=world.table, fates={V[2]: VersionRecord(state="voided", reason="bad", generation=99)})
    table = restored(known, Table(), incarnation="t9", now=5000.0)
    assert (table.runs["run1"].current, table.window("run1")) == (V[1], [V[1]])
    assert (table.versions[V[2]].state, table.versions[V[2]].fate) == ("retiring", "voided")
    assert not table.versions[V[2]].drained  # a router may still have requests on it


def test_what_the_restored_table_serves_has_its_records_again() -> None:
    world = after(ready(), *["publish run1", "settle"] * 3, "publish run1", "coordinate")
    voided = VersionRecord(state="voided", reason="bad", generation=99)
    gone = VersionRecord(state="retired", generation=3)
    known = Recollection(table=world.table, fates={V[3]: voided, V[9]: gone})
    table = restored(known, Table(), incarnation="t9", now=5000.0)
    written = restored_records(table, known.fates)
    assert (written.pop(V[3]), written.pop(V[9])) == (voided, gone)
    assert {name: record.state for name, record in written.items()} == {
        name: version.state for name, version in table.versions.items() if name != V[3]
    }
    assert (written[V[2]].state, written[V[2]].at, written[V[2]].generation) == ("current", 5000.0, table.generation)
    assert (written[V[4]].state, written[V[4]].at) == ("staging", world.table.versions[V[4]].since)
    given_up = replace(table.versions[V[4]], state="retiring", fate="superseded")  # and its fate is not known any more
    assert restored_records(replace(table, versions={V[4]: given_up}), {})[V[4]].state == "superseded"


def test_the_first_decision_of_a_term_carries_out_what_was_about_to_be_refused() -> None:
    world = after(ready(), *["publish run1", "settle"] * 2)
    fates = {V[2]: VersionRecord(state="voided", reason="bad", generation=99)}
    assert refused(world.table, fates) == [V[2]]
    decision = renewed(fleet(world), fates)
    assert decision.table.generation == world.table.generation + 1
    assert decision.table.runs["run1"].current == V[1]
    assert decision.records == fates
    assert [event.version for event in decision.events if isinstance(event, VersionVoided)] == [V[2]]
    assert renewed(fleet(world), {}).table.versions == world.table.versions


def test_an_exposed_candidate_that_is_given_up_waits_for_the_routers() -> None:
    world = after(ready(routers=1), "publish run1", "coordinate", "work r1", "work r2", "report", "refuse r1")
    world = replace(world, table=exposed(world.table))
    world = after(world, "inflight g1 " + V[1], "ask q run1 " + V[1], "coordinate")
    assert states(world) == {V[1]: "retiring"}
    assert not world.table.versions[V[1]].drained
    world = after(world, "route g1", "coordinate")
    assert world.table.versions[V[1]].drained


def test_nothing_drains_before_a_router_that_was_forgotten_could_be_heard() -> None:
    world = after(ready(max_staleness=0), "publish run1", "settle", "publish run1", "coordinate", "work r1", "work r2")
    world = replace(world, table=replace(world.table, restored_at=world.now))
    world = after(world, "coordinate")
    assert states(world)[V[1]] == "retiring"
    assert not world.table.versions[V[1]].drained
    world = after(world, "later 64", "coordinate")
    assert not world.table.versions[V[1]].drained
    assert after(world, "later 2", "coordinate").table.versions[V[1]].drained


def test_a_router_of_another_incarnation_has_not_heard() -> None:
    world = after(ready(max_staleness=0, routers=1), "publish run1", "settle", "publish run1", "coordinate")
    world = after(world, "work r1", "work r2", "coordinate", "route g1")
    seen = world.routers["g1"]
    other = replace(seen, report=replace(seen.report, incarnation="before"))
    assert not after(replace(world, routers={"g1": other}), "coordinate").table.versions[V[1]].drained
    assert after(world, "coordinate").table.versions[V[1]].drained


def test_what_the_journal_says_was_refused_is_not_taken_up_again() -> None:
    world = after(ready(), "publish run1")
    known = replace(fleet(world), fates={V[1]: VersionRecord(state="superseded", reason="by v2", generation=9)})
    decision = decide(known, world.config)
    assert decision is not None
    assert (decision.table.versions, decision.table.runs["run1"].considered) == ({}, 1)
    assert (decision.records[V[1]].state, decision.records[V[1]].reason) == ("superseded", "by v2")
    both = replace(fleet(after(world, "publish run1")), fates={V[2]: VersionRecord(state="rolled_back", reason="no")})
    decision = decide(both, world.config)
    assert decision is not None
    assert list(decision.table.versions) == [V[1]]


def test_the_highest_numbers_are_of_journal_and_store_together() -> None:
    known = {"run1": RunRecord(epoch=3, seq=9, max_staleness=2)}
    runs = highest_numbers(known, [manifest("run1", 12, 2), manifest("run1", 4, 5), manifest("run2", 1, 1)])
    assert runs["run1"] == RunRecord(epoch=5, seq=12, max_staleness=2)
    assert (runs["run2"].epoch, runs["run2"].seq) == (1, 1)
