"""The ledger's archive in the store: what a stream held, as Parquet files and a chain of who came after whom.

    {store}/.ledger/{group}/{table}/run={run}/day={YYYY-MM-DD}/{first entry}_{last entry}.parquet
    {store}/.ledger/{group}/{table}/.chain/{thousands}/{number}/link.json

A batch of entries becomes a file for each run and day in it, named by the first and last entry of the batch: the same
batch again is the same files. Its link in the chain names them with their digests, and the digest of the link before.
A link is a directory that is renamed into place, which the second of two that write at once cannot: a file that no
link names is not of the archive. What is about to be written is noted first, so that whoever comes after a death
removes what it left. Knows how tables look, and nothing of Redis. Needs pyarrow, the extra `ledger`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from adaptersync_core.archived import TABLES, Record
from adaptersync_core.errors import ConfigError, NameInvalid, StoreError
from adaptersync_core.identity import check_name
from adaptersync_core.store import make_directory, sync_directory, write_durably

NO_RUN = "__HIVE_DEFAULT_PARTITION__"  # what readers of partitions take for none
CHAIN = ".chain"
LINK = "link.json"
SHARD = 1000  # links in one directory
FIRST = "0-0"  # before every entry of a stream


class File(Struct, frozen=True, kw_only=True):
    """`path` is below the table's directory, with "/"."""

    path: str
    sha256: str
    rows: int


