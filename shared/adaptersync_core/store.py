"""The artifact store: a directory tree in which a version appears whole or not at all, and never changes.

Layout: `{root}/{run}/{adapter id}/` with the adapter's files and `manifest.json`. A version is written under a hidden
name beside its place, flushed, and renamed; its markers come after that. The store does not know who serves a version;
it only keeps bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec

from adaptersync_core import markers
from adaptersync_core.errors import AdapterInvalid, ArtifactCorrupt, NameInvalid, NameTaken, StoreError
from adaptersync_core.identity import parse_adapter_id
from adaptersync_core.manifest import CHUNK, MANIFEST_FILE, MANIFEST_LIMIT, FileEntry, Manifest, hash_file

FILE_MODE = 0o644  # readable by the serving side whatever user it runs as; safetensors writes 0600
DIRECTORY_MODE = 0o755
JOURNAL, ARCHIVE = ".coordinator", ".ledger"  # beside the runs: what coordinators write, and what workers write
SHARED_MODE = 0o2775  # of runs and versions, where the store is a group's: whoever of it removes one must be let in
STAGING_S = 86400.0  # a publication that began so long ago is not on its way any more
_STAGING, _REMOVED = ".staging-", ".removed-"  # hidden beside the versions
_NUMBERS = ".numbers"  # of a run whose newest version was removed
_CLOCK = ".clock-"  # in the root, for a moment

log = logging.getLogger(__name__)


class Reader(Protocol):
    """How bytes are read from a mount; a test puts one in between that lags or tears."""

    def open(self, path: Path) -> BinaryIO: ...


class DirectReader:
    def open(self, path: Path) -> BinaryIO:
        return path.open("rb")


class ArtifactStore:
    """Publish into and read from one store root."""

    def __init__(self, root: Path, reader: Reader | None = None) -> None:
        self.root = root
        self._reader = reader or DirectReader()

    def directory(self, adapter_id: str) -> Path:
        """Where a version lies; the path is a function of the name alone."""
        return self.root / parse_adapter_id(adapter_id).run / adapter_id

    def publish(self, manifest: Manifest, source: Path) -> Path:
        """Put the files of `source` under the manifest's name, all or nothing. A repeat is a no-op.

        NameTaken when the name exists with another manifest, AdapterInvalid when `source` changed since it was hashed.
        """
        place = self.directory(manifest.adapter_id)
        if place.exists():
            return self._same(manifest, place)
        staging = place.parent / f"{_STAGING}{manifest.adapter_id}-{secrets.token_hex(4)}"
        try:
            make_directory(self.root)
            for directory in (place.parent, staging):
                make_directory(directory, shared=self._shared())
            for file in manifest.files:
                copy_verified(self._reader, source / file.name, staging / file.name, file, manifest.adapter_id)
            text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
            if len(text) > MANIFEST_LIMIT:
                raise StoreError("manifest is larger than the limit", version=manifest.adapter_id, limit=MANIFEST_LIMIT)
            write_durably(staging / MANIFEST_FILE, text)
            sync_directory(staging)
            staging.rename(place)
            sync_directory(place.parent)
        except ArtifactCorrupt as error:
            raise _changed(manifest, source, error.reason, error.ids.get("file")) from error
        except OSError as error:
            if isinstance(error, FileNotFoundError) and error.filename and Path(error.filename).parent == source:
                raise _changed(manifest, source, "file vanished", Path(error.filename).name) from error
            if place.exists():  # another process published the same name in between
                return self._same(manifest, place)
            raise StoreError(
                f"version could not be stored: {error.strerror or error}",
                next_step="check space and permissions of the store; nothing was published",
                version=manifest.adapter_id,
                store=str(self.root),
            ) from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return place

    def mark(self, manifest: Manifest) -> bool:
        """Leave the markers of a version that was published; whether there are any now."""
        return markers.leave(self.root, manifest)

    def shows(self, marker: str) -> bool:
        """Look at a marker, once and for all: a mount may remember that it was not there."""
        with contextlib.suppress(OSError), self._reader.open(self.root / marker):
            return True
        return False

    def tidy(self, run: str) -> None:
        """Remove what nobody needs any more: old markers, and what somebody left who was killed in the midst of it."""
        now = markers.tidy(self.root)
        with os.scandir(self.root / run) as entries:
            for entry in entries:
                if entry.name.startswith((_STAGING, _REMOVED)):
                    with contextlib.suppress(FileNotFoundError):
                        if now - entry.stat().st_mtime <= STAGING_S:
                            continue
                        if entry.is_dir(follow_symlinks=False):
                            _remove_tree(Path(entry.path))
                        else:
                            Path(entry.path).unlink(missing_ok=True)

    def younger(self, adapter_ids: Sequence[str], age_s: float) -> set[str]:
        """Those that were stored within `age_s`, by the clock of the disk: other hosts' may be wrong."""
        clock = self.root / f"{_CLOCK}{secrets.token_hex(4)}"
        try:
            clock.touch()
            now = clock.stat().st_mtime
        finally:
            clock.unlink(missing_ok=True)
        found = set()
        for name in adapter_ids:
            with contextlib.suppress(FileNotFoundError):
                if now - self.directory(name).stat().st_mtime <= age_s:
                    found.add(name)
        return found

    def remove(self, adapter_id: str) -> None:
        """Take a version out of the store, all or nothing. A repeat is a no-op.

        Of a run's newest its numbers stay: a Redis that lost them must give none again.
        """
        place = self.directory(adapter_id)
        run = place.parent.name
        names = self.versions_of(run)
        if names and names[-1] == adapter_id:
            content = msgspec.json.encode(self.highest(run))
            written = place.parent / f"{_STAGING}numbers-{secrets.token_hex(4)}"
            write_durably(written, content)
            written.rename(place.parent / _NUMBERS)
            sync_directory(place.parent)
        removed = place.parent / f"{_REMOVED}{adapter_id}-{secrets.token_hex(4)}"
        with contextlib.suppress(FileNotFoundError):
            place.rename(removed)
            shutil.rmtree(removed)

    def _shared(self) -> bool:
        """Whether its root gives what is made in it to the root's group."""
        return bool(self.root.stat().st_mode & stat.S_ISGID)

    def _same(self, manifest: Manifest, place: Path) -> Path:
        if self.read_manifest(manifest.adapter_id).files != manifest.files:
            raise NameTaken("name exists with other bytes", version=manifest.adapter_id, path=str(place))
        return place

    def read_manifest(self, adapter_id: str) -> Manifest:
        """The manifest as stored; StoreError when it cannot be read or is not of that version."""
        path = self.directory(adapter_id) / MANIFEST_FILE
        try:
            with self._reader.open(path) as file:
                raw = file.read(MANIFEST_LIMIT + 1)
            manifest = msgspec.json.decode(raw, type=Manifest)
        except (OSError, msgspec.MsgspecError, RecursionError) as error:
            raise StoreError(f"manifest cannot be read: {error}", version=adapter_id, path=str(path)) from error
        if manifest.adapter_id != adapter_id:
            raise ArtifactCorrupt("manifest is of another version", version=adapter_id, found=manifest.adapter_id)
        return manifest

    def copy_out(self, manifest: Manifest, target: Path) -> None:
        """Copy a version's files into the existing directory `target`, checking every byte on the way.

        The copy is not flushed: it is read again before it is used, and the store has it if the host loses it.
        """
        for file in manifest.files:
            source = self.directory(manifest.adapter_id) / file.name
            copy_verified(self._reader, source, target / file.name, file, manifest.adapter_id, durably=False)

    def versions_of(self, run: str) -> list[str]:
        """Adapter ids of a run's versions, by sequence number."""
        return _versions_in(self.root / run)

    def versions(self) -> Iterator[str]:
        """Adapter ids of all versions in the store, by run and sequence number."""
        with contextlib.suppress(FileNotFoundError):
            for run in sorted(path for path in self.root.iterdir() if not path.name.startswith(".") and path.is_dir()):
                yield from _versions_in(run)

    def highest(self, run: str) -> tuple[int, int]:
        """The highest epoch and sequence number of a run's versions, removed ones too; zeros when it had none.

        The epoch is that of the newest whose manifest can be read: a broken one must not end the run.
        """
        names = _versions_in(self.root / run)
        epoch = 0
        for name in reversed(names):
            try:
                epoch = self.read_manifest(name).epoch
                break
            except StoreError as error:
                log.warning("trainer's epoch is looked for in an older version: %s", error)
        seq = parse_adapter_id(names[-1]).seq if names else 0
        with contextlib.suppress(FileNotFoundError):
            before = msgspec.json.decode((self.root / run / _NUMBERS).read_bytes(), type=tuple[int, int])
            epoch, seq = max(epoch, before[0]), max(seq, before[1])
        return epoch, seq


