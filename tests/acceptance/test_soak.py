"""The short version of `tools/soak`; half an hour of it is a command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from adaptersync_tools.soak.report import Report
from adaptersync_tools.soak.traffic import KINDS
from adaptersync_tools.soak.trainers import BY_TRL, total
from support.processes import family

MINUTES, VERSIONS = "0.4", "12"


@pytest.mark.timeout(240)
def test_nothing_grows_while_a_fleet_works(tmp_path: Path) -> None:
    where = tmp_path / "soak.json"
    options = ["--minutes", MINUTES, "--versions", VERSIONS, "--seed", "5", "--json", str(where)]
    run = subprocess.run(
        [sys.executable, "-m", "adaptersync_tools.soak", *options],
        capture_output=True,
        text=True,
        timeout=220,
        env={**os.environ, "SOAK_IN": str(tmp_path), "TMPDIR": str(tmp_path)},
    )
    assert run.returncode == 0, run.stderr
    report = msgspec.convert(msgspec.json.decode(where.read_bytes()), Report)
    assert report.sound
    assert set(report.asked) == {*KINDS, BY_TRL}
    assert {"trainer", "relay", "watch"} <= {life.service for life in report.lives if life.grows is not None}
    assert {restart.kind for restart in report.restarts} == {"replica restarted", "agent killed"}
    assert report.last.published == total(int(VERSIONS))
    assert family(tmp_path) == []
    assert list(tmp_path.iterdir()) == [where]
