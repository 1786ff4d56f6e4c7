"""Whether Redis lost what was decided, and what the store knows of it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from adaptersync_core.errors import StoreError
from adaptersync_core.manifest import Manifest
from adaptersync_core.records import Leadership, RunRecord
from adaptersync_core.store import ArtifactStore
from adaptersync_core.table import Table

VERSIONS = 1024  # stored versions that are announced again, the latest of all runs together

log = logging.getLogger(__name__)


def lost(lease: Leadership, journaled: Table) -> bool:
    """Redis was emptied, put in place anew, or set back to an older state than the journal's."""
    if not journaled.generation:
        return False
    return lease.incarnation != journaled.incarnation or lease.generation < journaled.generation


def stored_manifests(store: ArtifactStore) -> list[Manifest]:
    """Manifests of the latest stored versions; one that cannot be read is left out, and said."""
    manifests = []
    for name in deque(store.versions(), VERSIONS):
        try:
            manifests.append(store.read_manifest(name))
        except StoreError as error:
            log.warning("not announced again: %s", error)
    return manifests


def highest_numbers(known: Mapping[str, RunRecord], manifests: Iterable[Manifest]) -> dict[str, RunRecord]:
    """The highest epoch and sequence number of each run that either the journal or the store has seen."""
    runs = dict(known)
    for manifest in manifests:
        run = runs.get(manifest.run, RunRecord(epoch=0, seq=0, max_staleness=0))
        runs[manifest.run] = replace(run, epoch=max(run.epoch, manifest.epoch), seq=max(run.seq, manifest.seq))
    return runs
