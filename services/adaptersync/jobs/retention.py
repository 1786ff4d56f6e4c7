"""Take versions out of the store that nobody can ask for any more: by rule, of all runs, or one by hand.

What is served, on its way, or waits for its last answers stands in the table, and is never taken, nor is what was not
yet considered. Whoever reads a version's files without being in the table, as a verification or an export does, finds
them all or finds that they are gone. Each removal is one rename, so a job that is killed is done by the next.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from adaptersync_core.config import Config, load_config
from adaptersync_core.errors import StoreError
from adaptersync_core.identity import parse_adapter_id
from adaptersync_core.keys import Keys
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from adaptersync_core.retention import due, kept_for
from adaptersync_core.store import ArtifactStore
from adaptersync_core.store_identity import agree
from adaptersync_core.table import Table

REMOVED = "removed"

log = logging.getLogger(__name__)


def retain() -> str:
    """The job."""
    return asyncio.run(clear(load_config()))


def remove_version(adapter_id: str) -> str:
    """The job: REMOVED, or why it stays."""
    return asyncio.run(remove(load_config(), adapter_id))


async def clear(config: Config) -> str:
    """Remove what the rules of the settings let go; runs that the group does not know are left alone."""
    store, table = await _store_and_table(config)
    removed = await asyncio.to_thread(_clear, config, store, table)
    return f"removed {removed} versions"


async def remove(config: Config, adapter_id: str) -> str:
    """Remove a version whatever the rules say; returns REMOVED, or why it must stay."""
    parse_adapter_id(adapter_id)
    store, table = await _store_and_table(config)
    if why := kept_for(table, adapter_id):
        return why
    if not store.directory(adapter_id).is_dir():
        return "it is not in the store"
    await asyncio.to_thread(_remove, store, adapter_id)
    return REMOVED


async def _store_and_table(config: Config) -> tuple[ArtifactStore, Table]:
    """The group's own store: a directory that is not is left alone."""
    store = ArtifactStore(Path(config.store.path))
    client = RedisClient(config.redis.control_url, name="retention")
    try:
        registry = Registry(client, Keys(config.group.name))
        await agree(registry, store.root)
        return store, await registry.table()
    finally:
        await client.close()


def _clear(config: Config, store: ArtifactStore, table: Table) -> int:
    """How many were removed. StoreError of the first run that was not cleared, once the others were."""
    removed, failed = 0, []
    for run in table.runs:
        try:
            for name in _due(store, table, run, config):
                _remove(store, name)
                removed += 1
        except StoreError as error:
            log.warning("run %s was not cleared: %s", run, error)
            failed.append(error)
    if failed:
        raise StoreError(
            f"{len(failed)} of {len(table.runs)} runs were not cleared: {failed[0].reason}",
            next_step=failed[0].next_step,
            removed=removed,
            **failed[0].ids,
        )
    return removed


def _due(store: ArtifactStore, table: Table, run: str, config: Config) -> list[str]:
    try:
        return due(store, table, run, config.store)
    except OSError as error:
        raise StoreError(
            f"store cannot be read: {error.strerror or error}", next_step="check its mount", run=run
        ) from error


def _remove(store: ArtifactStore, adapter_id: str) -> None:
    try:
        store.remove(adapter_id)
    except OSError as error:
        raise StoreError(
            f"version cannot be removed: {error.strerror or error}",
            next_step="check permissions of the store",
            version=adapter_id,
        ) from error
    log.info("removed %s from the store", adapter_id)
