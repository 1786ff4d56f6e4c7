"""The lagging view misbehaves as promised, and the store's own checks see it."""

import hashlib
import time
from pathlib import Path

import pytest

from adaptersync_core.errors import ArtifactCorrupt
from adaptersync_core.manifest import FileEntry
from adaptersync_core.store import copy_verified
from adaptersync_tools.simulator.store import LaggingView, View

CONTENT = b"0123456789"


class Clock:
    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


def _published(root: Path, name: str = "v1") -> Path:
    (root / name).mkdir(parents=True)
    (root / name / "weights").write_bytes(CONTENT)
    return root / name / "weights"


def _read(view: View, path: Path) -> bytes:
    with view.open(path) as file:
        return file.read()


def test_what_was_there_before_is_visible_at_once(tmp_path: Path) -> None:
    file = _published(tmp_path)
    view = LaggingView(tmp_path, visibility_delay_s=100, negative_ttl_s=100)
    assert _read(view, file) == CONTENT
    assert view.listdir(tmp_path) == ["v1"]


def test_a_new_directory_shows_up_late(tmp_path: Path) -> None:
    clock = Clock()
    view = LaggingView(tmp_path, visibility_delay_s=10, clock=clock)
    file = _published(tmp_path)
    assert not view.exists(file)
    assert view.listdir(tmp_path) == []
    with pytest.raises(FileNotFoundError):
        view.open(file)
    clock.ahead_s = 10
    assert _read(view, file) == CONTENT
    assert view.listdir(tmp_path) == ["v1"]


def test_a_look_that_misses_is_remembered_from_the_first_look(tmp_path: Path) -> None:
    clock = Clock()
    view = LaggingView(tmp_path, negative_ttl_s=60, clock=clock)
    assert not view.exists(tmp_path / "v1")
    file = _published(tmp_path)
    clock.ahead_s = 50
    assert not view.exists(file)  # does not begin the time anew
    assert view.listdir(tmp_path) == ["v1"]
    clock.ahead_s = 61
    assert _read(view, file) == CONTENT
    assert view.looks[file] == 2


def test_a_name_never_tried_is_not_deceived(tmp_path: Path) -> None:
    view = LaggingView(tmp_path, negative_ttl_s=60)
    directory = tmp_path / "v1"
    directory.mkdir()
    assert not view.exists(directory / "marker-0")
    for number in range(2):
        (directory / f"marker-{number}").touch()
    assert not view.exists(directory / "marker-0")
    assert view.exists(directory / "marker-1")


def test_torn_and_wrong_bytes_are_caught_and_heal(tmp_path: Path) -> None:
    file = _published(tmp_path / "store")
    entry = FileEntry(name="weights", size=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest())
    view = LaggingView(tmp_path / "store")
    view.tear(file, 4)
    with pytest.raises(ArtifactCorrupt, match="wrong size"):
        copy_verified(view, file, tmp_path / "copy", entry, "a")
    view.heal(file)
    view.corrupt(file, 3)
    with pytest.raises(ArtifactCorrupt, match="wrong bytes"):
        copy_verified(view, file, tmp_path / "copy", entry, "a")
    view.heal(file)
    copy_verified(view, file, tmp_path / "copy", entry, "a")
    assert (tmp_path / "copy").read_bytes() == CONTENT == file.read_bytes()
