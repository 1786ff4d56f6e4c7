"""One leads at a time, in terms that are never taken up again; who does not lead writes nothing."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from adaptersync_core.errors import Fenced
from adaptersync_core.records import Decision
from adaptersync_core.registry import Registry
from adaptersync_core.table import Table
from support.asking import insist, kinds

ALIVE_S = 5.0
DECISION = Decision(table=Table(generation=1))


async def test_one_leads_and_keeps_its_token_while_it_renews(registry: Registry) -> None:
    first = await registry.lead("c1", "c1", lease_s=30)
    assert (first.token, first.generation, first.leader) == (1, 0, "c1")
    assert await registry.lead("c1", "c1", lease_s=30) == first
    other = await registry.lead("c2", "c2", lease_s=30)
    assert (other.token, other.leader) == (0, "c1")
    assert await kinds(registry) == {"coordinator.elected": 1}


async def test_another_takes_over_with_a_higher_token_when_the_lease_ran_out(registry: Registry) -> None:
    first = await registry.lead("c1", "c1", lease_s=0)
    second = await registry.lead("c2", "c2", lease_s=30)
    assert (second.token, second.incarnation) == (first.token + 1, "c2")
    assert (await registry.lead("c1", "c1", lease_s=30)).token == 0


async def test_a_term_whose_lease_ran_out_is_over_and_another_of_the_same_coordinator_may_follow(
    registry: Registry,
) -> None:
    """Who was late may have been replaced, in a state of Redis that was lost since."""
    first = await registry.lead("c1", "t1", lease_s=0)
    assert (await registry.lead("c1", "t1", lease_s=30)).token == 0
    second = await registry.lead("c1", "t2", lease_s=30, former="t1")
    assert (second.token, second.incarnation) == (first.token + 1, "t2")


async def test_two_coordinators_of_one_name_do_not_lead_together(registry: Registry) -> None:
    await registry.lead("c1", "t1", lease_s=30)
    assert (await registry.lead("c1", "t2", lease_s=30)).token == 0


async def test_a_leader_passes_to_another_term_without_a_gap_and_is_fenced_from_the_former(registry: Registry) -> None:
    former = await registry.lead("c1", "t1", lease_s=30)
    now = await registry.lead("c1", "t2", lease_s=30, former="t1")
    assert now.token == former.token + 1
    with pytest.raises(Fenced):
        await registry.decide(DECISION, former, alive_s=ALIVE_S)


async def test_who_resigns_is_followed_at_once_and_only_who_leads_can(registry: Registry) -> None:
    first = await registry.lead("c1", "t1", lease_s=30)
    await registry.resign(replace(first, token=9))
    assert (await registry.lead("c2", "t2", lease_s=30)).token == 0
    await registry.resign(first)
    assert (await registry.lead("c2", "t2", lease_s=30)).token == 2


async def test_nothing_is_written_with_a_lease_that_ran_out(registry: Registry) -> None:
    lease = await registry.lead("c1", "t1", lease_s=0)
    with pytest.raises(Fenced):
        await registry.decide(DECISION, lease, alive_s=ALIVE_S)
    with pytest.raises(Fenced):
        await registry.restore(lease, Table(incarnation="x", generation=5), {}, {})
    assert await registry.table() == Table()


async def test_lead_repeated_is_one_election(registry: Registry, lossy: Registry) -> None:
    leadership, lost = await insist(lambda: lossy.lead("c1", "c1", lease_s=30))
    assert (leadership.token, lost) == (1, 2)
    assert await kinds(registry) == {"coordinator.elected": 1}


async def test_a_control_state_that_was_lost_is_another_incarnation(registry: Registry) -> None:
    first = await registry.lead("c1", "c1", lease_s=30)
    await registry.client.command("FLUSHALL")
    assert (await registry.lead("c2", "c2", lease_s=30)).incarnation != first.incarnation
