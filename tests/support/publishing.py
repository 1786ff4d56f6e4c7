"""A coordinator and two scripted replicas on real Redis servers: what a trainer publishes to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from adaptersync.coordinator.app import _coordinate
from adaptersync.trainer.publisher import AdapterPublisher
from adaptersync_core.config import (
    Config,
    CoordinatorSection,
    GroupSection,
    JobsSection,
    RedisSection,
    StoreSection,
    TrainerSection,
)
from adaptersync_core.keys import Keys
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from adaptersync_core.store import ArtifactStore
from support.artifacts import small_adapter
from support.scripted import ScriptedReplica


class Group:
    """A coordinator and two scripted replicas; `config` is what a trainer needs."""

    def __init__(self, config: Config, registry: Registry, scratch: Path) -> None:
        self.config = config
        self.registry = registry
        self.replicas = [ScriptedReplica(registry, name) for name in ("r1", "r2")]
        self.store = ArtifactStore(Path(config.store.path))
        self._scratch = scratch
        self._made = 0

    def adapter(self, **more: float) -> Path:
        """Another adapter each time."""
        self._made += 1
        return small_adapter(self._scratch / f"adapter-{self._made}", seed=self._made, scale=more.get("scale", 0.5))


def config_of(redis_url: str, cache_url: str, directory: Path) -> Config:
    return Config(
        group=GroupSection(name="group"),
        redis=RedisSection(control_url=redis_url, cache_url=cache_url),
        store=StoreSection(path=str(directory / "store")),
        coordinator=CoordinatorSection(min_ready=2, tick_s=0.05),
        trainer=TrainerSection(run="run", max_staleness=1),
        jobs=JobsSection(verify=False),
    )


@asynccontextmanager
async def living_group(
    redis_url: str, cache_url: str, tmp_path: Path, *, change: Callable[[Config], Config] = lambda config: config
) -> AsyncIterator[Group]:
    config = change(config_of(redis_url, cache_url, tmp_path))
    client = RedisClient(redis_url, name="test")
    group = Group(config, Registry(client, Keys("group")), tmp_path)
    tasks = [asyncio.create_task(replica.live()) for replica in group.replicas]
    tasks.append(asyncio.create_task(_coordinate(config)))
    yield group
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    await client.close()
    assert all(isinstance(end, asyncio.CancelledError) for end in ended), ended


@asynccontextmanager
async def publishing(config: Config, run: str | None = None, incarnation: str = "") -> AsyncIterator[AdapterPublisher]:
    publisher = await asyncio.to_thread(AdapterPublisher, config, run, incarnation=incarnation)
    try:
        yield publisher
    finally:
        await asyncio.to_thread(publisher.close)
