"""Markers in a store: written after their version, removed once nobody looks for them, and no reason to fail."""

from __future__ import annotations

import contextlib
import errno
import os
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from adaptersync_core import markers
from adaptersync_core import store as store_module
from adaptersync_core.manifest import WEIGHTS_FILE
from adaptersync_core.store import ArtifactStore
from support.artifacts import manifest_of, stored


def test_markers_follow_the_version_and_a_repeat_leaves_them(store: ArtifactStore, tmp_path: Path) -> None:
    manifest = stored(store, tmp_path, marked=True)
    names = [store.root / name for name in markers.names(manifest)]
    assert len(set(names)) == markers.COUNT
    place = store.directory(manifest.adapter_id)
    for name in names:
        assert name.read_text().strip() == manifest.adapter_id
        assert name.stat().st_mode & 0o444 == 0o444
        assert name.stat().st_ctime_ns >= place.stat().st_ctime_ns
    before = {path: path.stat().st_mtime_ns for path in store.root.rglob("*")}
    names[3].unlink()  # as where the publisher was killed
    stored(store, tmp_path, marked=True)
    after = {path: path.stat().st_mtime_ns for path in store.root.rglob("*")}
    assert after.keys() == before.keys()
    assert {path for path in before if before[path] != after[path]} <= {names[3]}
    assert list(store.versions()) == [manifest.adapter_id]


def test_markers_that_cannot_be_written_are_no_reason_not_to_publish(
    store: ArtifactStore, source: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = msgspec.structs.replace(manifest_of(source), markers=4, created_at=time.time())
    store.publish(manifest, source)
    monkeypatch.setattr(markers, "_PREFIX", ".absent/")
    assert not store.mark(manifest)
    assert f"4 of 4 markers of {manifest.adapter_id}: " in caplog.text
    (store.root / ".absent").mkdir()
    (store.root / markers.names(manifest)[2]).mkdir()  # what has the name shows, too
    assert store.mark(manifest)
    assert len(list((store.root / ".absent").iterdir())) == 4


def test_the_age_of_markers_is_asked_once_a_version(store: ArtifactStore, tmp_path: Path) -> None:
    """Of thousands of files on an object store, where each question may be a request."""
    old, new = (stored(store, tmp_path, seq=seq, marked=True) for seq in (1, 2))
    aged = [store.root / name for name in markers.names(old)]
    for path in aged:
        os.utime(path, (time.time() - markers.KEPT_S - 10,) * 2)
    asked = []
    scandir = os.scandir

    class Entry:
        def __init__(self, entry: os.DirEntry[str]) -> None:
            self.name, self._entry = entry.name, entry

        def stat(self) -> os.stat_result:
            asked.append(self.name)
            return self._entry.stat()

    @contextlib.contextmanager
    def listed(root: Path) -> Iterator[Iterator[Entry]]:
        with scandir(root) as entries:
            yield map(Entry, entries)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "scandir", listed)
        markers.tidy(store.root)
    assert len(asked) == 2
    assert {path.name for path in store.root.iterdir()} == {"run", *markers.names(new)}


def test_markers_of_another_user_stay_and_keep_nobody_from_his_own(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a root that is sticky, as /tmp is: everybody of the group may write, and remove what is his."""
    own, other, new = (stored(store, tmp_path, seq=seq, marked=True) for seq in (1, 2, 3))
    for name in (*markers.names(own), *markers.names(other)):
        os.utime(store.root / name, (time.time() - markers.KEPT_S - 10,) * 2)
    kept, unlink = markers.names(other), os.unlink

    def sticky(path: str) -> None:
        if Path(path).name in kept:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)
        unlink(path)

    monkeypatch.setattr(os, "unlink", sticky)
    markers.tidy(store.root)
    left = {path.name for path in store.root.iterdir()}
    assert left == {"run", *kept, *markers.names(new)}


def test_thousands_of_markers_are_removed_in_little_memory(tmp_path: Path) -> None:
    """A process that publishes for weeks keeps what it needed once: threads' memory is hardly ever given back."""
    names = [f".visible-run-v{seq}-0123456789ab-{number:03d}" for seq in range(50) for number in range(markers.COUNT)]
    for name in (*names, ".visible-run-v50-0123456789ab-000"):
        (tmp_path / name).touch()
    for name in names:
        os.utime(tmp_path / name, (time.time() - markers.KEPT_S - 10,) * 2)
    tracemalloc.start()
    try:
        markers.tidy(tmp_path)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(list(tmp_path.iterdir())) == 1
    assert most < 2_000_000


def test_old_markers_and_what_killed_publishers_left_are_removed(store: ArtifactStore, tmp_path: Path) -> None:
    old, late, new = (stored(store, tmp_path, seq=seq, marked=True) for seq in (1, 2, 3))
    dead, alive = (store.root / "run" / f".staging-run-v{seq}-0123456789ab-00000000" for seq in (4, 5))
    for path in (dead, alive):
        path.mkdir()
        (path / WEIGHTS_FILE).write_bytes(b"half")
    now = (store.root / markers.names(new)[0]).stat().st_mtime
    aged = [(store.root / name, markers.KEPT_S + 1) for name in markers.names(old)]
    aged += [(store.root / name, markers.KEPT_S - 30) for name in markers.names(late)]
    aged += [(dead, store_module.STAGING_S + 1), (alive, store_module.STAGING_S - 30)]
    for path, age_s in aged:
        os.utime(path, (now - age_s,) * 2)
    store.tidy("run")
    left = {path.name for path in store.root.iterdir()}
    assert left == {"run", *markers.names(late), *markers.names(new)}
    ids = {one.adapter_id for one in (old, late, new)}
    assert {path.name for path in (store.root / "run").iterdir()} == {*ids, alive.name}
