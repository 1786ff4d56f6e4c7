"""Workers take from the store what nobody can ask for: by the settings' rules, and one by hand. On real servers."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from adaptersync.jobs.retention import REMOVED, clear, remove
from adaptersync.trainer.publisher import AdapterPublisher
from adaptersync_core.config import Config
from adaptersync_core.errors import StoreError, StoreGone
from adaptersync_core.identity import parse_adapter_id
from adaptersync_core.records import Request
from adaptersync_core.store import ArtifactStore
from support.publishing import Group, living_group, publishing
from support.wait import wait_until


@pytest.fixture
async def group(redis_url: str, cache_url: str, tmp_path: Path) -> AsyncIterator[Group]:
    async with living_group(redis_url, cache_url, tmp_path) as group:
        yield group


def keeping(group: Group, **rules: float) -> Config:
    return replace(group.config, store=replace(group.config.store, **rules))


def stored(group: Group) -> list[int]:
    return [parse_adapter_id(name).seq for name in group.store.versions()]


async def promote(group: Group, publisher: AdapterPublisher, count: int) -> list[str]:
    """With the window of two that remains when all is settled."""
    names = []
    for _ in range(count):
        publication = await asyncio.to_thread(publisher.publish, group.adapter())
        assert (await asyncio.to_thread(publication.wait, 10)).state == "current"
        names.append(publication.adapter_id)

    async def settled() -> bool:
        table = await group.registry.table()
        return sum(parse_adapter_id(name).run == publisher.run for name in table.versions) <= 2

    await wait_until(settled)
    return names


async def test_what_the_rules_let_go_goes_of_runs_that_ended_too(group: Group) -> None:
    async with publishing(group.config) as publisher:
        await promote(group, publisher, 6)  # its run ends here
    assert stored(group) == [1, 2, 3, 4, 5, 6]
    assert await clear(group.config) == "removed 0 versions"  # there is no rule
    assert await clear(keeping(group, keep_last=3, keep_every=2)) == "removed 2 versions"
    assert stored(group) == [2, 4, 5, 6]
    assert await clear(keeping(group, keep_for_s=3600)) == "removed 0 versions"
    assert await clear(keeping(group, keep_last=1)) == "removed 2 versions"
    assert stored(group) == [5, 6]  # served
    assert await clear(keeping(group, keep_last=1)) == "removed 0 versions"


async def test_a_run_that_cannot_be_cleared_keeps_no_other_from_it(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run in ("first", "run"):
        async with publishing(group.config, run) as publisher:
            await promote(group, publisher, 4)
    remove_it = ArtifactStore.remove

    def refused(self: ArtifactStore, adapter_id: str) -> None:
        if adapter_id.startswith("first-"):
            raise PermissionError(13, "Permission denied")
        remove_it(self, adapter_id)

    monkeypatch.setattr(ArtifactStore, "remove", refused)
    with pytest.raises(StoreError, match=r"1 of 2 runs were not cleared: .*denied.*removed=2 version=first-v1-"):
        await clear(keeping(group, keep_last=1))
    assert len(group.store.versions_of("first")) == 4
    assert len(group.store.versions_of("run")) == 2


async def test_the_last_version_of_a_run_that_ended_is_taken_out_by_hand(group: Group) -> None:
    async with publishing(group.config) as publisher:
        old, last = await promote(group, publisher, 2)
        assert await remove(group.config, last) == "it is current in the fleet"

    async def ended() -> bool:
        return bool((await group.registry.table()).runs["run"].ended_at)

    await wait_until(ended)
    assert await remove(group.config, last) == "it is current in the fleet: adaptersync retire run"
    await group.registry.request(Request(kind="retire", run="run", reason="no longer wanted"))

    async def gone() -> bool:
        return not (await group.registry.table()).versions

    await wait_until(gone)
    assert await remove(group.config, last) == REMOVED
    assert await remove(group.config, last) == "it is not in the store"
    assert stored(group) == [1]
    assert await remove(group.config, old) == REMOVED
    assert stored(group) == []
    async with publishing(group.config) as publisher:  # a run that is begun again goes on with its numbers
        assert (publisher.epoch, publisher.latest_seq) == (2, 2)


async def test_numbers_are_not_given_again_by_a_redis_that_lost_them(group: Group) -> None:
    """Also where the store has none of the versions that had them."""
    async with publishing(group.config) as publisher:
        await promote(group, publisher, 2)
    for name in list(group.store.versions()):
        group.store.remove(name)
    assert group.store.highest("run") == (1, 2)


async def test_what_is_not_the_groups_store_is_left_alone(group: Group, tmp_path: Path) -> None:
    async with publishing(group.config) as publisher:
        await promote(group, publisher, 3)
    other = tmp_path / "other"
    await asyncio.to_thread(shutil.copytree, Path(group.config.store.path) / "run", other / "run")
    elsewhere = replace(group.config, store=replace(group.config.store, path=str(other), keep_last=1))
    with pytest.raises(StoreGone):
        await clear(elsewhere)
    assert len(list(ArtifactStore(other).versions())) == 3
    assert await remove(group.config, "stranger-v1-0123456789ab") == (
        "run stranger is not known to this group, and may be another's"
    )
