"""A control state that was lost is put back from what the coordinator and the store remember."""

from __future__ import annotations

import pytest

from adaptersync_core.errors import Conflict, Fenced, Forgotten
from adaptersync_core.records import RunRecord, VersionRecord
from adaptersync_core.registry import Registry
from adaptersync_core.table import Table
from support.asking import events, kinds
from support.world import manifest, name_of

NAME = "run-v1-000000000000"


async def test_restoring_puts_back_table_fates_and_numbers(registry: Registry) -> None:
    lease = await registry.lead("c1", "c1", lease_s=30)
    await registry.begin_run("run", nonce="later", max_staleness=2, trainer="t")  # a trainer was faster
    table = Table(incarnation="anew", generation=8)
    runs = {"run": RunRecord(epoch=4, seq=9, max_staleness=1), "old": RunRecord(epoch=2, seq=3, max_staleness=0)}
    fates = {NAME: VersionRecord(state="voided", reason="bad", generation=7, at=1.5)}
    await registry.restore(lease, table, runs, fates)
    assert await registry.table() == table
    assert await registry.version(NAME) == fates[NAME]
    assert await registry.runs() == ["old", "run"]
    now = await registry.lead("c1", "anew", lease_s=30)
    assert (now.incarnation, now.generation) == ("anew", 8)
    with pytest.raises(Fenced):
        await registry.reserve("run", epoch=1, nonce="n")
    assert (await registry.begin_run("run", nonce="next", max_staleness=2, trainer="t")) == (105, 109)
    with pytest.raises(Fenced):  # the lease was of the incarnation before
        await registry.restore(lease, table, runs, fates)


async def test_restoring_puts_back_that_a_run_ended_unless_it_began_again(registry: Registry) -> None:
    lease = await registry.lead("c1", "c1", lease_s=30)
    await registry.begin_run("again", nonce="n", max_staleness=1, trainer="t", stored=(4, 0))
    runs = {
        "run": RunRecord(epoch=4, seq=9, max_staleness=1, ended_at=5.0, ended_by="node lost"),
        "closed": RunRecord(epoch=1, seq=1, max_staleness=1, ended_at=6.0),
        "again": RunRecord(epoch=4, seq=9, max_staleness=1, ended_at=7.0),
    }
    await registry.restore(lease, Table(incarnation="anew", generation=8), runs, {})
    known = (await registry.fleet()).runs
    assert {name: (run.epoch, run.ended_at, run.ended_by) for name, run in known.items()} == {
        "run": (4, 5.0, "node lost"),
        "closed": (1, 6.0, ""),
        "again": (5, 0.0, ""),
    }


async def test_a_trainer_of_before_redis_was_lost_is_heard_of_after_it(registry: Registry) -> None:
    """It goes on in its epoch, so it must not count as dead."""
    lease = await registry.lead("c1", "c1", lease_s=30)
    runs = {"run": RunRecord(epoch=1, seq=0, max_staleness=1)}
    await registry.restore(lease, Table(incarnation="anew", generation=8), runs, {})
    assert await registry.beat("run", epoch=1, trainer="a")
    with pytest.raises(Conflict, match="use --force"):
        await registry.close_run("run", reason="", alive_s=30)


async def test_a_trainer_learns_that_redis_stands_at_an_older_state(registry: Registry) -> None:
    await registry.begin_run("run", nonce="a", max_staleness=2, trainer="t")
    with pytest.raises(Forgotten):
        await registry.reserve("run", epoch=2, nonce="n")


async def test_what_is_announced_again_and_was_not_considered_leaves_its_event(registry: Registry) -> None:
    """Its trainer may have stored it and not announced it when Redis was emptied: nothing else would tell of it."""
    manifests = [manifest("run", seq) for seq in (1, 2)] + [manifest("other", 1)]
    for _ in range(2):
        await registry.announce_again(manifests, {"run": 1})
    told = [fields["version"] for fields in await events(registry)]
    assert sorted(told) == sorted([name_of("run", 2), name_of("other", 1)])
    await registry.begin_run("run", nonce="n", max_staleness=1, trainer="t", stored=(0, 2))
    await registry.publish(manifests[1], published_at=1.0)  # once its trainer comes to it, it is no news
    assert (await kinds(registry))["adapter.published"] == 2
    assert [name for name, _ in await registry.published("run")] == [name_of("run", 1), name_of("run", 2)]
