"""Versions for tests: a small adapter directory, and the manifest a publisher would write for it."""

from __future__ import annotations

import time
from pathlib import Path

from msgspec.structs import replace

from adaptersync_core import markers
from adaptersync_core.manifest import FILES, Manifest, content_digest, hash_file, inspect
from adaptersync_core.records import ReplicaReport
from adaptersync_core.store import ArtifactStore
from support.adapters import make_adapter

REPORT = ReplicaReport(
    url="http://r1",
    base_model="base",
    engine_epoch="1700000000.25",
    max_loras=4,
    max_cpu_loras=4,
    max_lora_rank=16,
    block_size=16,
)


def small_adapter(directory: Path, *, seed: int = 0, rank: int = 2, hidden: int = 8, scale: float = 0.5) -> Path:
    """One layer, a few hundred bytes."""
    return make_adapter(
        directory, seed=seed, rank=rank, hidden=hidden, intermediate=16, layers=1, targets=("q_proj",), scale=scale
    )


def manifest_of(
    directory: Path, *, run: str = "run", seq: int = 1, epoch: int = 1, step: int | None = None
) -> Manifest:
    """What a publisher would say of an adapter directory."""
    files = tuple(hash_file(directory / name) for name in FILES)
    return Manifest(
        run=run,
        seq=seq,
        epoch=epoch,
        digest=content_digest(files),
        files=files,
        shape=inspect(directory),
        created_at=1_700_000_000.25,
        step=step,
    )


def stored(
    store: ArtifactStore, scratch: Path, *, run: str = "run", seq: int = 1, epoch: int = 1, marked: bool = False
) -> Manifest:
    """A version in the store, with bytes of its own for every (run, seq); `marked` as a publisher does it now."""
    source = small_adapter(scratch / f"{run}-{seq}", seed=seq)
    manifest = manifest_of(source, run=run, seq=seq, epoch=epoch)
    if marked:
        manifest = replace(manifest, markers=markers.COUNT, created_at=time.time())
    store.publish(manifest, source)
    if marked:
        store.mark(manifest)
    return manifest