def _changed(manifest: Manifest, source: Path, what: str, file: str | float | None) -> AdapterInvalid:
    return AdapterInvalid(
        f"source changed while it was published: {what}",
        next_step="publish a directory nobody writes to; nothing was published",
        version=manifest.adapter_id,
        source=str(source),
        file=file,
    )


def _remove_tree(path: Path) -> None:
    """As far as it goes; what another user keeps from us is said."""
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        log.warning("what was left in the store cannot be removed; whose is it? %s", path)


def _versions_in(run: Path) -> list[str]:
    names = []
    with contextlib.suppress(FileNotFoundError):
        for path in run.iterdir():
            with contextlib.suppress(NameInvalid):
                names.append(parse_adapter_id(path.name))
    return [str(name) for name in sorted(names, key=lambda name: name.seq) if name.run == run.name]


def verify_files(manifest: Manifest, directory: Path) -> None:
    """ArtifactCorrupt, naming file and reason, unless `directory` holds exactly the manifest's bytes."""
    for file in manifest.files:
        path = directory / file.name
        try:
            found = hash_file(path)
        except OSError as error:
            raise ArtifactCorrupt(
                f"file cannot be read: {error.strerror}", version=manifest.adapter_id, file=str(path)
            ) from error
        _check(file, found.size, found.sha256, manifest.adapter_id)


