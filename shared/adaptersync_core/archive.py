"""The ledger's archive in the store: what a stream held, as Parquet files, and the chain that names them.

    {store}/.ledger/{group}/{table}/run={run}/day={YYYY-MM-DD}/{first entry}_{last entry}_{number}_{digest}.parquet

A batch of entries becomes a file for each run and day in it, or several of those become one. A file is of the link
whose number its name has, and of no other: what that link does not name is not of the archive, whoever wrote it and
however late, and its name has the head of its own digest, so that nobody writes over what another wrote. What is about
to be written is noted first, so that whoever comes after a death removes what it left. Knows how tables look, and
nothing of Redis. Needs pyarrow, the extra `ledger`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from adaptersync_core.archived import TABLES, Record
from adaptersync_core.chain import FIRST, Chain, File, FilePath, Head, Link, content_of, place, put, unwritten
from adaptersync_core.entries import moment, written_ms
from adaptersync_core.errors import ConfigError, NameInvalid, StoreError
from adaptersync_core.identity import check_name
from adaptersync_core.store import ARCHIVE, make_directory

HALF_S = 86_400.0  # nobody writes at one file for so long
_HALF = re.compile(r"\..+\.(parquet|noted)\.[0-9a-f]{8}|\.making-[0-9a-f]{8}")
NO_RUN = "__HIVE_DEFAULT_PARTITION__"  # what readers of partitions take for none

log = logging.getLogger(__name__)


class Noted(Struct, frozen=True, kw_only=True):
    """What is being written for a link that is not there yet."""

    number: Annotated[int, Meta(ge=1)]
    paths: tuple[FilePath, ...]


def _own(noted: Noted) -> set[str]:
    return {path for path in noted.paths if link_of(path) == noted.number}


def span(path: str) -> tuple[str, str]:
    """The first and last entry of the batches that a file is of."""
    first, last = Path(path).stem.split("_")[:2]
    return first, last


def link_of(path: str) -> int:
    """The number of the link that a file is of; 0 where its name has none."""
    parts = Path(path).stem.split("_")
    return int(parts[2]) if len(parts) == 4 and parts[2].isdecimal() else 0


def day(entry: str) -> str:
    """Of the server's clock, UTC."""
    return moment(written_ms(entry) / 1000).strftime("%Y-%m-%d")


def installed() -> bool:
    return importlib.util.find_spec("pyarrow") is not None


def require() -> None:
    """ConfigError without pyarrow."""
    if not installed():
        raise ConfigError(
            "the ledger's archive needs pyarrow",
            next_step="pip install 'adaptersync[ledger]', or leave it in Redis with jobs.ledger_s = 0",
        )


