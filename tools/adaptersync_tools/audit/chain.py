"""Whether the archive's files are those that its chain names: nothing changed, missing, added or cut out.

Whoever may write the store can write a chain anew that agrees with itself; that is found where a link's digest was
noted elsewhere (`noted`). Knows nothing of what is in the files.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping

from adaptersync_core.archive import Archive, File
from adaptersync_core.errors import StoreError


def contradictions(archive: Archive, noted: Mapping[int, str]) -> Iterator[str]:
    """One line each. `noted` are digests, or their heads, by number of the link."""
    name = archive.root.name
    live: dict[str, File] = {}
    expected, previous = 1, ""
    missing = dict(noted)
    try:
        for path, head in archive.links():
            link = head.link
            number = int(path.name)
            if number != expected:
                which = f"link {expected}" if number == expected + 1 else f"links {expected} to {number - 1}"
                yield f"{name}: {which} of the chain missing"
            elif link.previous != previous:
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
            expected, previous = number + 1, head.sha256
    except StoreError as error:
        yield f"{name}: {error}"
        return
    for number in sorted(missing):
        yield f"{name}: link {number} was noted, and the chain ends at {expected - 1}"
    yield from _files(archive, live)


def _files(archive: Archive, live: Mapping[str, File]) -> Iterator[str]:
    name = archive.root.name
    for path, file in sorted(live.items()):
        try:
            digest = _sha256(archive, path)
        except FileNotFoundError:
            yield f"{name}: {path} is missing, with {file.rows} rows"
            continue
        if digest != file.sha256:
            yield f"{name}: {path} was changed"
    for directory, _, files in os.walk(archive.root):
        for each in sorted(files):
            path = os.path.relpath(os.path.join(directory, each), archive.root)
            if each.endswith(".parquet") and not each.startswith(".") and path not in live:
                yield f"{name}: {path} was added: no link of the chain names it"


def _sha256(archive: Archive, path: str) -> str:
    with (archive.root / path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
