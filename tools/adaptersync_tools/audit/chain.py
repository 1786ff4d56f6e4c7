"""Whether the archive's files are those that its chain names: nothing changed, missing, added or cut out.

Links tell of the ends of the other tables' chains, too, and a file beside the tables of all, so that the end of one
cannot be cut off unseen. What cannot be read is a contradiction like others, and the rest is looked at. Whoever may
write the store can write all chains anew, so that they agree; that is found where a link's digest was noted elsewhere
(`noted`). Knows nothing of what is in the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from adaptersync_core.archive import Archive
from adaptersync_core.chain import CHAIN, ENDS, FILES, Beside, File, Link, content_of, listing, opened, read_ends
from adaptersync_core.errors import StoreError

DIGITS = 16  # of a digest, enough to tell links apart


class Ends:
    """What the links of each table say of the other tables' chains, held against these once all were read."""

    def __init__(self) -> None:
        self._read: list[tuple[Archive, dict[int, str]]] = []
        self._told: dict[str, dict[tuple[int, str], str]] = defaultdict(dict)  # by whom, by number and digest
        self.settled_ms: dict[str, int] = defaultdict(int)

    def read(self, archive: Archive, digests: dict[int, str]) -> None:
        """A chain that could be read to its end."""
        self._read.append((archive, digests))

    def beside(self, directory: Path) -> Iterator[str]:
        """What the file beside the tables tells."""
        try:
            for beside in read_ends(directory):
                self.take(ENDS, beside)
        except StoreError as error:
            yield str(error)

    def take(self, by: str, beside: Beside) -> None:
        self.settled_ms[beside.table] = max(self.settled_ms[beside.table], beside.settled_ms)
        if beside.number:
            self._told[beside.table].setdefault((beside.number, beside.sha256[:DIGITS]), by)

    def contradictions(self) -> Iterator[str]:
        """Of each table the first link that is another one, and the last that is cut off."""
        for archive, digests in self._read:
            table = archive.root.name
            for path in archive.places(max(digests, default=0)):  # a worker may have gone on meanwhile
                with contextlib.suppress(StoreError):  # that is told, or will be the next time
                    digests[int(path.name)] = archive.at(int(path.name)).sha256[:DIGITS]
            told, end = self._told[table], max(digests, default=0)
            last = max(told, default=(0, ""))
            if last[0] > end:
                what = f"the chain ends at {end}" if end else "the table is gone"
                yield f"{table}: {told[last]} tells of link {last[0]}, and {what}"
            for (number, digest), by in sorted(told.items()):
                if digests.get(number, digest) != digest:
                    yield f"{table}: link {number} is not the one that {by} tells of"
                    break


def contradictions(archive: Archive, noted: Mapping[int, str], ends: Ends) -> Iterator[str]:
    """One line each. `noted` are digests, or their heads, by number of the link."""
    name = archive.root.name
    digests: dict[int, str] = {}
    live: dict[str, File] = {}
    expected = 1
    previous: str | None = ""  # None: it cannot be known
    missing = dict(noted)
    unread = False
    try:
        yield from _no_directories(archive)
        for path in archive.places():
            number = int(path.name)
            if number != expected:
                which = f"link {expected}" if number == expected + 1 else f"links {expected} to {number - 1}"
                yield f"{name}: {which} of the chain missing"
                previous = None
            try:
                head = archive.at(number)
            except StoreError as error:
                yield f"{name}: {error}"
                missing.pop(number, None)
                expected, previous, unread = number + 1, None, True
                continue
            link = head.link
            if previous is not None and link.previous != previous:
                yield f"{name}: link {number} does not follow the one before, which was changed, or this one"
            if link.number != number:
                yield f"{name}: link {number} says that it is link {link.number}"
            if not head.sha256.startswith(missing.pop(number, "")):
                yield f"{name}: link {number} is not the one that was noted"
            for gone in link.replaces:
                if live.pop(gone, None) is None:
                    yield f"{name}: link {number} replaces {gone}, which is no file of the archive"
            for file in link.files:
                if file.path in live:
                    yield f"{name}: link {number} names {file.path} once more"
                live[file.path] = file
            if link.listed:
                yield from _listed(archive, link, path / FILES, live)
            for beside in link.beside:
                ends.take(f"table {name}", beside)
            digests[number] = head.sha256[:DIGITS]
            expected, previous = number + 1, head.sha256
        for number in sorted(missing):
            yield f"{name}: link {number} was noted, and the chain ends at {expected - 1}"
        ends.read(archive, digests)
        yield from files(archive, live, lenient=unread)
    except StoreError as error:
        yield f"{name}: {error}"


def _no_directories(archive: Archive) -> Iterator[str]:
    """What lies where the chain should go on, and hides what would be in it."""
    chain = archive.root / CHAIN
    for path in (chain, *(sorted(chain.glob("[0-9]*")) if chain.is_dir() else ())):
        if path.exists() and not path.is_dir() and path.suffix != ".noted":
            yield f"{archive.root.name}: {path.relative_to(archive.root)} is no directory"


def _listed(archive: Archive, link: Link, path: Path, live: Mapping[str, File]) -> Iterator[str]:
    expected = listing(live.values())
    if hashlib.sha256(expected).hexdigest() != link.listed:
        yield f"{archive.root.name}: link {link.number} lists other files than the links up to it"
    try:
        there = content_of(path)
    except OSError:
        there = b""
    if hashlib.sha256(there).hexdigest() != link.listed:
        yield f"{archive.root.name}: the list of files beside link {link.number} was changed"


def files(archive: Archive, live: Mapping[str, File], *, lenient: bool = False) -> Iterator[str]:
    """A worker may be at it: what is missed may be in a merged file by now, and what is new of a link that is."""
    name = archive.root.name
    missing, added = [], []
    for path, file in sorted(live.items()):
        try:
            digest = _sha256(archive, path)
        except FileNotFoundError:
            missing.append(file)
            continue
        except OSError as error:
            yield f"{name}: {path} cannot be read: {error.strerror}"
            continue
        if digest != file.sha256:
            yield f"{name}: {path} was changed"
    for directory, below, files in os.walk(archive.root):
        for each in sorted(below):
            if os.path.islink(path := os.path.join(directory, each)):  # who queries the files follows it
                yield f"{name}: {os.path.relpath(path, archive.root)} was added: it leads elsewhere"
        for each in sorted(files):
            path = os.path.relpath(os.path.join(directory, each), archive.root)
            if each.endswith(".parquet") and path not in live:
                added.append(path)
    if not missing and not added:
        return
    pending = archive.pending()  # first: what a note tells of no more, the chain does
    now = archive.files(lenient=lenient)
    for file in missing:
        if file.path in now:
            yield f"{name}: {file.path} is missing, with {file.rows} rows"
    for path in added:
        if path not in pending and path not in now and (archive.root / path).exists():
            yield f"{name}: {path} was added: no link of the chain names it"


def _sha256(archive: Archive, path: str) -> str:
    with opened(archive.root / path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
