"""A trainer begins a run: the next epoch, unless it is the same trainer as before."""

from __future__ import annotations

from adaptersync_core.registry import Registry
from support.asking import begin, insist, kinds


async def test_every_incarnation_of_a_trainer_gets_the_next_epoch(registry: Registry) -> None:
    assert await begin(registry, "a") == (1, 0)
    assert await registry.reserve("run", epoch=1, nonce="x") == 1
    assert await begin(registry, "b", max_staleness=3) == (2, 1)
    fleet = await registry.fleet()
    assert (fleet.runs["run"].epoch, fleet.runs["run"].seq, fleet.runs["run"].max_staleness) == (2, 1, 3)
    assert await registry.runs() == ["run"]
    assert await kinds(registry) == {"run.began": 2}


async def test_begin_run_repeated_is_one_epoch(registry: Registry, lossy: Registry) -> None:
    assert await insist(lambda: begin(lossy)) == ((1, 0), 2)
    assert await kinds(registry) == {"run.began": 1}


async def test_the_same_incarnation_opens_a_run_that_had_ended_without_another_epoch(registry: Registry) -> None:
    assert await begin(registry) == (1, 0)
    assert await registry.end_run("run", epoch=1)
    assert await begin(registry) == (1, 0)
    assert (await registry.fleet()).runs["run"].ended_at == 0
    assert await kinds(registry) == {"run.began": 2, "run.ended": 1}


async def test_an_incarnation_whose_epoch_redis_has_lost_gets_another(registry: Registry) -> None:
    await begin(registry)
    assert await begin(registry, stored=(4, 9)) == (5, 9)  # by others, in what was lost
