"""What of a run was published before, by whomever.

What was announced counts: a version that is stored only was on its way when its trainer ended, and never came.
"""

from __future__ import annotations

import asyncio

from adaptersync_core.errors import StoreError
from adaptersync_core.identity import DIGEST12, parse_adapter_id
from adaptersync_core.manifest import Manifest
from adaptersync_core.registry import Registry
from adaptersync_core.store import ArtifactStore

LOOKED_AT = 256  # of the latest versions of a run


async def newest(registry: Registry, store: ArtifactStore, run: str) -> Manifest | None:
    """The manifest of the latest version; of the latest whose manifest there still is."""
    for name in await registry.newest(run, LOOKED_AT):
        if (manifest := await _manifest(registry, store, name)) is not None:
            return manifest
    return None


async def find(registry: Registry, store: ArtifactStore, run: str, *, digest: str, step: int | None) -> str:
    """The adapter id of the version with these bytes that was published for this step; empty when there is none."""
    for name in await registry.newest(run, LOOKED_AT):
        if parse_adapter_id(name).digest12 == digest[:DIGEST12]:
            manifest = await _manifest(registry, store, name)
            if manifest is not None and (manifest.digest, manifest.step) == (digest, step):
                return name
    return ""


async def _manifest(registry: Registry, store: ArtifactStore, name: str) -> Manifest | None:
    """Redis keeps it for a time, the store for as long as the files."""
    manifest = await registry.manifest(name)
    if manifest is None:
        try:
            manifest = await asyncio.to_thread(store.read_manifest, name)
        except StoreError:
            return None
    return manifest
