"""A trainer removes from the store what nobody can ask for any more, if it is told to."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from adaptersync.trainer import publisher as publisher_module
from adaptersync.trainer import tidying
from adaptersync.trainer.publisher import AdapterPublisher
from adaptersync_core.errors import ControlUnavailable
from adaptersync_core.identity import parse_adapter_id
from adaptersync_core.store import ArtifactStore, verify_files
from support.publishing import Group, living_group, publishing
from support.wait import wait_until


@pytest.fixture
async def group(redis_url: str, cache_url: str, tmp_path: Path) -> AsyncIterator[Group]:
    async with living_group(redis_url, cache_url, tmp_path) as group:
        yield group


@pytest.fixture(autouse=True)
def tidied_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tidying, "TIDY_S", 0.0)


async def promote(group: Group, publisher: AdapterPublisher) -> None:
    """Publish, and wait until it is current and only the one before is served beside it."""
    publication = await asyncio.to_thread(publisher.publish, group.adapter())
    assert (await asyncio.to_thread(publication.wait, 10)).state == "current"

    async def settled() -> bool:
        return len((await group.registry.table()).versions) <= 2

    await wait_until(settled)


def stored(group: Group) -> list[int]:
    return [parse_adapter_id(name).seq for name in group.store.versions()]


async def test_the_latest_and_what_is_served_stay(group: Group) -> None:
    config = replace(group.config, store=replace(group.config.store, keep_last=2))
    async with publishing(config) as publisher:
        for _ in range(7):
            await promote(group, publisher)
    # when it was looked for the last time, the seventh or the sixth was current, and one before it served beside it
    assert stored(group) in ([5, 6, 7], [6, 7])
    for name in group.store.versions():
        verify_files(group.store.read_manifest(name), group.store.directory(name))
    assert not list(group.store.root.glob("run/.*"))


async def test_those_that_another_rule_keeps_stay_too(group: Group) -> None:
    rules = replace(group.config.store, keep_last=1, keep_every=3)
    async with publishing(replace(group.config, store=rules)) as publisher:
        for _ in range(7):
            await promote(group, publisher)
    assert stored(group) in ([3, 5, 6, 7], [3, 6, 7])


async def test_versions_go_by_their_age_alone_where_that_is_the_rule(group: Group) -> None:
    rules = replace(group.config.store, keep_for_s=0.001)
    async with publishing(replace(group.config, store=rules)) as publisher:
        for _ in range(5):
            await promote(group, publisher)
    assert stored(group) in ([3, 4, 5], [4, 5])


async def test_no_training_waits_for_it_and_the_end_of_a_run_does(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    tidied: list[str] = []
    go = threading.Event()

    def slow(self: ArtifactStore, run: str) -> None:
        go.wait(5)
        tidied.append(run)

    monkeypatch.setattr(ArtifactStore, "tidy", slow)
    async with publishing(group.config) as publisher:
        for _ in range(2):
            await promote(group, publisher)
        assert tidied == []
        closing = asyncio.create_task(asyncio.to_thread(publisher.close))
        assert await asyncio.wait({closing}, timeout=0.1) == (set(), {closing})
        go.set()
        await closing
    assert tidied == ["run"]  # one at a time


async def test_a_mount_that_hangs_holds_up_the_end_of_a_run_for_a_while_only(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, removed = threading.Event(), []
    monkeypatch.setattr(publisher_module, "CLOSE_S", 0.1)
    monkeypatch.setattr(ArtifactStore, "tidy", lambda *_: go.wait(20))
    monkeypatch.setattr(ArtifactStore, "remove", lambda *_: removed.append(1))
    monkeypatch.setattr(tidying, "due", lambda store, *_: store.versions_of("run"))
    config = replace(group.config, store=replace(group.config.store, keep_last=1))
    async with publishing(config) as publisher:
        await promote(group, publisher)
        await asyncio.wait_for(asyncio.to_thread(publisher.close), 10)
        go.set()
        await wait_until(lambda: not [one for one in threading.enumerate() if one.name == "tidying-run"])
    assert removed == []


async def test_all_of_them_stay_unless_it_is_told_to(group: Group) -> None:
    async with publishing(group.config) as publisher:
        for _ in range(5):
            await promote(group, publisher)
    assert stored(group) == [1, 2, 3, 4, 5]


async def test_numbers_go_on_after_a_restart(group: Group) -> None:
    config = replace(group.config, store=replace(group.config.store, keep_last=1))
    async with publishing(config) as publisher:
        for _ in range(4):
            await promote(group, publisher)
    async with publishing(config) as publisher:
        assert (publisher.epoch, publisher.latest_seq) == (2, 4)
        await promote(group, publisher)
    assert stored(group)[-1] == 5


async def test_a_removal_that_fails_keeps_nobody_from_publishing(
    group: Group, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def away(*_: object, **__: object) -> list[str]:
        raise ControlUnavailable("Redis cannot be reached")

    monkeypatch.setattr(tidying, "due", away)
    config = replace(group.config, store=replace(group.config.store, keep_last=1))
    async with publishing(config) as publisher:
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                await promote(group, publisher)
    assert stored(group) == [1, 2, 3]
    assert "was not removed: Redis cannot be reached" in caplog.text
