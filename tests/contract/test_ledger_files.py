"""Which files the archive consists of: none of another link's is touched, whoever died or came late."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

import msgspec
import pyarrow.parquet
import pytest

from adaptersync_core import chain
from adaptersync_core.archive import Archive
from adaptersync_core.archived import TABLES, Record
from adaptersync_core.chain import Head
from adaptersync_core.errors import StoreError
from adaptersync_core.rollouts import FIELD
from support.ledger import GROUP, ids, row


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


class Killed(BaseException):
    pass


def killed(*_: object) -> None:
    raise Killed


def batch(*entries: str) -> list[Record]:
    return [
        record
        for entry in entries
        for record in TABLES["rollouts"].records(entry, {FIELD: msgspec.json.encode(row(f"r-{entry}")).decode()})
    ]


def merged(archive: Archive, *paths: str) -> Head | None:
    head, files = archive.head(), archive.files()
    assert head is not None
    parts = [files[path] for path in paths]
    return archive.merge(parts, [archive.checked(part) for part in parts], head)


def test_who_comes_late_overwrites_nothing(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same batch, by another release of pyarrow: other bytes of the same rows."""
    archive = Archive(store, GROUP, "rollouts")
    assert archive.write(batch("1-0", "2-0"), None) is not None
    write = pyarrow.parquet.write_table
    with monkeypatch.context() as other:
        other.setattr(pyarrow.parquet, "write_table", lambda table, sink, **_: write(table, sink, compression="gzip"))
        assert archive.write(batch("1-0", "2-0"), None) is None
    assert ids(store) == ["r-1-0", "r-2-0"]


def test_a_merged_file_is_of_all_between_its_first_entry_and_its_last(store: Path) -> None:
    archive = Archive(store, GROUP, "rollouts")
    archive.write(batch("50-0", "60-0"), archive.write(batch("1-0", "80-0", "100-0"), None))
    assert merged(archive, *sorted(archive.files())) is not None
    damaged: list[StoreError] = []
    assert list(archive.known("80-0", "90-0", damaged.append)) == ["80-0"]
    assert damaged == []


def test_a_merged_file_has_a_name_of_its_own(store: Path) -> None:
    archive = Archive(store, GROUP, "rollouts")
    archive.write(batch("2-0"), archive.write(batch("1-0", "100-0"), None))
    assert merged(archive, *sorted(archive.files())) is not None
    archive.write(batch("50-0"), archive.head())
    assert merged(archive, *sorted(archive.files())) is not None
    assert sorted(ids(store)) == ["r-1-0", "r-100-0", "r-2-0", "r-50-0"]


def test_what_was_merged_goes_though_others_went_on(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = Archive(store, GROUP, "rollouts")
    archive.write(batch("2-0"), archive.write(batch("1-0"), None))
    with monkeypatch.context() as dying:
        dying.setattr(Archive, "_discard", killed)
        with pytest.raises(Killed):
            merged(archive, *sorted(archive.files()))
    other = Archive(store, GROUP, "rollouts")
    other.write(batch("3-0"), other.head())
    other.write(batch("4-0"), other.head())
    other.tidy()
    assert ids(store) == ["r-1-0", "r-2-0", "r-3-0", "r-4-0"]
    assert list(store.rglob("*.noted")) == []


@pytest.mark.parametrize("path", ["/precious.parquet", "../precious.parquet", "run=a/../../precious.parquet", "x"])
@pytest.mark.parametrize("told_by", ["note", "link", "replaced"])
def test_nothing_is_removed_outside_of_the_table(store: Path, path: str, told_by: str) -> None:
    archive = Archive(store, GROUP, "rollouts")
    head = archive.write(batch("1-0"), None)
    assert head is not None
    precious = store / ".ledger" / GROUP / "precious.parquet"
    precious.write_text("kept")
    named = str(precious) if path.startswith("/") else path
    note = {"number": 1, "paths": [named] if told_by == "note" else []}
    (archive.root / ".chain" / "000000001-0.noted").write_bytes(msgspec.json.encode(note))
    if told_by != "note":
        place = archive.root / ".chain" / "000000" / "000000001" / "link.json"
        link = msgspec.json.decode(place.read_bytes())
        link |= {"replaces": [named]} if told_by == "replaced" else {"files": [{**link["files"][0], "path": named}]}
        place.write_bytes(msgspec.json.encode(link))
    with contextlib.suppress(StoreError):  # of a note nobody complains
        archive.tidy()
    assert precious.read_text() == "kept"


def test_a_note_removes_only_what_was_written_for_its_link(store: Path) -> None:
    archive = Archive(store, GROUP, "rollouts")
    archive.write(batch("2-0"), archive.write(batch("1-0"), None))
    note = {"number": 1, "paths": sorted(archive.files())}
    (archive.root / ".chain" / "000000001-0.noted").write_bytes(msgspec.json.encode(note))
    archive.tidy()
    assert ids(store) == ["r-1-0", "r-2-0"]


def test_the_chain_is_read_from_its_last_list_of_files(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "SHARD", 4)
    archive = Archive(store, GROUP, "rollouts")
    for n in range(1, 4):
        archive.write(batch(f"{n}-0"), archive.head())
    assert merged(archive, *sorted(archive.files())) is not None  # the link that has a list
    for n in range(5, 15):
        archive.write(batch(f"{n}-0"), archive.head())
    expected = archive.files()
    assert len(expected) == 11
    for number in (1, 5, 11):
        shutil.rmtree(archive.root / ".chain" / f"{number // 4:06d}" / f"{number:09d}")
    assert archive.files() == expected
    last = archive.root / ".chain" / "000003" / "000000012" / "files.json"
    content = last.read_bytes()
    last.write_bytes(content.replace(b'"rows":1', b'"rows":2'))
    assert len(archive.files()) == 10  # from the list before, without link 11
    last.write_bytes(content)
    assert archive.files() == expected


def test_what_comes_is_archived_though_no_list_can_be_made(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "SHARD", 4)
    archive = Archive(store, GROUP, "rollouts")
    for n in range(1, 4):
        archive.write(batch(f"{n}-0"), archive.head())
    torn = archive.root / ".chain" / "000000" / "000000002" / "link.json"
    content = torn.read_bytes()
    torn.write_bytes(content[:20])
    for n in range(4, 6):
        assert archive.write(batch(f"{n}-0"), archive.head()) is not None
    torn.write_bytes(content)
    assert len(ids(store)) == 5


def test_what_was_half_written_goes_once_nobody_can_be_at_it(store: Path) -> None:
    archive = Archive(store, GROUP, "rollouts")
    archive.write(batch("1-0"), None)
    (path,) = (archive.root / path for path in archive.files())
    links = archive.root / ".chain"
    old = [
        path.with_name(f".{path.name}.391ca203"),
        links / ".000000002-0123456789ab.noted.391ca203",
        links / "000000" / ".making-391ca203",
    ]
    old[0].write_bytes(b"half")
    old[1].write_bytes(b"half")
    old[2].mkdir()
    (old[2] / "link.json").write_bytes(b"half")
    young = path.with_name(f".{path.name}.401ca203")
    young.write_bytes(b"half")
    for each in (*old, path):
        os.utime(each, (time.time() - 90_000,) * 2)
    archive.sweep()
    assert [each for each in old if each.exists()] == []
    assert young.exists()
    assert ids(store) == ["r-1-0"]
