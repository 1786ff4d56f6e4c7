"""What was decided, kept in the store, so that it outlives Redis.

A refusal is written before it is committed, everything else after it: whatever instant a machine dies at, a version
that was refused or voided never comes back, and one that was not promoted is never restored as if it had been. An
entry holds the whole table, so the last one is enough to go on from; earlier ones are kept for the fates of versions
that are gone. A last line that was torn by a crash is as if it had not been written.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from adaptersync_core.errors import StoreError
from adaptersync_core.records import Decision, RunRecord, VersionRecord
from adaptersync_core.store import DIRECTORY_MODE, sync_directory, write_durably
from adaptersync_core.table import Table

REFUSALS = frozenset({"rolled_back", "voided", "superseded"})
ENTRIES = 20_000  # lines before the file is begun anew with one that holds everything
FATES = 10_000  # versions whose fate is kept, the latest

log = logging.getLogger(__name__)


class Entry(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line. Without a table it only says which versions were about to be refused."""

    fates: dict[str, VersionRecord] = {}
    table: Table | None = None
    runs: dict[str, RunRecord] = {}


class Recollection(Struct, frozen=True, kw_only=True):
    """What the journal knows: the last table, the fates of versions that are gone, the highest numbers of each run."""

    table: Table = Table()
    fates: dict[str, VersionRecord] = {}
    runs: dict[str, RunRecord] = {}


def recollected_table(known: Recollection) -> Table:
    """The last table, without what was about to be refused when the writer died."""
    table = known.table
    versions, runs = dict(table.versions), dict(table.runs)
    for name, version in table.versions.items():
        record = known.fates.get(name)
        if record is None or version.state == "retiring":
            continue
        versions[name] = replace(
            version, state="retiring", drained=version.state in ("staging", "ready"), fate=record.state
        )
        entry = runs[version.run]
        if entry.current == name:
            left = replace(table, versions=versions).window(version.run)
            runs[version.run] = replace(entry, current=left[0] if left else None)
            if left:
                versions[left[0]] = replace(versions[left[0]], state="current")
    return replace(table, versions=versions, runs=runs)


class Journal:
    """One group's journal. Blocking: call it in a thread."""

    def __init__(self, store: Path, group: str) -> None:
        self._path = store / ".coordinator" / f"{group}.jsonl"
        self._lines = 0

    def recall(self) -> Recollection:
        """Read everything; an empty recollection when nothing was ever written."""
        table, fates, runs = Table(), dict[str, VersionRecord](), dict[str, RunRecord]()
        try:
            lines = self._path.read_bytes().splitlines()
        except FileNotFoundError:
            lines = []
        except OSError as error:
            raise StoreError(f"journal cannot be read: {error.strerror}", path=str(self._path)) from error
        for number, line in enumerate(lines, 1):
            try:
                entry = msgspec.json.decode(line, type=Entry)
            except msgspec.MsgspecError as error:
                if number == len(lines):
                    log.warning("journal ends in a line that was torn: %s", self._path)
                    break
                raise StoreError(
                    f"journal cannot be read: {error}", next_step="restore it", path=str(self._path), line=number
                ) from error
            table = entry.table or table
            runs |= entry.runs
            for name, record in entry.fates.items():
                fates.pop(name, None)
                fates[name] = record
        self._lines = len(lines)
        latest = dict(list(fates.items())[-FATES:])
        return Recollection(table=table, fates=latest, runs=runs)

    def before(self, decision: Decision) -> None:
        """Write refusals down before they are committed."""
        refused = {name: record for name, record in decision.records.items() if record.state in REFUSALS}
        if refused:
            self._append(Entry(fates=refused))

    def after(self, decision: Decision, runs: dict[str, RunRecord]) -> None:
        """Write down what was committed, and begin the file anew when it has grown long."""
        gone = {name: record for name, record in decision.records.items() if name not in decision.table.versions}
        self._append(Entry(fates=gone, table=decision.table, runs=runs))
        if self._lines > ENTRIES:
            known = self.recall()
            whole = Entry(fates=known.fates, table=known.table, runs=known.runs)
            fresh = self._path.with_suffix(".new")
            write_durably(fresh, msgspec.json.encode(whole) + b"\n")
            fresh.rename(self._path)
            sync_directory(self._path.parent)
            self._lines = 1

    def _append(self, entry: Entry) -> None:
        try:
            if not self._path.parent.is_dir():
                self._path.parent.mkdir(parents=True)
                self._path.parent.chmod(DIRECTORY_MODE)
            with self._path.open("a+b") as file:
                self._drop_torn(file)
                file.write(msgspec.json.encode(entry) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StoreError(
                f"journal cannot be written: {error.strerror}",
                next_step="nothing is decided until it can: check space and permissions of the store",
                path=str(self._path),
            ) from error
        self._lines += 1

    @staticmethod
    def _drop_torn(file: BinaryIO) -> None:
        """Take away a last line that a crash left without its end."""
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            if file.read(1) != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
