"""What a publisher takes for current, from tables that a test writes: it may come to be nothing of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from adaptersync.trainer import publisher as publisher_module
from adaptersync.trainer.publisher import AdapterPublisher
from adaptersync_core.identity import adapter_id
from adaptersync_core.keys import Keys
from adaptersync_core.redis import RedisClient
from adaptersync_core.table import LiveVersion, RunEntry, Table
from support.publishing import config_of, publishing
from support.wait import wait_until

DIGEST = "a" * 64


@pytest.fixture
def redis_kind() -> str:
    return "redis7"


class Fleet:
    """Writes tables; `told` is what its trainer heard."""

    def __init__(self, client: RedisClient, publisher: AdapterPublisher) -> None:
        self.publisher = publisher
        self.told: list[int | None] = []
        self.looks = 0
        self._client = client
        publisher.on_promoted(self.told.append)
        look = publisher._look

        async def counted() -> None:
            await look()
            self.looks += 1

        publisher._look = counted  # type: ignore[method-assign]

    async def serve(self, generation: int, seq: int = 0, *, epoch: int = 1) -> None:
        """Let this version be current; 0: none."""
        name = adapter_id("run", seq, DIGEST) if seq else None
        version = LiveVersion(
            run="run",
            seq=seq,
            epoch=epoch,
            digest=DIGEST,
            state="current",
            published_at=0.0,
            since=0.0,
            changed_in=generation,
        )
        runs = {"run": RunEntry(epoch=epoch, max_staleness=1, current=name)}
        table = Table(generation=generation, runs=runs, versions={name: version} if name else {})
        await self._client.command("SET", Keys("group").table, msgspec.json.encode(table))
        await self.looked()

    async def lose(self) -> None:
        await self._client.command("DEL", Keys("group").table)
        await self.looked()

    async def looked(self) -> None:
        """A look that began since."""
        looks = self.looks
        await wait_until(lambda: self.looks >= looks + 2)


@pytest.fixture
async def fleet(
    redis_url: str, cache_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Fleet]:
    monkeypatch.setattr(publisher_module, "LOOK_S", 0.01)
    client = RedisClient(redis_url, name="test")
    async with publishing(config_of(redis_url, cache_url, tmp_path)) as publisher:
        yield Fleet(client, publisher)
    await client.close()


async def test_when_its_only_version_is_withdrawn_nothing_is_current(fleet: Fleet) -> None:
    await fleet.serve(1, 1)
    await fleet.serve(2)
    assert (fleet.publisher.current_seq, fleet.told) == (None, [1, None])
    await fleet.serve(3, 2)
    assert (fleet.publisher.current_seq, fleet.told) == (2, [1, None, 2])


async def test_what_another_trainer_promoted_is_nothing_of_its_own(fleet: Fleet) -> None:
    await fleet.serve(1, 7, epoch=0)
    assert fleet.told == []
    await fleet.serve(2, 8)
    await fleet.serve(3, 9, epoch=2)
    assert fleet.told == [8, None]


async def test_what_it_promoted_before_redis_lost_its_epoch_is_its_own(fleet: Fleet) -> None:
    await fleet.serve(1, 1)
    publisher = fleet.publisher
    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(publisher._begin(), publisher._loop))
    await fleet.looked()
    assert (publisher.epoch, fleet.told) == (2, [1])
    await fleet.serve(2, 101, epoch=2)
    assert fleet.told == [1, 101]


async def test_a_table_that_is_lost_takes_nothing_back_and_a_restored_one_may(fleet: Fleet) -> None:
    await fleet.serve(5, 1)
    await fleet.lose()
    await fleet.serve(4)  # Redis was set back
    assert fleet.told == [1]
    await fleet.serve(6)
    assert fleet.told == [1, None]
