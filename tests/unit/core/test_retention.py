"""What may go from the store is what nobody can ask for any more, and never one of the latest."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from adaptersync_core.config import StoreSection
from adaptersync_core.retention import due, kept_for, removable
from adaptersync_core.store import ArtifactStore
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


def test_each_nth_is_kept() -> None:
    assert [
        each for each in range(1, 11) if name(each) in removable(STORED, AT_TEN, "run", keep_last=1, keep_every=4)
    ] == [
        1,
        2,
        3,
        5,
        6,
        7,
    ]


def test_the_young_are_kept_beside_the_latest_or_alone() -> None:
    def old(keep_last: int) -> list[int]:
        young = {name(seq) for seq in range(6, 11)}
        return [STORED.index(each) + 1 for each in removable(STORED, AT_TEN, "run", keep_last=keep_last, young=young)]

    assert old(0) == old(1) == old(5) == [1, 2, 3, 4, 5]
    assert old(7) == [1, 2, 3]
    assert removable(STORED, AT_TEN, "run", keep_last=0, young=STORED) == []


def test_a_number_alone_removes_nothing() -> None:
    assert removable(STORED, AT_TEN, "run", keep_last=0, keep_every=5) == []


def test_a_run_that_ended_and_serves_nothing_keeps_the_latest() -> None:
    entry = RunEntry(epoch=1, max_staleness=1, considered=9, ended_at=5.0)
    known = Table(generation=1, runs={"run": entry})
    assert gone(2, known) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert gone(1, known) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert removable(STORED, known, "run", keep_last=0, young=()) == STORED[:9]  # the tenth was not considered


@pytest.mark.parametrize(
    ("known", "version", "why"),
    [
        (AT_TEN, name(10), "it is current in the fleet"),
        (AT_TEN, name(9), "it is retained in the fleet"),
        (table(10, v10="current", v3="retiring"), name(3), "it is retiring in the fleet"),
        (Table(), name(1), "run run is not known to this group, and may be another's"),
        (AT_TEN, name(11), "it was not yet considered, and may be served"),
        (AT_TEN, name(8), ""),
    ],
)
def test_what_may_not_be_taken_by_hand(known: Table, version: str, why: str) -> None:
    considered = {run: replace(entry, considered=10) for run, entry in known.runs.items()}
    assert kept_for(replace(known, runs=considered), version) == why


def test_what_is_to_be_done_first_is_said() -> None:
    runs = {run: replace(entry, considered=10, ended_at=5.0) for run, entry in AT_TEN.runs.items()}
    assert kept_for(replace(AT_TEN, runs=runs), name(10)) == "it is current in the fleet: adaptersync retire run"


def test_age_is_asked_of_the_store_where_it_is_a_rule(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    for each in STORED:
        store.directory(each).mkdir(parents=True)
    now = time.time()
    for age_s, each in enumerate(reversed(STORED)):
        os.utime(store.directory(each), (now - 100 * age_s, now - 100 * age_s))
    assert due(store, AT_TEN, "run", StoreSection(keep_for_s=450)) == STORED[:5]
    assert due(store, AT_TEN, "run", StoreSection(keep_last=8)) == STORED[:2]
    assert due(store, AT_TEN, "run", StoreSection()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
