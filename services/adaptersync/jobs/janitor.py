"""Housekeeping in rounds, each of which ends and may be repeated: what timers start.

A round asks for what is due or does it; it holds nothing between two of them, and two at once do no harm.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from adaptersync_core.config import Config
from adaptersync_core.errors import StoreError
from adaptersync_core.keys import Keys
from adaptersync_core.queue import Jobs
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from adaptersync_core.store import ArtifactStore
from adaptersync_core.table import Table

log = logging.getLogger(__name__)


async def verify(config: Config) -> str:
    """Ask the workers to read again every version that is served: bytes may rot after they were promoted."""
    table = await _table(config)
    live = [name for name in table.versions if table.routable(name)]
    with contextlib.closing(Jobs(config)) as jobs:
        for name in live:
            await asyncio.to_thread(jobs.verify, name)
    return f"asked for {len(live)} verifications"


async def tidy(config: Config) -> str:
    """Remove from the store what a publisher left that was killed and whose run never went on."""
    return await asyncio.to_thread(_tidy, ArtifactStore(Path(config.store.path)))


def _tidy(store: ArtifactStore) -> str:
    try:
        runs = sorted(path.name for path in store.root.iterdir() if path.is_dir() and not path.name.startswith("."))
        for run in runs:
            store.tidy(run)
    except OSError as error:
        raise StoreError(
            f"store cannot be tidied: {error.strerror or error}",
            next_step="check its mount and permissions",
            store=str(store.root),
        ) from error
    return f"tidied {len(runs)} runs"


async def _table(config: Config) -> Table:
    client = RedisClient(config.redis.control_url, name="janitor")
    try:
        return await Registry(client, Keys(config.group.name)).table()
    finally:
        await client.close()


TASKS: Mapping[str, Callable[[Config], Coroutine[Any, Any, str]]] = {"verify": verify, "tidy": tidy}
