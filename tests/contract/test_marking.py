"""Markers beside lane and announcement: what waits for what, and what a store that takes none comes to."""

from __future__ import annotations

import asyncio
import threading
import time

from msgspec.structs import replace

from adaptersync.jobs.verify import judge
from adaptersync.trainer.publisher import AdapterPublisher
from adaptersync_core import markers
from adaptersync_core.lane import FastLane
from adaptersync_core.manifest import Manifest
from contract.test_publisher import CURRENT, group, publish, publisher
from support.proxy import FaultProxy
from support.publishing import Group, publishing
from support.wait import wait_until

__all__ = ["group", "publisher"]  # fixtures


class Held:
    """Stands between publisher and store: markers are written when they are let go, and not at all once `lost`."""

    def __init__(self, publisher: AdapterPublisher) -> None:
        self.go, self.lost = threading.Event(), False
        self._store, self._mark = publisher._store, publisher._store.mark
        self._store.mark = self.mark  # type: ignore[method-assign]

    def mark(self, manifest: Manifest) -> bool:
        assert self.go.wait(20)
        return not self.lost and self._mark(manifest)


async def announced(group: Group) -> list[tuple[str, int]]:
    return await group.registry.published("run")


async def test_by_the_fast_lane_a_version_is_promoted_before_it_is_marked(
    group: Group, publisher: AdapterPublisher
) -> None:
    held = Held(publisher)
    publishing = asyncio.create_task(publish(publisher, group.adapter()))
    await wait_until(lambda: announced(group))
    ((name, _),) = await announced(group)

    async def promoted() -> bool:
        return (await group.registry.table()).runs["run"].current == name

    await wait_until(promoted, timeout_s=10)
    assert not publishing.done()
    held.go.set()
    manifest = (await publishing).manifest
    assert all((group.store.root / marker).is_file() for marker in markers.names(manifest))


async def test_by_the_store_alone_it_is_marked_before_it_is_announced(
    group: Group, publisher: AdapterPublisher
) -> None:
    publisher._lane = FastLane(publisher._cache, group.registry.keys, limit_bytes=0)
    held = Held(publisher)
    publishing = asyncio.create_task(publish(publisher, group.adapter()))
    await wait_until(lambda: bool(list(group.store.versions())))
    await asyncio.sleep(0.3)  # nothing is to happen, so there is nothing to wait for
    assert await announced(group) == []
    held.go.set()
    manifest = (await publishing).manifest
    assert manifest.markers == markers.COUNT
    assert await announced(group) == [(manifest.adapter_id, manifest.seq)]


async def test_a_frozen_cache_server_costs_one_publication_a_second_and_the_next_nothing(
    group: Group, publisher: AdapterPublisher, cache_url: str
) -> None:
    async with FaultProxy("127.0.0.1", int(cache_url.rpartition(":")[2].partition("/")[0])) as proxy:
        redis = replace(group.config.redis, cache_url=f"redis://127.0.0.1:{proxy.port}/0")
        proxy.blackhole = True
        async with publishing(replace(group.config, redis=redis)) as blocked:
            took = []
            for _ in range(2):
                began = time.monotonic()
                publication = await publish(blocked, group.adapter())
                took.append(time.monotonic() - began)
                assert await asyncio.to_thread(publication.wait, 10) == CURRENT
    assert 0.9 < took[0] < 3
    assert took[1] < 0.9


async def test_what_cannot_be_marked_is_announced_as_looked_for_directly(
    group: Group, publisher: AdapterPublisher
) -> None:
    held = Held(publisher)
    held.lost = True
    held.go.set()
    by_lane = await publish(publisher, group.adapter())
    assert by_lane.manifest.markers == markers.COUNT  # announced before anybody knew, and needed by nobody
    publisher._lane = FastLane(publisher._cache, group.registry.keys, limit_bytes=0)
    publication = await publish(publisher, group.adapter())
    known = await group.registry.manifest(publication.adapter_id)
    assert known == publication.manifest
    assert known.markers == 0
    assert judge(group.store, known).ok
    assert await asyncio.to_thread(publication.wait, 10) == CURRENT
