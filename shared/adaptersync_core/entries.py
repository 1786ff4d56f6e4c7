"""When an entry of a stream was written, by its id. Who may write a stream may give it any id.

One beyond the calendar counts as of the calendar's last day, so that a date can be made of each. Pure.
"""

from __future__ import annotations

from datetime import UTC, datetime

LAST_S = 253_402_214_400  # 9999-12-31, early enough for the time of every zone


def written_ms(entry: str) -> int:
    """Since 1970."""
    return min(int(entry.partition("-")[0]), LAST_S * 1000)


def moment(at_s: float) -> datetime:
    """UTC."""
    return datetime.fromtimestamp(min(at_s, LAST_S), tz=UTC)