def copy_verified(
    reader: Reader, source: Path, target: Path, expected: FileEntry, adapter_id: str, *, durably: bool = True
) -> None:
    """Copy one file, and flush it if it shall last; what was written is what the entry says, or ArtifactCorrupt.

    An OSError that names `source` is of reading; one that names something else or nothing is of writing.
    """
    digest = hashlib.sha256()
    size = 0
    with reader.open(source) as incoming, target.open("wb") as outgoing:
        while chunk := _read(incoming, source):
            size += len(chunk)
            if size > expected.size:
                break
            digest.update(chunk)
            outgoing.write(chunk)
        _finish(outgoing, durably=durably)
    _check(expected, size, digest.hexdigest(), adapter_id)


def _read(file: BinaryIO, path: Path) -> bytes:
    try:
        return file.read(CHUNK)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _check(expected: FileEntry, size: int, sha256: str, adapter_id: str) -> None:
    if size != expected.size:
        raise ArtifactCorrupt(
            "file has the wrong size",
            version=adapter_id,
            file=expected.name,
            short=size < expected.size,
            size=size,
            expected=expected.size,
        )
    if sha256 != expected.sha256:
        raise ArtifactCorrupt("file has the wrong bytes", version=adapter_id, file=expected.name, sha256=sha256[:16])


def write_verified(manifest: Manifest, contents: dict[str, bytes], target: Path) -> None:
    """Write a version's files from memory into the existing directory `target`, if they are the manifest's bytes.

    Like `copy_out`, it flushes nothing.
    """
    for file in manifest.files:
        content = contents[file.name]
        _check(file, len(content), hashlib.sha256(content).hexdigest(), manifest.adapter_id)
        _write(target / file.name, content, durably=False)


def write_durably(path: Path, content: bytes) -> None:
    _write(path, content, durably=True)


def _write(path: Path, content: bytes, *, durably: bool) -> None:
    with path.open("wb") as file:
        file.write(content)
        _finish(file, durably=durably)


def _finish(file: BinaryIO, *, durably: bool) -> None:
    file.flush()
    os.fchmod(file.fileno(), FILE_MODE)
    if durably:
        os.fsync(file.fileno())


def make_directory(path: Path, *, shared: bool = False) -> None:
    """Make a directory that may be there already; one that is new can be entered whatever the umask says.

    `shared`: its group may write to it, as to what is made in it.
    """
    if not path.parent.is_dir():
        make_directory(path.parent, shared=shared)
    with contextlib.suppress(FileExistsError):
        path.mkdir()
        try:
            path.chmod(SHARED_MODE if shared else DIRECTORY_MODE)
        except PermissionError:  # a sandbox may forbid such modes (RestrictSUIDSGID): then its group only reads it
            path.chmod(DIRECTORY_MODE)
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
