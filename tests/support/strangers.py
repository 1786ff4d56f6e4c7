"""Another user of this machine, who has made some paths: as `lstat` tells it, since tests need not be root."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

UID = 54321


class Stranger:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._theirs: set[Path] = set()
        self._lstat = Path.lstat
        monkeypatch.setattr(Path, "lstat", lambda path: self._told(path))

    def takes(self, path: Path) -> None:
        self._theirs.add(path)

    def _told(self, path: Path) -> os.stat_result:
        found = self._lstat(path)
        return os.stat_result((*found[:4], UID, *found[5:10])) if path in self._theirs else found


def common(directory: Path) -> Path:
    """A place where everybody may write, as in /tmp."""
    place = directory / "common"
    place.mkdir()
    place.chmod(0o1777)
    return place
