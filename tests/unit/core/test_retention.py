"""What may go from the store is what nobody can ask for any more, and never one of the latest."""

from __future__ import annotations

from adaptersync_core.retention import removable
from adaptersync_core.table import LiveState, LiveVersion, RunEntry, Table


def name(seq: int, run: str = "run") -> str:
    return f"{run}-v{seq}-{seq:012x}"


def table(current: int | None, **live: LiveState) -> Table:
    """`live` are states by "v" and sequence number."""
    versions = {
        name(int(each[1:])): LiveVersion(
            run="run", seq=int(each[1:]), epoch=1, digest="d", state=state, published_at=0, since=0, changed_in=1
        )
        for each, state in live.items()
    }
    entry = RunEntry(epoch=1, max_staleness=1, current=None if current is None else name(current))
    return Table(generation=1, runs={"run": entry}, versions=versions)


STORED = [name(seq) for seq in range(1, 11)]
AT_TEN = table(10, v10="current", v9="retained")


def gone(keep_last: int, known: Table = AT_TEN, stored: list[str] = STORED) -> list[int]:
    return [STORED.index(each) + 1 for each in removable(stored, known, "run", keep_last=keep_last)]


def test_the_latest_are_kept() -> None:
    assert gone(3) == [1, 2, 3, 4, 5, 6, 7]
    assert gone(1) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert gone(10) == gone(11) == []
    assert removable([], AT_TEN, "run", keep_last=1) == []


def test_all_are_kept_unless_told_otherwise() -> None:
    assert gone(0) == []


def test_what_the_table_names_is_kept() -> None:
    """One that retires may still write an answer, however old it is."""
    assert gone(1, table(10, v10="current", v9="retained", v2="retiring")) == [1, 3, 4, 5, 6, 7, 8]


def test_what_is_newer_than_the_current_one_may_still_come() -> None:
    assert gone(1, table(4, v4="current", v3="retained")) == [1, 2]


def test_a_run_that_serves_nothing_loses_nothing() -> None:
    assert gone(1, table(None)) == []
    assert gone(1, Table()) == []
