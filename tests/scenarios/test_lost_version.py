"""An engine forgets what it was loaded with, under traffic."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from adaptersync_core.config import Config
from support.wait import wait_until
from support.whole_fleet import WholeFleet, whole_fleet


@pytest.mark.timeout(120)
@pytest.mark.parametrize("losing", [1, 2], ids=["one of two", "both"])
async def test_an_engine_that_loses_a_version_gets_it_back_and_no_client_hears_of_it(
    config: Config, tmp_path: Path, losing: int
) -> None:
    async with whole_fleet(config, tmp_path, replicas=2) as fleet:
        trainer = await fleet.trainer()
        version = await fleet.promoted(trainer)
        async with fleet.traffic("run", clients=4) as served:
            await wait_until(lambda: len(served) > 20)
            owner = served[-1].answer.headers["x-adaptersync-replica"]
            lost = [owner, *(name for name in fleet.replicas if name != owner)][:losing]
            for name in lost:
                fleet.replicas[name].sim.engine.registry.unload(version)
            await wait_until(lambda: _missed(fleet, losing), what="routers have met with it")
            await wait_until(lambda: all(version in fleet.replicas[name].listed() for name in lost))
            await wait_until(lambda: _missed(fleet, 0), timeout_s=10, what="routers have heard that it is back")
            before = len(served)
            await wait_until(lambda: len(served) > before + 20)
        assert {(each.answer.status, each.version) for each in served} == {(200, version)}
        accepted = Counter(event.replica for event in await fleet.events("replica.acked", version) if event.accepted)
        assert accepted == {name: 1 + (name in lost) for name in fleet.replicas}
        table = await fleet.table()
        assert len(table.ready()) == 2  # nobody was ejected for it


async def _missed(fleet: WholeFleet, count: int) -> bool:
    """Whether so many replicas are said to lack something."""
    (router,) = (await fleet.registry.fleet()).routers.values()
    return len(router.report.missing) == count
