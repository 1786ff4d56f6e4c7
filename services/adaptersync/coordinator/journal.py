"""What was decided, kept in the store, so that it outlives Redis.

A refusal is written before it is committed, everything else after it: whatever instant a machine dies at, a version
that was refused or voided never comes back, and one that was not promoted is never restored as if it had been.

Each term of a leader writes a file of its own, and only its leader writes it. It begins with all that was known when
the term began, so that the file of the last term is enough, and nothing that a former leader still writes is read. A
last line that was torn by a crash is as if it had not been written.

It is written into the group's own store only: where a mount is gone, a journal begun anew would be a second one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct

from adaptersync_core.errors import StoreError
from adaptersync_core.records import Decision, RunRecord, VersionRecord
from adaptersync_core.store import DIRECTORY_MODE, JOURNAL, sync_directory, write_durably
from adaptersync_core.store_identity import check
from adaptersync_core.table import Table

REFUSALS = frozenset({"rolled_back", "voided", "superseded"})
ENTRIES = 20_000  # lines before another file is begun
FATES = 10_000  # versions whose fate is kept, the latest
KEPT_S = 86_400.0  # files of former terms; long enough that no leader of then still reads or writes them

log = logging.getLogger(__name__)


class Entry(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line. Without a table it only says which versions were about to be refused in that generation."""

    generation: int
    fates: dict[str, VersionRecord] = {}
    table: Table | None = None
    runs: dict[str, RunRecord] = {}


class Recollection(Struct, frozen=True, kw_only=True):
    """What the journal knows: the last table, the fates of versions that are gone, the highest numbers of each run."""

    table: Table = Table()
    fates: dict[str, VersionRecord] = {}
    runs: dict[str, RunRecord] = {}


def intent(decision: Decision) -> Entry | None:
    """What must be written before the decision is committed; nothing when it refuses nothing."""
    refused = {name: record for name, record in decision.records.items() if record.state in REFUSALS}
    return Entry(generation=decision.table.generation, fates=refused) if refused else None


def outcome(decision: Decision, runs: dict[str, RunRecord]) -> Entry:
    """What is written after it was committed."""
    gone = {name: record for name, record in decision.records.items() if name not in decision.table.versions}
    return Entry(generation=decision.table.generation, fates=gone, table=decision.table, runs=runs)


def remember(known: Recollection, entry: Entry) -> Recollection:
    """Take in one entry. A table that serves a version says that no refusal of it came about up to its generation."""
    fates = dict(known.fates)
    for name, record in entry.fates.items():
        fates.pop(name, None)
        fates[name] = record
    if entry.table is not None:
        for name, version in entry.table.versions.items():
            refusal = fates.get(name)
            if refusal is not None and version.state != "retiring" and refusal.generation <= entry.generation:
                del fates[name]
    fates = dict(list(fates.items())[-FATES:])
    return Recollection(table=entry.table or known.table, fates=fates, runs=known.runs | entry.runs)


class Journal:
    """One group's journal. Blocking: call it in a thread."""

    def __init__(self, store: Path, group: str) -> None:
        self._store = store
        self._directory = store / JOURNAL / group
        self.store_id = ""  # what the group knows its store by; nothing: whatever is there
        self._path: Path | None = None
        self._number = 0
        self._lines = 0

    def check(self) -> None:
        """StoreGone when the store is not there to be written to."""
        if self.store_id:
            check(self._store, self.store_id)

    def recall(self) -> Recollection:
        """What the last term wrote; an empty recollection when nothing was ever written."""
        known = Recollection()
        try:
            numbers = sorted({_number(path) for path in self._directory.glob("*.jsonl")})
            self._number = numbers[-1] if numbers else 0
            # two files of one number: of two that began at once, only one can have committed anything
            paths = sorted(self._directory.glob(f"{self._number:08d}-*.jsonl"))
            entries = [entry for path in paths for entry in _entries(path)]
        except OSError as error:
            raise StoreError(f"journal cannot be read: {error.strerror}", path=str(self._directory)) from error
        for entry in sorted(entries, key=lambda entry: (entry.generation, entry.table is not None)):
            known = remember(known, entry)
        return known

    def begin(self, term: str, known: Recollection) -> None:
        """Begin the file of a term with all that is known; nothing of an earlier file is read from here on."""
        first = Entry(generation=known.table.generation, fates=known.fates, table=known.table, runs=known.runs)
        self.check()
        path = self._directory / f"{self._number + 1:08d}-{term}.jsonl"
        try:
            if not self._directory.is_dir():
                for directory in (self._directory.parent, self._directory):
                    directory.mkdir(parents=True, exist_ok=True)
                    directory.chmod(DIRECTORY_MODE)
                sync_directory(self._directory.parent)
            half = path.with_suffix(".new")
            write_durably(half, msgspec.json.encode(first) + b"\n")
            half.rename(path)
            sync_directory(self._directory)
        except OSError as error:
            raise _unwritten(error, path) from error
        self._path, self._number, self._lines = path, self._number + 1, 1
        self._tidy()

    def write(self, entry: Entry, known: Recollection) -> None:
        """Add one entry, durably; `known` is everything with it, for the case that the file has grown long."""
        path = self._path
        if path is None:
            raise StoreError("journal was not begun", path=str(self._directory))
        self.check()
        if self._lines >= ENTRIES:
            self.begin(path.stem.partition("-")[2], known)
            return
        try:
            with path.open("a+b") as file:
                _drop_torn(file)
                file.write(msgspec.json.encode(entry) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise _unwritten(error, path) from error
        self._lines += 1

    def _tidy(self) -> None:
        for path in self._directory.glob("*"):
            with contextlib.suppress(OSError):  # another coordinator was faster, or may not: the next one will
                if _number(path) < self._number and time.time() - path.stat().st_mtime > KEPT_S:
                    path.unlink()


def _number(path: Path) -> int:
    head = path.name.partition("-")[0]
    return int(head) if head.isdigit() else 0


def _entries(path: Path) -> list[Entry]:
    entries = []
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            entries.append(msgspec.json.decode(line, type=Entry))
        except msgspec.MsgspecError as error:
            if number == len(lines) and not line.endswith(b"\n"):
                log.warning("journal ends in a line that was torn: %s", path)
                break
            raise StoreError(
                f"journal cannot be read: {error}", next_step="restore it", path=str(path), line=number
            ) from error
    return entries


def _drop_torn(file: BinaryIO) -> None:
    """Take away a last line that was left without its end."""
    end = file.seek(0, os.SEEK_END)
    if end:
        file.seek(end - 1)
        if file.read(1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)


def _unwritten(error: OSError, path: Path) -> StoreError:
    return StoreError(
        f"journal cannot be written: {error.strerror}",
        next_step="nothing is decided until it can: check space and permissions of the store",
        path=str(path),
    )
