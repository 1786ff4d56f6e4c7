"""Which stored versions of a run may go. Pure.

What a run may still serve, or go back to, stands in the table; what may still be promoted is newer than its current
version. Everything else is only kept for those who come to look at it.
"""

from __future__ import annotations

from collections.abc import Sequence

from adaptersync_core.identity import parse_adapter_id
from adaptersync_core.table import Table


def removable(stored: Sequence[str], table: Table, run: str, *, keep_last: int) -> list[str]:
    """Of a run's stored versions, oldest first, those beyond the latest `keep_last` (0: all are kept) that nobody can
    ask for any more: not in the table, and older than what is current."""
    entry = table.runs.get(run)
    if keep_last < 1 or entry is None or entry.current is None:
        return []
    current = parse_adapter_id(entry.current).seq
    return [name for name in stored[:-keep_last] if name not in table.versions and parse_adapter_id(name).seq < current]
