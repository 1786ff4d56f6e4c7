"""A fleet of two replicas behind a router; on servers shared by tests, or on two that a test may kill."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from adaptersync_tools.servers import RedisServer, Role
from support.redis_servers import server_binary
from support.router_fleet import Fleet, Servers, free_port, make_fleet


@pytest.fixture
async def fleet(redis_url: str, cache_url: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with make_fleet(redis_url, cache_url, tmp_path) as fleet:
        yield fleet


@pytest.fixture
def servers(tmp_path: Path, redis_kind: str) -> Iterator[Servers]:
    binary = server_binary(redis_kind)
    # ports of their own, so that a server that was killed comes back where it was
    control = RedisServer(Role.CONTROL, tmp_path / "control", binary=binary, port=free_port())
    cache = RedisServer(Role.CACHE, tmp_path / "cache", binary=binary, port=free_port())
    with control, cache:
        yield Servers(control, cache)


@pytest.fixture
async def own_fleet(servers: Servers, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with make_fleet(servers.control.url, servers.cache.url, tmp_path) as fleet:
        yield fleet
