"""The store: a version appears whole or not at all, and never changes."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import msgspec
import pytest

from adaptersync_core import store as store_module
from adaptersync_core.errors import AdapterInvalid, ArtifactCorrupt, NameInvalid, NameTaken, StoreError
from adaptersync_core.manifest import CONFIG_FILE, FILES, MANIFEST_FILE, WEIGHTS_FILE, Manifest
from adaptersync_core.store import ArtifactStore, verify_files
from support import dying
from support.artifacts import manifest_of, small_adapter, stored


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_what_was_published_can_be_read(store: ArtifactStore, source: Path, tmp_path: Path) -> None:
    (source / "README.md").write_text("not part of an adapter")
    manifest = manifest_of(source, run="my-run", seq=3)
    place = store.publish(manifest, source)
    assert place == store.root / "my-run" / manifest.adapter_id
    assert sorted(path.name for path in place.iterdir()) == sorted((*FILES, MANIFEST_FILE))
    assert store.read_manifest(manifest.adapter_id) == manifest
    verify_files(manifest, place)
    out = tmp_path / "out"
    out.mkdir()
    store.copy_out(manifest, out)
    assert tree(out) == {name: (source / name).read_bytes() for name in FILES}


def test_a_version_is_removed_whole(store: ArtifactStore, tmp_path: Path) -> None:
    manifests = [stored(store, tmp_path, seq=seq) for seq in (1, 2)]
    store.remove(manifests[0].adapter_id)
    store.remove(manifests[0].adapter_id)
    assert store.versions_of("run") == [manifests[1].adapter_id]
    assert [path.name for path in (store.root / "run").iterdir()] == [manifests[1].adapter_id]


def test_half_a_removal_hides_the_version_and_is_finished_later(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = stored(store, tmp_path)

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            store.remove(manifest.adapter_id)
    assert list(store.versions()) == []
    (left,) = (store.root / "run").glob(".removed-*")
    os.utime(left, (1, 1))
    store.tidy("run")
    assert not left.exists()


def test_a_repeat_changes_nothing(store: ArtifactStore, source: Path) -> None:
    manifest = manifest_of(source)
    place = store.publish(manifest, source)
    before = {path: path.stat().st_mtime_ns for path in store.root.rglob("*")}
    assert store.publish(manifest, source) == place
    assert {path: path.stat().st_mtime_ns for path in store.root.rglob("*")} == before


def test_a_name_is_never_rewritten(store: ArtifactStore, source: Path, tmp_path: Path) -> None:
    manifest = manifest_of(source)
    store.publish(manifest, source)
    before = tree(store.root)
    other = manifest_of(small_adapter(tmp_path / "other", seed=9))
    same_name = msgspec.structs.replace(other, digest=manifest.digest[:12] + other.digest[12:])
    assert same_name.adapter_id == manifest.adapter_id
    with pytest.raises(NameTaken) as refusal:
        store.publish(same_name, tmp_path / "other")
    assert refusal.value.ids["version"] == manifest.adapter_id
    assert tree(store.root) == before


def test_many_at_once_publish_one(store: ArtifactStore, source: Path) -> None:
    manifest = manifest_of(source)
    with ThreadPoolExecutor(8) as threads:
        places = set(threads.map(lambda _: store.publish(manifest, source), range(32)))
    assert places == {store.directory(manifest.adapter_id)}
    assert [path.name for path in places.pop().parent.iterdir()] == [manifest.adapter_id]


def test_killed_at_every_step_it_leaves_nothing_or_all(tmp_path: Path, source: Path) -> None:
    """About two hundred deaths in one store: what one leaves does not hinder the next."""
    done = subprocess.run(
        [sys.executable, dying.__file__, str(tmp_path / "store"), str(source)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    died, there = map(int, done.stdout.split())
    assert died > 60  # the kills did hit the publication
    assert 0 < there < died  # some before the rename, some after


@contextlib.contextmanager
def small_files_only() -> Iterator[None]:
    """A real write fails half way, as on a full disk: the kernel's limit on a file's size is the nearest thing.

    Only around the call that is tested: a log that pytest writes to is a file, too.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def nothing_published(store: ArtifactStore) -> None:
    assert list(store.versions()) == []
    assert tree(store.root) == {}


def test_a_write_that_fails_half_way_leaves_nothing(store: ArtifactStore, source: Path) -> None:
    manifest = manifest_of(source)
    assert manifest.size > 600
    with pytest.raises(StoreError, match="File too large") as refusal, small_files_only():
        store.publish(manifest, source)
    assert "space" in refusal.value.next_step
    nothing_published(store)


