"""The short version of `tools/chaos`, from a fixed seed; the long one is a command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from adaptersync_tools.chaos.report import Report

SECONDS = "45"
SEED = "273"  # its first faults: kill a router, empty control, set it back, empty cache, set control back again


@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_every_promise_holds_while_everything_breaks(tmp_path: Path) -> None:
    where = tmp_path / "report.json"
    options = ["--seconds", SECONDS, "--seed", SEED, "--replicas", "2", "--report", str(where)]
    run = subprocess.run(
        [sys.executable, "-m", "adaptersync_tools.chaos", *options, "--keep", str(tmp_path / "kept")],
        capture_output=True,
        text=True,
        timeout=380,
        env={**os.environ, "CHAOS_IN": str(tmp_path)},
    )
    assert run.returncode == 0, run.stderr
    report = msgspec.json.decode(where.read_bytes(), type=Report)
    assert report.sound
    assert len(report.faults) >= 4  # it did break something
    assert all(struck.recovered_s is not None for struck in report.faults)
    assert report.answers["200"] > 50  # and somebody was served meanwhile
    assert report.versions["promoted"] > 4
    assert report.probes > 10
    assert report.names >= report.versions["promoted"]
    assert sum(of.rollouts for of in report.audited.values()) >= report.answers["200"]
    assert report.rest_s is not None
    assert not _left(tmp_path)


def _left(directory: Path) -> list[str]:
    """Processes that were started below `directory` and still run."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(directory).encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found
