"""The fast lane on a server that is frozen: given up within a second, then left alone for a while."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from adaptersync.coordinator.observer import cache_problem
from adaptersync_core import lane as lane_module
from adaptersync_core.keys import Keys
from adaptersync_core.lane import ANSWER_S, FastLane
from adaptersync_core.manifest import FILES, Manifest, content_digest, hash_file, inspect
from adaptersync_core.redis import RedisClient
from support.artifacts import small_adapter
from support.proxy import FaultProxy


@pytest.fixture
async def proxy(cache_url: str) -> AsyncIterator[FaultProxy]:
    async with FaultProxy("127.0.0.1", int(cache_url.rpartition(":")[2].partition("/")[0])) as proxy:
        yield proxy


@pytest.fixture
async def client(proxy: FaultProxy) -> AsyncIterator[RedisClient]:
    client = RedisClient(f"redis://127.0.0.1:{proxy.port}/0", name="test", timeout_s=ANSWER_S, text=False)
    yield client
    await client.close()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return small_adapter(tmp_path / "adapter", seed=1, scale=0.5)


@pytest.fixture
def manifest(directory: Path) -> Manifest:
    files = tuple(hash_file(directory / name) for name in FILES)
    return Manifest(
        run="run", seq=1, epoch=1, digest=content_digest(files), files=files, shape=inspect(directory), created_at=1.0
    )


@pytest.mark.parametrize("before", [False, True], ids=["not connected", "connected"])
async def test_a_frozen_server_costs_a_second_once_and_is_tried_again_later(
    proxy: FaultProxy,
    client: RedisClient,
    manifest: Manifest,
    directory: Path,
    before: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    puts, takes = (FastLane(client, Keys("test"), limit_bytes=1 << 20) for _ in range(2))
    if before:
        assert await puts.put(manifest, directory)
        assert await takes.take(manifest)
    proxy.blackhole = True
    began = time.monotonic()
    assert not await puts.put(manifest, directory)
    assert await takes.take(manifest) is None
    assert 1.5 < time.monotonic() - began < 3.5  # a second each
    proxy.blackhole = False
    proxy.cut()
    began = time.monotonic()
    assert not await puts.put(manifest, directory)
    assert await takes.take(manifest) is None
    assert time.monotonic() - began < 0.5
    later = time.monotonic() + lane_module.AWAY_S
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert puts.open(manifest)
    assert takes.open(manifest)
    monkeypatch.undo()


async def test_status_says_that_the_cache_server_does_not_answer(proxy: FaultProxy) -> None:
    url = f"redis://127.0.0.1:{proxy.port}/0"
    assert await cache_problem("") == await cache_problem(url) == ""
    proxy.blackhole = True
    began = time.monotonic()
    assert "Redis cannot be reached" in await cache_problem(url)
    assert time.monotonic() - began < 2.5
