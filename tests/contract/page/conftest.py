"""A page in front of a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from support.page import Serve, Served, server_of


@pytest.fixture
def serve(redis_url: str) -> Serve:
    return server_of(redis_url)


@pytest.fixture
async def served(serve: Serve) -> AsyncIterator[Served]:
    async with serve() as served:
        yield served
