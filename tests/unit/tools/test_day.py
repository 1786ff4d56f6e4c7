"""The release that an operator's day upgrades to: it writes what this one does not know, and this one reads it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from adaptersync_core.records import RouterReport
from adaptersync_core.rollouts import Row
from adaptersync_core.table import Table
from adaptersync_tools.day import release
from adaptersync_tools.day.release import GROWN, ReleaseFailed, new_field, next_release

WRITE = """
import sys
import msgspec
from adaptersync_core.records import RouterReport
from adaptersync_core.rollouts import Row
from adaptersync_core.table import Table
import adaptersync, adaptersync_tools
row = Row(request_id="a-1", router="a", path="/", asked="m", outcome="ok", started_at=1.0)
for each in (Table(generation=7), row, RouterReport(generation=7)):
    print(msgspec.json.encode(each).decode())
print(*(package.__file__ for package in (adaptersync, adaptersync_tools)))
"""


def test_the_next_release_writes_more_and_is_understood(tmp_path: Path) -> None:
    path = next_release(tmp_path / "next")
    run = subprocess.run(
        [sys.executable, "-c", WRITE],
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert run.returncode == 0, run.stderr
    *written, files = run.stdout.splitlines()
    kinds = (Table, Row, RouterReport)
    assert [kind.__name__ for kind in kinds] == list(GROWN)
    for kind, text in zip(kinds, written, strict=True):
        assert new_field(kind.__name__) in msgspec.json.decode(text)
        assert not hasattr(kind, new_field(kind.__name__))
        assert msgspec.json.decode(text, type=kind) is not None
    assert all(file.startswith(path) for file in files.split())


def test_a_release_that_would_be_the_same_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(release.GROWN, "Elsewhere", "adaptersync_core/table.py")
    with pytest.raises(ReleaseFailed, match="no such class"):
        next_release(tmp_path / "next")