class Link(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A batch, or files that were made one: `replaces` are then the paths whose rows are in `files` now.

    `previous` is the SHA-256 of the link before, as it is written. `cursor` is where to read on in the stream of that
    `incarnation`, `highest` the highest entry that was ever archived; a stream that was set back has read on below it.
    """

    number: int
    previous: str = ""
    first: str = ""
    last: str = ""
    entries: int = 0
    cursor: str = FIRST
    highest: str = FIRST
    incarnation: str = ""
    files: tuple[File, ...] = ()
    replaces: tuple[str, ...] = ()


class Noted(Struct, frozen=True, kw_only=True):
    """What is being written for a link that is not there yet."""

    number: int
    paths: tuple[str, ...]


class Head(Struct, frozen=True, kw_only=True):
    """The last link, and the digest of its text."""

    link: Link
    sha256: str


def place(entry: str) -> tuple[int, int]:
    """Where an entry stands in its stream."""
    milliseconds, _, number = entry.partition("-")
    return int(milliseconds), int(number or 0)


def span(path: str) -> tuple[str, str]:
    """The first and last entry of the batches that a file is of."""
    first, last = Path(path).stem.split("_")[:2]
    return first, last


def day(entry: str) -> str:
    """Of the server's clock, UTC."""
    return datetime.fromtimestamp(place(entry)[0] / 1000, tz=UTC).strftime("%Y-%m-%d")


def installed() -> bool:
    return importlib.util.find_spec("pyarrow") is not None


def require() -> None:
    """ConfigError without pyarrow."""
    if not installed():
        raise ConfigError("the ledger's archive needs pyarrow", next_step="pip install 'adaptersync[ledger]'")


class Archive:
    """One table of one group. Blocking: call it in a thread."""

    def __init__(self, store: Path, group: str, table: str) -> None:
        require()
        self.table = TABLES[table]
        self.root = store / ".ledger" / check_name("group", group) / table
        self._chain = self.root / CHAIN

    # the chain

    def head(self) -> Head | None:
        """The last link; None where nothing was archived."""
        for shard in _numbered(self._chain)[::-1]:
            for path in _numbered(shard)[::-1]:
                return _read(path / LINK)
        return None

    def links(self) -> Iterator[tuple[Path, Head]]:
        """All of it in order, as it is: what is wrong with it is for the reader to say."""
        for shard in _numbered(self._chain):
            for path in _numbered(shard):
                yield path, _read(path / LINK)

    def files(self) -> dict[str, File]:
        """What the archive consists of, by path."""
        found: dict[str, File] = {}
        for _, head in self.links():
            for path in head.link.replaces:
                found.pop(path, None)
            found.update((file.path, file) for file in head.link.files)
        return found

    def append(self, link: Link) -> bool:
        """Add a link; False when another was there first."""
        target = self._chain / f"{link.number // SHARD:06d}" / f"{link.number:09d}"
        make_directory(target.parent)
        making = target.parent / f".making-{secrets.token_hex(4)}"
        try:
            make_directory(making)
            write_durably(making / LINK, msgspec.json.encode(link))
            sync_directory(making)
            making.rename(target)
            sync_directory(target.parent)
        except OSError as error:
            if target.exists():
                return False
            raise _unwritten(error, target) from error
        finally:
            shutil.rmtree(making, ignore_errors=True)
        return True

    # its files

    def write(self, records: Sequence[Record], head: Head | None, **more: Any) -> Head | None:
        """Archive a batch, whole or not at all; None when another was faster, whose work it then is.

        `more` are the link's `cursor` and `incarnation`. The batch is told by its first and last record, and may be
        empty.
        """
        number = head.link.number + 1 if head else 1
        first, last = (records[0].entry, records[-1].entry) if records else ("", "")
        contents = {
            f"run={run}/day={of}/{first}_{last}.parquet": part for (run, of), part in sorted(_parts(records).items())
        }
        with self._noted(number, contents):
            files = tuple(self._put(path, part) for path, part in contents.items())
            link = Link(
                number=number,
                previous=head.sha256 if head else "",
                first=first,
                last=last,
                entries=len({record.entry for record in records}),
                highest=max(head.link.highest if head else FIRST, last or FIRST, key=place),
                files=files,
                **more,
            )
            return Head(link=link, sha256=_digest(link)) if self.append(link) else None

    def merge(self, paths: Sequence[str], head: Head) -> Head | None:
        """Make one file of several of one run and day; what they held is in it, in the order of the paths.

        StoreError where one is not what its link says; None when another was faster.
        """
        import pyarrow as pa

        files = self.files()

        first, last = span(paths[0])[0], span(paths[-1])[1]
        target = f"{Path(paths[0]).parent.as_posix()}/{first}_{last}_{len(paths)}.parquet"
        with self._noted(head.link.number + 1, (target,)):
            parts = [self.checked(files[path]) for path in paths]
            file = self._store(target, pa.concat_tables(parts, promote_options="default"))  # columns come with releases
            link = msgspec.structs.replace(
                head.link,
                number=head.link.number + 1,
                previous=head.sha256,
                first="",
                last="",
                entries=0,
                files=(file,),
                replaces=tuple(paths),
            )
            if not self.append(link):
                return None
        self.tidy()
        return Head(link=link, sha256=_digest(link))

    def read(self, path: str, columns: Sequence[str] | None = None) -> Any:
        """One file as a pyarrow table."""
        import pyarrow.parquet as pq

        with pq.ParquetFile(self.root / path) as file:
            return file.read(columns=columns)

    def tables(
        self, below: str | tuple[str, ...], columns: Sequence[str] | None = None, *, lenient: bool = False
    ) -> Iterator[Any]:
        """All files whose paths begin so, checked; `lenient`: without those that are not what was archived."""
        for path, file in self.files().items():
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
            content = (self.root / file.path).read_bytes()
        except OSError as error:
            raise StoreError(f"file of the ledger cannot be read: {error.strerror}", path=file.path) from error
        if hashlib.sha256(content).hexdigest() != file.sha256:
            raise StoreError("file of the ledger is not what was archived", path=file.path)
        return pq.read_table(pa.BufferReader(content), columns=columns)

    def known(self, first: str, last: str) -> dict[str, list[dict[str, Any]]]:
        """What was archived of entries between these, by entry. Reads the whole chain: for a stream that was set back.

        A merged file counts from the first entry to the last of all that is in it.
        """
        low, high = place(first), place(last)
        found: dict[str, list[dict[str, Any]]] = {}
        for path in self.files():
            begin, end = span(path)
            if place(end) < low or place(begin) > high:
                continue
            for row in self.read(path).to_pylist():
                if low <= place(row["entry"]) <= high:
                    found.setdefault(row["entry"], []).append(row)
        return found

    def tidy(self) -> None:
        """Remove what a death left: files that were noted and belong to no link, files that were replaced."""
        head = self.head()
        number = head.link.number if head else 0
        for path in head.link.replaces if head else ():
            (self.root / path).unlink(missing_ok=True)
        for note in sorted(self._chain.glob("*.noted")):
            noted = msgspec.json.decode(note.read_bytes(), type=Noted)
            if noted.number <= number:  # what is not there yet may be somebody's who is at it
                self._discard(noted)
                note.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _noted(self, number: int, paths: Collection[str]) -> Iterator[None]:
        """Around the writing of files for a link: what does not become part of it is removed, now or by `tidy`."""
        noted = Noted(number=number, paths=tuple(paths))
        text = msgspec.json.encode(noted)
        note = self._chain / f"{number:09d}-{hashlib.sha256(text).hexdigest()[:12]}.noted"
        try:
            make_directory(self._chain)
            _place(note, text)
            yield
            self._discard(noted)
            note.unlink(missing_ok=True)
        except OSError as error:
            raise _unwritten(error, self.root) from error

    def _discard(self, noted: Noted) -> None:
        link = _read(_link_path(self._chain, noted.number)).link
        for path in set(noted.paths) - {file.path for file in link.files}:
            (self.root / path).unlink(missing_ok=True)

    def _put(self, path: str, records: Sequence[Record]) -> File:
        import pyarrow as pa

        rows = [record.values for record in records]
        return self._store(path, pa.Table.from_pylist(rows, schema=schema(self.table.columns)))

    def _store(self, path: str, table: Any) -> File:
        import pyarrow as pa
        import pyarrow.parquet as pq

        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        content = sink.getvalue().to_pybytes()
        target = self.root / path
        make_directory(target.parent)
        _place(target, content)
        return File(path=path, sha256=hashlib.sha256(content).hexdigest(), rows=table.num_rows)


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


def _place(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all."""
    half = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        write_durably(half, content)
        os.replace(half, path)
    finally:
        half.unlink(missing_ok=True)
    sync_directory(path.parent)


def _numbered(directory: Path) -> list[Path]:
    try:
        return sorted((path for path in directory.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    except FileNotFoundError:
        return []


def _link_path(chain: Path, number: int) -> Path:
    return chain / f"{number // SHARD:06d}" / f"{number:09d}" / LINK


def _read(path: Path) -> Head:
    try:
        text = path.read_bytes()
        return Head(link=msgspec.json.decode(text, type=Link), sha256=hashlib.sha256(text).hexdigest())
    except (OSError, msgspec.MsgspecError) as error:
        raise StoreError(f"link of the ledger's chain cannot be read: {error}", path=str(path)) from error


def _digest(link: Link) -> str:
    return hashlib.sha256(msgspec.json.encode(link)).hexdigest()


def _unwritten(error: OSError, path: Path) -> StoreError:
    return StoreError(
        f"ledger cannot be archived: {error.strerror or error}",
        next_step="check space and permissions of the store; nothing is trimmed before it is archived",
        path=str(path),
    )