class Archive(Chain):
    """One table of one group. Blocking: call it in a thread."""

    def __init__(self, store: Path, group: str, table: str) -> None:
        require()
        super().__init__(store / ARCHIVE / check_name("group", group) / table)
        self.table = TABLES[table]

    def write(self, records: Sequence[Record], head: Head | None, **more: Any) -> Head | None:
        """Archive a batch, whole or not at all; None when another was faster, whose work it then is.

        `more` are of the link. The batch is told by its first and last record, and may be empty.
        """
        first, last = (records[0].entry, records[-1].entry) if records else ("", "")
        link = Link(
            number=head.link.number + 1 if head else 1,
            previous=head.sha256 if head else "",
            first=first,
            last=last,
            entries=len({record.entry for record in records}),
            highest=max(head.link.highest if head else FIRST, last or FIRST, key=place),
            **({"merged": head.link.merged if head else day(first or FIRST)} | more),
        )
        parts = {f"run={run}/day={of}": self._of_records(part) for (run, of), part in sorted(_parts(records).items())}
        return self._add(link, first, last, parts)

    def merge(self, files: Sequence[File], tables: Sequence[Any], head: Head) -> Head | None:
        """Make one file of several of one run and day, that hold these; what they held is in it, in their order.

        None when another was faster. What `files` are was read when the chain ended at `head`, or later.
        """
        import pyarrow as pa

        spans = [span(file.path) for file in files]
        first, last = min((each[0] for each in spans), key=place), max((each[1] for each in spans), key=place)
        link = msgspec.structs.replace(
            head.link,
            number=head.link.number + 1,
            previous=head.sha256,
            first="",
            last="",
            entries=0,
            clipped=False,
            files=(),
            replaces=tuple(file.path for file in files),
            listed="",
        )
        table = pa.concat_tables(tables, promote_options="default")  # columns come with releases
        return self._add(link, first, last, {Path(files[0].path).parent.as_posix(): table})

    def tables(
        self, below: str | tuple[str, ...], columns: Sequence[str] | None = None, *, lenient: bool = False
    ) -> Iterator[Any]:
        """All files whose paths begin so, checked; `lenient`: as far as they are known and what was archived."""
        for path, file in self.files(lenient=lenient).items():
            if path.startswith(below):
                try:
                    table = self.checked(file, columns)
                except StoreError:
                    if not lenient:
                        raise
                    continue
                yield table

    def checked(self, file: File, columns: Sequence[str] | None = None) -> Any:
        """The same; StoreError where it is not what its link says."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            content = content_of(self.root / file.path)
        except OSError as error:
            raise StoreError(f"file of the ledger cannot be read: {error.strerror}", path=file.path) from error
        if hashlib.sha256(content).hexdigest() != file.sha256:
            raise StoreError("file of the ledger is not what was archived", path=file.path)
        try:
            return pq.read_table(pa.BufferReader(content), columns=columns)
        except (OSError, pa.ArrowException) as error:
            raise StoreError(f"file of the ledger cannot be read: {error}", path=file.path) from error

    def known(self, first: str, last: str, damaged: Callable[[StoreError], object]) -> dict[str, list[dict[str, Any]]]:
        """What was archived of entries between these, by entry. Reads the whole chain: for a stream that was set back.

        A merged file counts from the first entry to the last of all that is in it. Of what is `damaged` nothing is
        known: better that an entry is archived twice than never.
        """
        low, high = place(first), place(last)
        found: dict[str, list[dict[str, Any]]] = {}
        for path, file in self.files().items():
            begin, end = span(path)
            if place(end) < low or place(begin) > high:
                continue
            try:
                rows = self.checked(file).to_pylist()
            except StoreError as error:
                damaged(error)
                continue
            for row in rows:
                if low <= place(row["entry"]) <= high:
                    found.setdefault(row["entry"], []).append(row)
        return found

    def tidy(self) -> None:
        """Remove what a death left: files that were noted and belong to no link, files that were replaced."""
        head = self.head()
        number = head.link.number if head else 0
        for note, noted in self._notes():
            if noted.number > number:
                continue  # what is not there yet may be somebody's who is at it
            try:
                self._discard(noted)
                note.unlink(missing_ok=True)
            except (OSError, StoreError) as error:
                log.error("what a death left stays: %s: %s", note, error)

    def sweep(self) -> None:
        """Remove what was half written by who died: nobody reads it, and no note names it. Looks at all there is."""
        for directory, below, names in os.walk(self.root):
            for path in [Path(directory, name) for name in (*below, *names) if _HALF.fullmatch(name)]:
                with contextlib.suppress(OSError):  # another is at it, too
                    there = path.lstat()
                    if time.time() - there.st_mtime < HALF_S:
                        continue
                    if stat.S_ISDIR(there.st_mode):
                        shutil.rmtree(path)
                    else:
                        path.unlink()

    def pending(self) -> set[str]:
        """Files that somebody writes, or left as he died: `tidy` removes what becomes of no link.

        A note of a link beyond the next one is not believed: `tidy` would not come to it, and the file might stay.
        """
        notes = [noted for _, noted in self._notes()]
        head = self.head()  # later than the notes: who wrote one had read the link before
        number = head.link.number if head else 0
        found: set[str] = set()
        for noted in notes:
            if noted.number == number + 1:
                found.update(_own(noted))
            elif noted.number <= number:
                with contextlib.suppress(StoreError):  # its link is gone
                    found.update(self._left(noted))
        return found

    def _notes(self) -> Iterator[tuple[Path, Noted]]:
        """Those that can be read; another keeps nobody from archiving, and hides no file."""
        for note in sorted(self._chain.glob("*.noted")):
            try:
                noted = msgspec.json.decode(content_of(note), type=Noted)
            except FileNotFoundError:
                continue  # another tidies, too
            except (OSError, msgspec.MsgspecError) as error:
                log.error("note of the ledger cannot be read, and does not count: %s: %s", note, error)
                continue
            yield note, noted

    def _add(self, link: Link, first: str, last: str, parts: Mapping[str, Any]) -> Head | None:
        """Write a table a directory, and the link that names them."""
        contents: dict[str, bytes] = {}
        files = []
        for directory, table in parts.items():
            content = _encoded(table)
            digest = hashlib.sha256(content).hexdigest()
            path = f"{directory}/{first}_{last}_{link.number}_{digest[:12]}.parquet"
            contents[path] = content
            files.append(File(path=path, sha256=digest, rows=table.num_rows))
        with self._noted(link.number, contents):
            for path, content in contents.items():
                make_directory((self.root / path).parent)
                put(self.root / path, content)
            return self.append(msgspec.structs.replace(link, files=tuple(files)))

    @contextlib.contextmanager
    def _noted(self, number: int, paths: Collection[str]) -> Iterator[None]:
        """Around the writing of files for a link: what does not become part of it is removed, now or by `tidy`.

        So are those that the link replaces.
        """
        noted = Noted(number=number, paths=tuple(paths))
        text = msgspec.json.encode(noted)
        note = self._chain / f"{number:09d}-{hashlib.sha256(text).hexdigest()[:12]}.noted"
        try:
            make_directory(self._chain)
            put(note, text)
            yield
            self._discard(noted)
            note.unlink(missing_ok=True)
        except OSError as error:
            raise unwritten(error, self.root) from error

    def _discard(self, noted: Noted) -> None:
        for path in self._left(noted):
            (self.root / path).unlink(missing_ok=True)

    def _left(self, noted: Noted) -> set[str]:
        """What was written for a link that is there and did not become part of it, and what that one replaced."""
        link = self.link(noted.number)
        return _own(noted) - {file.path for file in link.files} | set(link.replaces)

    def _of_records(self, records: Sequence[Record]) -> Any:
        import pyarrow as pa

        return pa.Table.from_pylist([record.values for record in records], schema=schema(self.table.columns))


def _encoded(table: Any) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return bytes(sink.getvalue().to_pybytes())


def schema(columns: Mapping[str, str]) -> Any:
    """pyarrow's schema for columns by name and kind."""
    import pyarrow as pa

    kinds = {
        "text": pa.string(),
        "int": pa.int64(),
        "float": pa.float64(),
        "bool": pa.bool_(),
        "time": pa.timestamp("ms", tz="UTC"),
    }
    return pa.schema([(name, kinds[kind]) for name, kind in columns.items()])


def partition(run: str) -> str:
    """What stands for a run in a path; what cannot name one, as a stranger's entry may have it, is none."""
    try:
        return check_name("run", run) if run else NO_RUN
    except NameInvalid:
        return NO_RUN


def _parts(records: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    parts: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        parts.setdefault((partition(record.run), day(record.entry)), []).append(record)
    return parts