@pytest.mark.parametrize("step", range(7))  # after the seventh flush the version is in its place
def test_a_full_disk_leaves_nothing_and_room_makes_the_repeat_work(
    store: ArtifactStore, source: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Network file systems tell of a full disk only when they are asked to flush."""
    flush, flushes = os.fsync, iter(range(100))

    def fsync(descriptor: int) -> None:
        if next(flushes) == step:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(descriptor)

    manifest = manifest_of(source)
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StoreError, match="No space left on device"):
        store.publish(manifest, source)
    nothing_published(store)
    monkeypatch.undo()
    verify_files(manifest, store.publish(manifest, source))


def test_readable_by_others_whatever_the_umask(store: ArtifactStore, source: Path) -> None:
    for path in source.iterdir():
        path.chmod(0o600)  # as safetensors writes
    before = os.umask(0o077)
    try:
        place = store.publish(manifest_of(source), source)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in place.iterdir()} == {0o644}
    for directory in (place, place.parent, store.root):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o755


def test_a_directory_that_is_there_keeps_its_mode(store: ArtifactStore, source: Path) -> None:
    store.root.mkdir(mode=0o2775)
    store.root.chmod(0o2775)
    store.publish(manifest_of(source), source)
    assert stat.S_IMODE(store.root.stat().st_mode) == 0o2775


def test_in_a_groups_store_whoever_is_of_it_may_remove_what_others_published(
    store: ArtifactStore, source: Path
) -> None:
    store.root.mkdir()
    store.root.chmod(0o2775)
    before = os.umask(0o077)
    try:
        place = store.publish(manifest_of(source), source)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(directory.stat().st_mode) for directory in (place, place.parent)] == [0o2775] * 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in place.iterdir()} == {0o644}


def test_where_such_modes_are_forbidden_it_is_published_all_the_same(
    store: ArtifactStore, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.root.mkdir()
    store.root.chmod(0o2775)
    chmod = Path.chmod

    def restricted(self: Path, mode: int) -> None:
        if mode & stat.S_ISGID:
            raise PermissionError("Operation not permitted")
        chmod(self, mode)

    monkeypatch.setattr(Path, "chmod", restricted)
    place = store.publish(manifest_of(source), source)
    assert [stat.S_IMODE(directory.stat().st_mode) for directory in (place, place.parent)] == [0o755] * 2


def test_what_is_left_and_cannot_be_removed_is_said(
    store: ArtifactStore, source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = store.publish(manifest_of(source), source)
    left = place.parent / ".staging-old"
    left.mkdir()
    os.utime(left, (1.0, 1.0))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # as of another user's, who lets nobody in
        store.tidy(place.parent.name)
    assert f"cannot be removed; whose is it? {left}" in caplog.text
    store.tidy(place.parent.name)
    assert not left.exists()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("harm", "reason"),
    [(truncate, "wrong size"), (lengthen, "wrong size"), (flip, "wrong bytes"), (Path.unlink, "vanished")],
)
def test_a_source_that_changed_since_it_was_hashed_is_not_published(
    store: ArtifactStore, source: Path, name: str, harm: object, reason: str
) -> None:
    manifest = manifest_of(source)
    assert callable(harm)
    harm(source / name)
    with pytest.raises(AdapterInvalid, match=f"source changed while it was published.*{reason}.*nobody writes") as said:
        store.publish(manifest, source)
    assert said.value.ids["file"] == name
    nothing_published(store)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("harm", "reason"),
    [(truncate, "wrong size"), (lengthen, "wrong size"), (flip, "wrong bytes"), (Path.unlink, "cannot be read")],
)
def test_harm_in_the_store_is_named(
    store: ArtifactStore, source: Path, name: str, harm: object, reason: str, tmp_path: Path
) -> None:
    manifest = manifest_of(source)
    place = store.publish(manifest, source)
    assert callable(harm)
    harm(place / name)
    with pytest.raises(ArtifactCorrupt, match=reason) as refusal:
        verify_files(manifest, place)
    assert name in str(refusal.value)
    (tmp_path / "out").mkdir()
    with pytest.raises((ArtifactCorrupt, OSError), match=name.replace(".", r"\.")):
        store.copy_out(manifest, tmp_path / "out")


def test_a_store_that_cannot_be_written_says_so(tmp_path: Path, source: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(StoreError, match="could not be stored") as refusal:
        ArtifactStore(tmp_path / "file" / "store").publish(manifest_of(source), source)
    assert "store" in refusal.value.ids


def test_a_manifest_too_large_to_be_read_again_is_not_published(
    store: ArtifactStore, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MANIFEST_LIMIT", 100)
    with pytest.raises(StoreError, match="manifest is larger"):
        store.publish(manifest_of(source), source)
    nothing_published(store)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b'{"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}"])
def test_a_manifest_that_is_none_is_an_error(store: ArtifactStore, source: Path, text: bytes) -> None:
    manifest = manifest_of(source)
    (store.publish(manifest, source) / MANIFEST_FILE).write_bytes(text)
    with pytest.raises(StoreError, match="manifest cannot be read"):
        store.read_manifest(manifest.adapter_id)


def test_a_manifest_of_another_version_is_an_error(store: ArtifactStore, tmp_path: Path) -> None:
    one, two = stored(store, tmp_path, seq=1), stored(store, tmp_path, seq=2)
    (store.directory(two.adapter_id) / MANIFEST_FILE).write_bytes(
        (store.directory(one.adapter_id) / MANIFEST_FILE).read_bytes()
    )
    with pytest.raises(ArtifactCorrupt, match="another version"):
        store.read_manifest(two.adapter_id)


@pytest.mark.parametrize("name", ["../../etc", "run", "", "run-v1-0123456789ab/../x"])
def test_only_adapter_ids_become_paths(store: ArtifactStore, name: str) -> None:
    with pytest.raises(NameInvalid):
        store.directory(name)
    with pytest.raises(NameInvalid):
        store.read_manifest(name)


def test_versions_are_listed_by_run_and_number_and_nothing_else_is(store: ArtifactStore, tmp_path: Path) -> None:
    assert list(store.versions()) == []
    made = [stored(store, tmp_path, run=run, seq=seq).adapter_id for run in ("b", "a") for seq in (10, 9, 1)]
    (store.root / ".staging-x").mkdir()
    (store.root / "a" / ".staging-a-v1-0123456789ab-00").mkdir()
    (store.root / "a" / "b-v1-0123456789ab").mkdir()  # another run's name
    (store.root / "Not A Run" / "a-v1-0123456789ab").mkdir(parents=True)
    (store.root / "file").write_text("x")
    assert list(store.versions()) == [made[5], made[4], made[3], made[2], made[1], made[0]]


class Lying:
    """A mount that shows other bytes than it holds."""

    def __init__(self, name: str, content: bytes | OSError) -> None:
        self.name, self.content = name, content

    def open(self, path: Path) -> BinaryIO:
        if path.name != self.name:
            return path.open("rb")
        if isinstance(self.content, OSError):
            raise self.content
        return BytesIO(self.content)


@pytest.mark.parametrize("content", [b"", b"x" * 10, b"x" * 10_000_000, OSError(errno.EIO, "Input/output error")])
def test_what_a_mount_shows_is_not_believed(tmp_path: Path, source: Path, content: bytes | OSError) -> None:
    manifest = manifest_of(source)
    ArtifactStore(tmp_path / "store").publish(manifest, source)
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises((ArtifactCorrupt, OSError)):
        ArtifactStore(tmp_path / "store", Lying(WEIGHTS_FILE, content)).copy_out(manifest, out)
    written = out / WEIGHTS_FILE
    assert not written.exists() or written.stat().st_size <= manifest.files[1].size  # no more than was announced


def test_files_are_checked_against_the_whole_manifest(store: ArtifactStore, source: Path) -> None:
    manifest = manifest_of(source)
    place = store.publish(manifest, source)
    entry = manifest.files[0]
    assert entry.name == CONFIG_FILE
    for wrong in (
        msgspec.structs.replace(entry, size=entry.size + 1),
        msgspec.structs.replace(entry, sha256="0" * 64),
    ):
        changed: Manifest = msgspec.structs.replace(manifest, files=(wrong, manifest.files[1]))
        with pytest.raises(ArtifactCorrupt):
            verify_files(changed, place)


@pytest.mark.parametrize("harm", [truncate, Path.unlink])
def test_a_broken_manifest_does_not_end_its_run(store: ArtifactStore, tmp_path: Path, harm: object) -> None:
    assert store.highest("run") == (0, 0)
    stored(store, tmp_path, seq=1)
    newest = stored(store, tmp_path, seq=2)
    assert callable(harm)
    harm(store.directory(newest.adapter_id) / MANIFEST_FILE)
    assert store.highest("run") == (1, 2)
    with pytest.raises(StoreError, match="manifest cannot be read"):
        store.read_manifest(newest.adapter_id)
