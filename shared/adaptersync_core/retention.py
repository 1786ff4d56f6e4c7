"""Which stored versions of a run may go. Pure, but for `due`, which asks the store how old they are.

What a run may still serve, or go back to, stands in the table; what may still be promoted is newer than its current
version, or not yet considered. Everything else is only kept for those who come to look at it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from adaptersync_core.config import StoreSection
from adaptersync_core.identity import parse_adapter_id
from adaptersync_core.store import ArtifactStore
from adaptersync_core.table import Table


def removable(
    stored: Sequence[str],
    table: Table,
    run: str,
    *,
    keep_last: int,
    keep_every: int = 0,
    young: Collection[str] | None = None,
) -> list[str]:
    """Of a run's stored versions, oldest first, those that nobody can ask for any more and that no rule keeps.

    Kept are the latest `keep_last` (0: no rule), those whose number `keep_every` divides (0: no rule), and the `young`
    (None: no rule). Where neither number nor age is a rule, all are kept.
    """
    entry = table.runs.get(run)
    if entry is None or (keep_last < 1 and young is None):
        return []
    if entry.current is not None:
        below = parse_adapter_id(entry.current).seq
    elif entry.ended_at:  # it gave up its last version, and all that it published was considered
        below = entry.considered + 1
    else:
        return []
    beyond = stored[:-keep_last] if keep_last else stored
    return [
        name
        for name in beyond
        if name not in table.versions
        and (seq := parse_adapter_id(name).seq) < below
        and not (keep_every and seq % keep_every == 0)
        and (young is None or name not in young)
    ]


def due(store: ArtifactStore, table: Table, run: str, settings: StoreSection) -> list[str]:
    """Of a run's versions in the store, those that the settings let go; OSError."""
    stored = store.versions_of(run)
    young = store.younger(stored, settings.keep_for_s) if settings.keep_for_s else None
    return removable(stored, table, run, keep_last=settings.keep_last, keep_every=settings.keep_every, young=young)


def kept_for(table: Table, adapter_id: str) -> str:
    """Why a version must stay whatever anybody wants; nothing when it may go."""
    version = parse_adapter_id(adapter_id)
    live = table.versions.get(adapter_id)
    entry = table.runs.get(version.run)
    if live is not None:
        ended = entry is not None and entry.ended_at and live.state in ("current", "retained")
        return f"it is {live.state} in the fleet" + (f": adaptersync retire {version.run}" if ended else "")
    if entry is None:
        return f"run {version.run} is not known to this group, and may be another's"
    if version.seq > entry.considered:
        return "it was not yet considered, and may be served"
    return ""
