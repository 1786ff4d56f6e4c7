"""The chain of a ledger's table: which files the table consists of, and who came after whom.

    {table}/.chain/{thousands}/{number}/link.json
    {table}/.chain/{thousands}/{number}/files.json    in the first of each thousand: all files of the table by then
    .ends.json                                        beside the tables: where each chain ended after the last drain

A link names the files of a batch with their digests, the digest of the link before, and where the chains of the other
tables ended: an end that was cut off is missed there, and that of the table that comes last in `.ends.json`. A link is
a directory that is renamed into place, which the second of two that write at once cannot. What is in the files it does
not know. A path is believed only where it cannot lead out of the table: whoever may write the store may write a link.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from adaptersync_core.errors import StoreError
from adaptersync_core.store import make_directory, sync_directory, write_durably

CHAIN = ".chain"
LINK = "link.json"
FILES = "files.json"
ENDS = ".ends.json"
SHARD = 1000  # links in one directory, and from one list of all files to the next
FIRST = "0-0"  # before every entry of a stream
ROW_LATE_S = 120.0  # how long a row may be on its way to Redis while others are written

_ENTRY = "[0-9]{1,20}-[0-9]{1,20}"
EntryId = Annotated[str, Meta(pattern=rf"\A{_ENTRY}\Z")]
FilePath = Annotated[
    str,
    Meta(pattern=rf"\Arun=[^/\x00]+/day=[0-9-]+/{_ENTRY}_{_ENTRY}[^/\x00]*\.parquet\Z", max_length=1000),
]

log = logging.getLogger(__name__)


class File(Struct, frozen=True, kw_only=True):
    """`path` is below the table's directory, with "/"."""

    path: FilePath
    sha256: str
    rows: int


