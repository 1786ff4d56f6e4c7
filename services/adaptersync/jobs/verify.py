"""Deep verification of a stored version: what Redis says of it, what the store says of it, and every byte.

The verdict is an event and fields of the version's record. Running it again changes nothing but the time of the last
look; a version that is gone is not judged. Trouble in reaching store or Redis is no verdict either: the job fails and
may be asked for again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from adaptersync_core.config import Config, load_config
from adaptersync_core.errors import AdapterInvalid, ControlError, StoreError
from adaptersync_core.keys import Keys
from adaptersync_core.manifest import Manifest, content_digest, inspect
from adaptersync_core.markers import Lookout
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from adaptersync_core.store import ArtifactStore, verify_files

VISIBLE_S = 60.0  # how long a version may be invisible on this host's mount
GONE = ("superseded", "rolled_back", "voided", "retired")  # states in which a version's files may have been removed

log = logging.getLogger(__name__)


class Verdict(Struct, frozen=True, kw_only=True):
    """`reason` says what is wrong when the version is not `ok`."""

    ok: bool
    reason: str = ""


def verify_version(adapter_id: str) -> str:
    """The job. Its settings are those of the worker that runs it; what it returns is for rq's own records."""
    verdict = asyncio.run(verify(load_config(), adapter_id))
    return "gone" if verdict is None else "ok" if verdict.ok else verdict.reason


async def verify(config: Config, adapter_id: str) -> Verdict | None:
    """Judge a version and note the verdict; None when it is gone. ControlError when it was never announced."""
    store = ArtifactStore(Path(config.store.path))
    client = RedisClient(config.redis.control_url, name="verify")
    try:
        registry = Registry(client, Keys(config.group.name))
        manifest = await registry.manifest(adapter_id)
        if manifest is None:
            raise ControlError("version was never announced, or is long gone", version=adapter_id)
        await Lookout(store.shows).wait(manifest, until=time.monotonic() + VISIBLE_S)
        verdict = await asyncio.to_thread(judge, store, manifest)
        if not verdict.ok and not store.directory(adapter_id).is_dir():  # it may have been removed in the midst of it
            record = await registry.version(adapter_id)
            if record is not None and record.state in GONE:
                return None
        if await registry.verified(adapter_id, ok=verdict.ok, reason=verdict.reason):
            log.log(logging.INFO if verdict.ok else logging.ERROR, "verified %s: %s", adapter_id, verdict)
        return verdict
    finally:
        await client.close()


def judge(store: ArtifactStore, announced: Manifest) -> Verdict:
    """Compare the announced manifest with the stored one, and that with the stored bytes and what is in them."""
    adapter_id = announced.adapter_id
    directory = store.directory(adapter_id)
    if not directory.is_dir():
        return Verdict(ok=False, reason=f"store has no {directory.name}")
    try:
        if replace(store.read_manifest(adapter_id), markers=announced.markers) != announced:  # none could be left
            return Verdict(ok=False, reason="stored manifest is not the announced one")
        verify_files(announced, directory)
        if content_digest(announced.files) != announced.digest:
            return Verdict(ok=False, reason="digest of the manifest is not that of its files")
        if inspect(directory) != announced.shape:
            return Verdict(ok=False, reason="manifest tells of other tensors than the files hold")
    except (StoreError, AdapterInvalid) as error:
        return Verdict(ok=False, reason=str(error))
    return Verdict(ok=True)
