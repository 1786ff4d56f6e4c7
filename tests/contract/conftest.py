"""What tests of the ledger share: who writes it to Redis, and a drain in small batches."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from adaptersync.jobs import ledger
from adaptersync_core.redis import RedisClient
from support.ledger import Writer


@pytest.fixture
async def writer(redis_url: str) -> AsyncIterator[Writer]:
    client = RedisClient(redis_url, name="test")
    yield Writer(client)
    await client.close()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of a few entries."""
    monkeypatch.setattr(ledger, "PAGE", 3)
    monkeypatch.setattr(ledger, "BATCH", 6)