class Beside(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where another table's chain ended, `number` 0 where there was none; with the highest entry it had.

    Up to `until`, in milliseconds of the server's clock, it held all of its stream; 0 where that is not known.
    """

    table: str
    number: int = 0
    sha256: str = ""
    highest: EntryId = FIRST
    until: int = 0

    @property
    def settled_ms(self) -> int:
        """Up to when there is nothing more to come, but for what is late."""
        return max(self.until, place(self.highest)[0])


class Link(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A batch, or files that were made one: `replaces` are then the paths whose rows are in `files` now.

    `previous` is the SHA-256 of the link before, as it is written. `cursor` is where to read on in the stream of that
    `incarnation`, `highest` the highest entry that was ever archived; a stream that was set back has read on below it.
    `clipped` is of a first link: the stream had had entries before, which nobody archived. `merged`: of the days before
    that one, files were made one where that was possible. `listed` is the SHA-256 of the list of all files beside it.
    What is up to `cursor` had been written by `read_at`, in milliseconds of the server's clock; 0: that is not known.
    """

    number: int
    previous: str = ""
    first: str = ""
    last: str = ""
    entries: int = 0
    cursor: EntryId = FIRST
    highest: EntryId = FIRST
    incarnation: str = ""
    clipped: bool = False
    merged: str = ""
    files: tuple[File, ...] = ()
    replaces: tuple[FilePath, ...] = ()
    beside: tuple[Beside, ...] = ()
    listed: str = ""
    read_at: int = 0


class Head(Struct, frozen=True, kw_only=True):
    """The last link, and the digest of its text."""

    link: Link
    sha256: str


def place(entry: str) -> tuple[int, int]:
    """Where an entry stands in its stream."""
    milliseconds, _, number = entry.partition("-")
    return int(milliseconds), int(number or 0)


def listing(files: Iterable[File]) -> bytes:
    """The list of all files, as it is written."""
    return msgspec.json.encode(sorted(files, key=lambda file: file.path))


class Chain:
    """One table's. Blocking: call it in a thread."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._chain = root / CHAIN

    def head(self) -> Head | None:
        """The last link; None where nothing was archived."""
        for shard in _numbered(self._chain)[::-1]:
            for path in _numbered(shard)[::-1]:
                return _read(path / LINK)
        return None

    def link(self, number: int) -> Link:
        """StoreError where there is no such."""
        return self.at(number).link

    def at(self, number: int) -> Head:
        """The same, with the digest of its text."""
        return _read(self._place(number) / LINK)

    def links(self, after: int = 0) -> Iterator[tuple[Path, Head]]:
        """All of it in order, as it is: what is wrong with it is for the reader to say."""
        for path in self.places(after):
            yield path, _read(path / LINK)

    def places(self, after: int = 0) -> Iterator[Path]:
        """Where they lie, whatever does."""
        for shard in _numbered(self._chain):
            if int(shard.name) >= after // SHARD:
                yield from (path for path in _numbered(shard) if int(path.name) > after)

    def files(self, *, lenient: bool = False) -> dict[str, File]:
        """What the table consists of, by path: the last list of it, and the links since; `lenient`: as far as known."""
        number, files = self._listed()
        for path in self.places(number):
            with contextlib.suppress(*([StoreError] if lenient else [])):
                _take(files, _read(path / LINK).link)
        return files

    def append(self, link: Link) -> Head | None:
        """Add a link; None when another was there first."""
        lists = None
        if link.number % SHARD == 0:
            with contextlib.suppress(StoreError):  # told by whoever needs it: what comes is archived all the same
                lists = self._list_with(link)
                link = msgspec.structs.replace(link, listed=hashlib.sha256(lists).hexdigest())
        text = msgspec.json.encode(link)
        target = self._place(link.number)
        make_directory(target.parent)
        making = target.parent / f".making-{secrets.token_hex(4)}"
        try:
            make_directory(making)
            if lists is not None:
                write_durably(making / FILES, lists)
            write_durably(making / LINK, text)
            sync_directory(making)
            making.rename(target)
            sync_directory(target.parent)
        except OSError as error:
            if target.exists():
                return None
            raise unwritten(error, target) from error
        finally:
            shutil.rmtree(making, ignore_errors=True)
        return Head(link=link, sha256=hashlib.sha256(text).hexdigest())

    def _list_with(self, link: Link) -> bytes:
        files = self.files()
        _take(files, link)
        return listing(files.values())

    def _listed(self) -> tuple[int, dict[str, File]]:
        """The last list that is what its link says, and the number of that link."""
        for shard in _numbered(self._chain)[::-1]:
            number = int(shard.name) * SHARD
            try:
                text = content_of(self._place(number) / FILES)
                if hashlib.sha256(text).hexdigest() == self.link(number).listed:
                    return number, {file.path: file for file in msgspec.json.decode(text, type=list[File])}
                log.warning("list of the ledger's files was changed, an earlier one counts: %s", self._place(number))
            except FileNotFoundError:
                continue
            except (OSError, StoreError, msgspec.MsgspecError) as error:
                log.warning("list of the ledger's files cannot be read, an earlier one counts: %s", error)
        return 0, {}

    def _place(self, number: int) -> Path:
        return self._chain / f"{number // SHARD:06d}" / f"{number:09d}"


def put(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all."""
    half = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        write_durably(half, content)
        os.replace(half, path)
    finally:
        half.unlink(missing_ok=True)
    sync_directory(path.parent)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """For reading; OSError where it is none of the plain files that the archive consists of: a pipe keeps no reader."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "no plain file", str(path))
        yield file


def content_of(path: Path) -> bytes:
    with opened(path) as file:
        return file.read()


def read_ends(directory: Path) -> tuple[Beside, ...]:
    """What is told beside the tables of where their chains ended; StoreError where it cannot be read."""
    try:
        return msgspec.json.decode(content_of(directory / ENDS), type=tuple[Beside, ...])
    except FileNotFoundError:
        return ()
    except (OSError, msgspec.MsgspecError) as error:
        raise StoreError(f"file that tells where the chains end cannot be read: {error}", path=ENDS) from error


def write_ends(directory: Path, chains: Mapping[str, Chain]) -> None:
    """Where they end now. What was told and is so no more stays told, for `adaptersync audit verify`."""
    try:
        before = read_ends(directory)
    except StoreError as error:
        log.error("it is written anew: %s", error)
        before = ()
    told = {each.table: each for each in before}
    ends = {name: ended(name, chain.head()) for name, chain in chains.items()}
    now = tuple(ends[name] if _holds(chain, told.get(name)) else told[name] for name, chain in chains.items())
    if now != before and any(each.number for each in now):
        path = directory / ENDS
        try:
            put(path, msgspec.json.encode(now))
        except OSError as error:
            raise unwritten(error, path) from error


def ended(table: str, head: Head | None, until: int = 0) -> Beside:
    """As a chain tells it of another, which ended so."""
    if head is None:
        return Beside(table=table, until=until)
    link = head.link
    return Beside(table=table, number=link.number, sha256=head.sha256, highest=link.highest, until=until)


def _holds(chain: Chain, told: Beside | None) -> bool:
    if told is None or not told.number:
        return True
    try:
        return chain.at(told.number).sha256 == told.sha256
    except StoreError:
        return False


def unwritten(error: OSError, path: Path) -> StoreError:
    return StoreError(
        f"ledger cannot be archived: {error.strerror or error}",
        next_step="check space and permissions of the store; nothing is trimmed before it is archived",
        path=str(path),
    )


def _take(files: dict[str, File], link: Link) -> None:
    for path in link.replaces:
        files.pop(path, None)
    files.update((file.path, file) for file in link.files)


def _numbered(directory: Path) -> list[Path]:
    try:
        paths = [path for path in directory.iterdir() if path.name.isascii() and path.name.isdigit()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StoreError(f"ledger's chain cannot be read: {error.strerror}", path=str(directory)) from error
    return sorted(paths, key=lambda path: int(path.name))


def _read(path: Path) -> Head:
    try:
        text = content_of(path)
        return Head(link=msgspec.json.decode(text, type=Link), sha256=hashlib.sha256(text).hexdigest())
    except (OSError, msgspec.MsgspecError) as error:
        raise StoreError(f"link of the ledger's chain cannot be read: {error}", path=str(path)) from error
