"""What TRL's names stand for beside versions of an epoch before, as after a resume from an older checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from adaptersync_core.registry import Registry
from adaptersync_core.table import Table
from contract.test_relay import NAMES, Bench, relayed
from support.wait import wait_until


@pytest.fixture
def redis_kind() -> str:
    return "redis7"


async def test_what_a_trainer_gave_up_by_going_back_stands_in_for_nothing(redis_url: str, tmp_path: Path) -> None:
    async with relayed(redis_url, tmp_path, promotion_timeout_s=1.0) as bench:
        for step in (1, 2):
            assert (await bench.load(step))[0] == 200
        await bench.get("/server_info")
        bench.replica.answers.clear()
        status, text = await bench.load(1, bench.adapter(3))
        assert (status, "this trainer has nothing before it" in text) == (500, True)
        bench.replica.answers.set()
        await wait_until(lambda: current(bench, 3))
        bench.replica.answers.clear()
        status, text = await bench.load(2, bench.adapter(4))  # its own may
        assert (status, "is run-v3-" in text) == (200, True)


async def test_a_version_that_is_on_its_way_once_more_is_waited_for(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis lost its promotion: until it is made again, the one before is current."""
    monkeypatch.setattr("adaptersync.trainer.relay.LOOK_S", 0.0)
    async with relayed(redis_url, tmp_path) as bench:
        for step in (1, 2):
            assert (await bench.load(step))[0] == 200
        table = await bench.registry.table()
        before, name = str(await bench.named(1)), str(await bench.named(2))
        versions = {
            before: replace(table.versions[before], state="current"),
            name: replace(table.versions[name], state="staging"),
        }
        restored = replace(table, versions=versions, runs={"run": replace(table.runs["run"], current=before)})

        async def read(self: Registry) -> Table:
            return restored

        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(Registry, "table", read)
            assert await bench.asked(NAMES[2]) == (name, "")
            assert await bench.asked(NAMES[1]) == (before, "")


async def current(bench: Bench, seq: int) -> bool:
    return (await bench.window())[:1] == [seq]
