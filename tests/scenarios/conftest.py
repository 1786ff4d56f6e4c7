"""A whole simulated fleet for each scenario. What happens here does not depend on the server program: one kind does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType

import pytest

from adaptersync.router import app
from adaptersync_core.config import Config
from adaptersync_tools.servers import Role
from support import trainers
from support.redis_servers import RedisServers
from support.whole_fleet import WholeFleet, fleet_config, whole_fleet


@pytest.fixture
def redis_kind() -> str:
    return "redis7"


@pytest.fixture
def config(redis_servers: RedisServers, redis_kind: str, no_leaked_keys: None, tmp_path: Path) -> Config:
    control, cache = (redis_servers.url(redis_kind, role) for role in (Role.CONTROL, Role.CACHE))
    return fleet_config(control, cache, tmp_path)


@pytest.fixture
async def fleet(config: Config, tmp_path: Path) -> AsyncIterator[WholeFleet]:
    """Two replicas, one coordinator, one router; run "run" keeps one version beside the current one."""
    async with whole_fleet(config, tmp_path) as fleet:
        yield fleet


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a whole fleet shares one loop with its test: a choice may take longer than a router would give it."""
    monkeypatch.setattr(app, "CACHE_TIMEOUT_S", 5.0)


@pytest.fixture(scope="module")
def trl() -> ModuleType:
    return trainers.load_trl()


@pytest.fixture(scope="module")
def base(trl: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trainers.tiny_model(tmp_path_factory.mktemp("base"))
