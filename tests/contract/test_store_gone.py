"""A store whose mount goes away is waited for, and no second one is begun in its place."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from adaptersync.coordinator.app import _coordinate
from adaptersync.trainer import publisher as publisher_module
from adaptersync.trainer.publication import Publication
from adaptersync.trainer.publisher import AdapterPublisher
from adaptersync_core import store_identity
from adaptersync_core.config import Config, CoordinatorSection, GroupSection, JobsSection, RedisSection, StoreSection
from adaptersync_core.errors import StoreError, StoreGone
from adaptersync_core.keys import Keys
from adaptersync_core.records import Request
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from adaptersync_core.store_identity import PREFIX, agree
from support.artifacts import small_adapter
from support.scripted import ScriptedReplica
from support.wait import wait_until


@pytest.fixture
async def registry(redis_url: str) -> AsyncIterator[Registry]:
    client = RedisClient(redis_url, name="test")
    yield Registry(client, Keys("group"))
    await client.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "mnt" / "store"


def ids(root: Path) -> list[str]:
    return [path.name.removeprefix(PREFIX) for path in root.iterdir() if path.name.startswith(PREFIX)]


def entries(root: Path) -> list[Path]:
    return list(root.iterdir())


def take_away(root: Path) -> Path:
    """As a mount goes: what is left is the empty directory that it was mounted on."""
    kept = root.with_name("kept")
    root.rename(kept)
    root.mkdir()
    return kept


def bring_back(root: Path, kept: Path) -> None:
    root.rmdir()  # only if nobody wrote there
    kept.rename(root)


async def test_who_comes_first_makes_the_store_and_all_others_find_it(registry: Registry, root: Path) -> None:
    made = await agree(registry, root)
    assert ids(root) == [made]
    assert (root / f"{PREFIX}{made}").read_text().startswith("This directory is a store of adaptersync")
    assert await agree(registry, root) == await registry.store_id() == made
    assert ids(root) == [made]


async def test_two_that_come_first_at_once_agree(
    registry: Registry, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle, both = registry.settle_store_id, asyncio.Barrier(2)
    tokens = iter(["b" * 16, "a" * 16])
    monkeypatch.setattr(secrets, "token_hex", lambda _: next(tokens))
    monkeypatch.setattr("os.scandir", lambda _: contextlib.nullcontext(()))  # neither sees the other's

    async def settling(mine: str) -> str:
        await both.wait()
        return await settle(mine)

    registry.settle_store_id = settling  # type: ignore[method-assign]
    first, second = await asyncio.gather(agree(registry, root), agree(registry, root))
    assert first == second == await registry.store_id()
    assert sorted(ids(root)) == ["a" * 16, "b" * 16]


async def test_a_store_from_before_is_adopted_and_shared_by_groups(registry: Registry, root: Path) -> None:
    (root / "run").mkdir(parents=True)
    adopted = await agree(registry, root)
    other = Registry(registry.client, Keys("other"))
    assert await agree(other, root) == adopted
    assert ids(root) == [adopted]


async def test_a_redis_that_was_emptied_takes_the_id_of_the_root(registry: Registry, root: Path) -> None:
    known = await agree(registry, root)
    await registry.client.command("DEL", registry.keys.store)
    assert await agree(registry, root) == known
    assert await registry.store_id() == known


@pytest.mark.parametrize("lost", [False, True])
async def test_another_place_is_refused_and_left_alone(registry: Registry, root: Path, lost: bool) -> None:
    """Also where Redis has forgotten the store and the caller has not."""
    known = await agree(registry, root)
    kept = take_away(root)
    if lost:
        await registry.client.command("DEL", registry.keys.store)
    with pytest.raises(StoreGone, match=r"not the group's store.*mount gone") as refusal:
        await agree(registry, root, known)
    assert refusal.value.retryable
    assert "\n" not in str(refusal.value)
    bring_back(root, kept)
    assert await agree(registry, root, known) == known


async def test_a_place_where_nothing_can_be_made_is_an_error(
    registry: Registry, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(store_identity, "write_durably", refuse)
    with pytest.raises(StoreError, match="cannot be made or read: Permission denied"):
        await agree(registry, root)
    assert not await registry.store_id()


@pytest.fixture
async def config(redis_url: str, cache_url: str, root: Path, registry: Registry) -> AsyncIterator[Config]:
    """Of a coordinator and a replica that live."""
    config = Config(
        group=GroupSection(name="group"),
        redis=RedisSection(control_url=redis_url, cache_url=cache_url),
        store=StoreSection(path=str(root)),
        coordinator=CoordinatorSection(min_ready=1, tick_s=0.05, lease_s=60.0),
        jobs=JobsSection(verify=False),
    )
    tasks = [asyncio.create_task(ScriptedReplica(registry, "r1").live()), asyncio.create_task(_coordinate(config))]
    yield config
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ended), ended


async def test_while_the_mount_is_gone_nothing_is_decided_and_nothing_published(
    config: Config,
    registry: Registry,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(publisher_module, "INSIST_S", 0.0)
    caplog.set_level(logging.WARNING, logger="adaptersync.coordinator")
    publisher = await asyncio.to_thread(AdapterPublisher, config, "run", max_staleness=1)

    async def publish(seed: int) -> Publication:
        source = small_adapter(tmp_path / f"adapter-{seed}", seed=seed)
        return await asyncio.to_thread(publisher.publish, source)

    async def nobody_leads() -> bool:
        return (await registry.leader())[1] <= 0

    try:
        for seed in (1, 2):
            publication = await publish(seed)
            assert (await asyncio.to_thread(publication.wait, 15)).state == "current"
        before = await registry.table()
        kept = take_away(root)
        await registry.request(Request(kind="rollback", run="run", reason="bad"))
        with pytest.raises(StoreGone, match="not the group's store"):
            await publish(3)
        await wait_until(nobody_leads)
        await asyncio.sleep(0.5)  # some ticks, in which nothing is to happen
        assert await registry.table() == before
        assert entries(root) == []
        said = [record for record in caplog.records if "not the group's store" in record.getMessage()]
        assert len([record for record in said if record.name == "adaptersync.coordinator.app"]) == 1
        bring_back(root, kept)
        await wait_until(lambda: _voided(registry, publication.adapter_id))
        following = await publish(4)
        assert following.seq == publication.seq + 1  # no number was spent
        assert (await asyncio.to_thread(following.wait, 15)).state == "current"
    finally:
        await asyncio.to_thread(publisher.close)


async def _voided(registry: Registry, name: str) -> bool:
    record = await registry.version(name)
    return record is not None and record.state == "voided"


async def test_a_coordinator_that_starts_without_the_mount_does_not_begin_anew(
    registry: Registry, root: Path, redis_url: str, cache_url: str
) -> None:
    await agree(registry, root)
    kept = take_away(root)
    config = Config(
        group=GroupSection(name="group"),
        redis=RedisSection(control_url=redis_url, cache_url=cache_url),
        store=StoreSection(path=str(root)),
        coordinator=CoordinatorSection(tick_s=0.05),
    )
    coordinating = asyncio.create_task(_coordinate(config))
    await asyncio.sleep(0.5)  # some ticks, in which nothing is to happen
    assert not coordinating.done()
    assert entries(root) == []
    assert (await registry.leader())[0] == ""
    bring_back(root, kept)

    async def leads() -> bool:
        return (await registry.leader())[1] > 0

    await wait_until(leads)
    coordinating.cancel()
    await asyncio.gather(coordinating, return_exceptions=True)


async def test_a_coordinator_outlives_what_redis_refuses_it(
    registry: Registry, redis_url: str, cache_url: str, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A key of another type, a wrong password: somebody mends it, and nothing need be started again."""
    await registry.client.command("SADD", registry.keys.runs, "run")
    await registry.client.command("SET", registry.keys.run("run"), "not a hash", "EX", 60)
    config = Config(
        group=GroupSection(name="group"),
        redis=RedisSection(control_url=redis_url, cache_url=cache_url),
        store=StoreSection(path=str(root)),
        coordinator=CoordinatorSection(tick_s=0.05, lease_s=1.0),
    )
    coordinating = asyncio.create_task(_coordinate(config))

    async def refused() -> bool:
        return "will try again: Redis refused" in caplog.text

    await wait_until(refused)
    await asyncio.sleep(0.3)  # some ticks: it says so once
    assert caplog.text.count("will try again") == 1
    assert (await registry.leader())[1] <= 0  # it is not told to lead by `status`
    await registry.client.command("DEL", registry.keys.run("run"))

    async def decides() -> bool:
        return (await registry.table()).generation > 0

    await wait_until(decides)
    coordinating.cancel()
    await asyncio.gather(coordinating, return_exceptions=True)
