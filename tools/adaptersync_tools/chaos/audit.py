"""The fleet's own ledger, archived and held against manifests and events, as `adaptersync audit verify` does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from adaptersync_core.config import Config
from adaptersync_core.errors import AdapterSyncError
from adaptersync_tools.audit.verify import Audit, Counts


async def audit(config: Config, runs: Sequence[str], found: Callable[[str], None]) -> dict[str, Counts]:
    """What was looked at of each run; `found` is told each contradiction. A worker may be at the same."""
    from adaptersync.jobs.ledger import drain

    await drain(config)
    return {run: await asyncio.to_thread(_verify, config, run, found) for run in runs}


def _verify(config: Config, run: str, found: Callable[[str], None]) -> Counts:
    of_run = Audit(Path(config.store.path), config.group.name, run)
    try:
        for contradiction in of_run.contradictions():
            found(f"{run}: {contradiction}")
    except AdapterSyncError as error:
        found(f"{run}: {error}")
    return of_run.counts
