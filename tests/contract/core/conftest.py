"""A registry on a real server, and the same one behind a proxy that loses replies."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from adaptersync_core.keys import Keys
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from support.proxy import Fault, FaultProxy


@pytest.fixture
async def registry(redis_url: str) -> AsyncIterator[Registry]:
    client = RedisClient(redis_url, name="test")
    yield Registry(client, Keys("group"))
    await client.close()


@pytest.fixture
async def proxy(redis_url: str) -> AsyncIterator[FaultProxy]:
    async with FaultProxy("127.0.0.1", int(redis_url.rpartition(":")[2].partition("/")[0])) as proxy:
        yield proxy


@pytest.fixture
async def through(proxy: FaultProxy) -> AsyncIterator[Registry]:
    """What is lost on the way here is up to the proxy."""
    client = RedisClient(f"redis://127.0.0.1:{proxy.port}/0", name="test-through", timeout_s=2.0)
    yield Registry(client, Keys("group"))
    await client.close()


@pytest.fixture
async def lossy(registry: Registry, through: Registry, proxy: FaultProxy) -> AsyncIterator[Registry]:
    """Loses the first two replies to scripts; the server knows the scripts, so it executes them all the same."""
    for script in through._scripts.values():
        await registry.client.command("SCRIPT", "LOAD", script.source)
    proxy.arm(Fault.LOSE_REPLY, match=b"EVALSHA", times=2)
    yield through
    assert proxy.faults_done == 2
