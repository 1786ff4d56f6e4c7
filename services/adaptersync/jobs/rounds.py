"""Housekeeping in rounds, each of which ends and may be repeated: what the clock asks for.

A round asks for what is due or does it; it holds nothing between two of them, and two at once do no harm.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path

from adaptersync.jobs.export import abandoned
from adaptersync_core.config import Config, load_config
from adaptersync_core.errors import StoreError
from adaptersync_core.keys import Keys
from adaptersync_core.queue import Jobs
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from adaptersync_core.store import ArtifactStore

log = logging.getLogger(__name__)


def verify_served() -> str:
    """The job."""
    return asyncio.run(verify(load_config()))


def tidy_store() -> str:
    """The job."""
    return tidy(load_config())


async def verify(config: Config) -> str:
    """Ask the workers to read again every version that is served: bytes may rot after they were promoted."""
    client = RedisClient(config.redis.control_url, name="verify")
    try:
        table = await Registry(client, Keys(config.group.name)).table()
    finally:
        await client.close()
    live = [name for name in table.versions if table.routable(name)]
    await asyncio.to_thread(_ask, config, live)
    return f"asked for {len(live)} verifications"


def _ask(config: Config, names: list[str]) -> None:
    with Jobs(config) as jobs:
        for name in names:
            jobs.verify(name)


def tidy(config: Config) -> str:
    """Remove what was left by a publisher that was killed and whose run never went on, or by an export."""
    store = ArtifactStore(Path(config.store.path))
    try:
        runs = sorted(path.name for path in store.root.iterdir() if path.is_dir() and not path.name.startswith("."))
        for run in runs:
            store.tidy(run)
        exports = list(abandoned(Path(config.jobs.export_path))) if config.jobs.export_path else []
    except OSError as error:
        raise StoreError(
            f"store cannot be tidied: {error.strerror or error}",
            next_step="check its mount and permissions",
            store=error.filename or str(store.root),
        ) from error
    for path in exports:
        shutil.rmtree(path, ignore_errors=True)
    return f"tidied {len(runs)} runs" + (f" and {len(exports)} exports" if exports else "")
