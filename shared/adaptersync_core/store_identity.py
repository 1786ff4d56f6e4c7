"""Whether a directory is the group's store, and not the empty place where it is usually mounted.

Who first writes into a store leaves a file in its root whose name carries a random id, and Redis keeps the id for the
group. Two that are first at once leave two: Redis takes one of them, and the other does no harm. Groups that share a
store share its ids. A store is made where Redis knows of none, and never again: a root without the group's id is
left alone. A Redis that lost the id takes that of the root.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path

from adaptersync_core.errors import StoreError, StoreGone
from adaptersync_core.registry import Registry
from adaptersync_core.store import make_directory, sync_directory, write_durably

PREFIX = ".adaptersync-store-"
TEXT = b"This directory is a store of adaptersync, known by this file's name. Do not remove it.\n"


async def agree(registry: Registry, root: Path, before: str = "") -> str:
    """The id of the group's store, which `root` has; StoreGone when it has not.

    `before` is what the caller knew it by: it holds on where Redis forgot it.
    """
    known = await registry.store_id()
    if not known:
        known = await registry.settle_store_id(before or await asyncio.to_thread(found_or_made, root))
    await asyncio.to_thread(check, root, known)
    return known


def check(root: Path, identity: str) -> None:
    """StoreGone unless `root` has that id: one look at one name."""
    try:
        (root / f"{PREFIX}{identity}").stat()
    except OSError as error:
        raise StoreGone(
            f"this is not the group's store: {error.strerror}",
            next_step="is its mount gone? mount it; to begin a new store, delete the group's key `store` in Redis",
            path=str(root),
            store=identity,
        ) from error


def found_or_made(root: Path) -> str:
    """The id of the store in `root`, which need not exist yet; a store without one is given one."""
    try:
        make_directory(root)
        with os.scandir(root) as entries:
            found = min((entry.name for entry in entries if entry.name.startswith(PREFIX)), default="")
        if found:
            return found.removeprefix(PREFIX)
        identity = secrets.token_hex(8)
        write_durably(root / f"{PREFIX}{identity}", TEXT)
        sync_directory(root)
    except OSError as error:
        raise StoreError(
            f"store cannot be made or read: {error.strerror}",
            next_step="check space and permissions of the store",
            path=str(root),
        ) from error
    return identity
