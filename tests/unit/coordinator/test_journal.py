"""What the journal remembers: torn lines, terms that overlap, refusals that did and did not come about, a full disk."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from adaptersync.coordinator import journal as journal_module
from adaptersync.coordinator.journal import Entry, Journal, Recollection, intent, outcome, remember
from adaptersync_core.errors import StoreError
from adaptersync_core.records import Decision, RunRecord, VersionRecord
from adaptersync_core.table import LiveState, LiveVersion, RunEntry, Table

V1, V2 = "run-v1-000000000000", "run-v2-000000000000"
REFUSED = VersionRecord(state="rolled_back", reason="bad", generation=2)


def table(generation: int, **states: LiveState) -> Table:
    names = {"v1": V1, "v2": V2}
    return Table(
        generation=generation,
        incarnation="t",
        runs={"run": RunEntry(epoch=1, max_staleness=1)},
        versions={
            names[short]: LiveVersion(
                run="run", seq=int(short[1:]), epoch=1, digest="", state=state, published_at=0, since=0, changed_in=1
            )
            for short, state in states.items()
        },
    )


def committed(generation: int, **states: LiveState) -> Entry:
    return outcome(Decision(table=table(generation, **states)), {"run": RunRecord(epoch=1, seq=2, max_staleness=1)})


def test_what_was_written_is_recalled(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "group")
    assert journal.recall() == Recollection()
    journal.begin("a", Recollection())
    known = remember(Recollection(), committed(1, v1="current"))
    journal.write(committed(1, v1="current"), known)
    assert Journal(tmp_path, "group").recall() == known
    assert known.runs["run"].seq == 2


def test_only_refusals_are_written_before_they_are_committed() -> None:
    decision = Decision(table=table(2, v1="current"), records={V1: VersionRecord(state="current"), V2: REFUSED})
    assert intent(decision) == Entry(generation=2, fates={V2: REFUSED})
    assert intent(replace(decision, records={V1: VersionRecord(state="current")})) is None


def test_a_refusal_stands_until_a_table_of_its_generation_or_later_serves_the_version() -> None:
    known = remember(Recollection(), committed(1, v2="staging"))
    known = remember(known, Entry(generation=2, fates={V2: REFUSED}))
    assert known.fates == {V2: REFUSED}
    assert remember(known, committed(1, v2="staging")).fates == {V2: REFUSED}  # older: it says nothing of it
    assert remember(known, committed(2, v2="retiring")).fates == {V2: REFUSED}
    assert remember(known, committed(2, v2="current")).fates == {}  # another decision took its place


def test_a_torn_last_line_is_as_if_it_had_not_been_written_and_the_next_follows_a_whole_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "group")
    journal.begin("a", Recollection())
    journal.write(committed(1, v1="staging"), Recollection())
    (path,) = (tmp_path / ".coordinator" / "group").iterdir()
    whole = path.read_bytes()
    for cut in range(1, len(whole.splitlines(keepends=True)[-1])):
        path.write_bytes(whole[:-cut])
        assert Journal(tmp_path, "group").recall().table in (Table(), table(1, v1="staging"))
    path.write_bytes(whole[:-5])
    journal.write(committed(2, v1="current"), Recollection())
    assert Journal(tmp_path, "group").recall().table == table(2, v1="current")


def test_a_line_that_is_broken_in_the_middle_stops_everything(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "group")
    journal.begin("a", Recollection())
    (path,) = (tmp_path / ".coordinator" / "group").iterdir()
    path.write_bytes(b"not json\n" + path.read_bytes())
    with pytest.raises(StoreError, match="journal cannot be read"):
        journal.recall()


def test_what_a_former_leader_still_writes_is_not_read(tmp_path: Path) -> None:
    former, leader = Journal(tmp_path, "group"), Journal(tmp_path, "group")
    former.begin("a", Recollection())
    former.write(committed(1, v1="staging"), Recollection())
    known = leader.recall()
    leader.begin("b", known)
    leader.write(committed(2, v1="current"), known)
    former.write(committed(2, v1="retiring"), Recollection())
    former.write(Entry(generation=3, fates={V1: REFUSED}), Recollection())
    found = Journal(tmp_path, "group").recall()
    assert (found.table, found.fates) == (table(2, v1="current"), {})


def test_two_that_began_at_once_are_both_read_and_the_one_that_committed_counts(tmp_path: Path) -> None:
    one, two = Journal(tmp_path, "group"), Journal(tmp_path, "group")
    for journal, term in ((one, "a"), (two, "b")):
        journal.recall()
        journal.begin(term, Recollection())
    two.write(committed(1, v1="staging"), Recollection())
    assert Journal(tmp_path, "group").recall().table == table(1, v1="staging")


def test_a_long_file_is_begun_anew_with_all_that_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "ENTRIES", 3)
    journal, known = Journal(tmp_path, "group"), remember(Recollection(), Entry(generation=0, fates={V2: REFUSED}))
    journal.begin("a", known)
    for generation in range(1, 9):
        known = remember(known, committed(generation, v1="current"))
        journal.write(committed(generation, v1="current"), known)
    paths = sorted((tmp_path / ".coordinator" / "group").iterdir())
    assert len(paths) == 3
    assert all(len(path.read_bytes().splitlines()) <= 3 for path in paths)
    assert Journal(tmp_path, "group").recall() == known
    assert known.fates == {V2: REFUSED}


def test_files_of_former_terms_go_when_they_are_old(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "group")
    journal.begin("a", Recollection())
    (first,) = (tmp_path / ".coordinator" / "group").iterdir()
    journal.begin("b", Recollection())
    assert first.exists()
    old = time.time() - journal_module.KEPT_S - 1
    os.utime(first, (old, old))
    journal.begin("c", Recollection())
    assert not first.exists()


def test_what_cannot_be_written_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path, "group")
    journal.begin("a", Recollection())

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="No space left on device"):
        journal.write(committed(1, v1="staging"), Recollection())
    with pytest.raises(StoreError, match="No space left on device"):
        journal.begin("b", Recollection())
