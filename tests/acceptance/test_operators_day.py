"""The operator's day, in its short form."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from adaptersync_tools.day.fleet import HOSTS
from adaptersync_tools.day.release import GROWN, new_field
from adaptersync_tools.day.site import TOOLS
from support.processes import family

STEPS = [
    "install",
    "start, and scale to 2",
    "publish",
    "scale to 4",
    "scale to 1",
    "scale to 2",
    "restart Redis",
    "replace Redis",
    "upgrade one by one",
    "publish the next version",
    "roll back",
    "end of traffic",
    "audit verify",
]


def hosts_are_possible() -> bool:
    """Asked of the machine itself: what the day makes of it is what is tried."""
    there = os.geteuid() == 0 and all(map(shutil.which, TOOLS))
    return there and subprocess.run(["unshare", "--net", "--uts", "true"]).returncode == 0


@pytest.mark.timeout(240)
def test_a_short_day_goes_well_and_leaves_nothing(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "adaptersync_tools.day", "--short", "--report", str(report)]
    run = subprocess.run(
        [*command, "--keep", str(tmp_path / "day")],
        capture_output=True,
        text=True,
        timeout=230,
        env={**os.environ, "UP_IN": str(tmp_path)},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    found = orjson.loads(report.read_bytes())
    assert [step["name"] for step in found["steps"]] == STEPS
    assert all(step["ok"] for step in found["steps"])
    assert (found["errors"], found["restarts"], found["ok"]) == ([], {}, True)
    # who can have hosts has them: one host alone would be another rehearsal
    if hosts_are_possible():
        assert (found["hosts"], found["network"]) == (list(HOSTS), "network namespaces on a bridge of their own")
    # what is scaled, restarted and rolled back is so under traffic
    assert all(step["answered"] >= 20 for step in found["steps"][3:11]), found["steps"]
    # the upgraded ones wrote what the others did not know, into the server that took over
    written = b"".join(path.read_bytes() for path in (tmp_path / "day" / "redis-control-new").rglob("*.aof"))
    assert [kind for kind in GROWN if new_field(kind).encode() not in written] == []
    assert len(found["replicas"]) == 4
    assert len(found["versions"]) == 2
    assert "it went well" in run.stdout
    assert not family(tmp_path)
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout if os.geteuid() == 0 else ""
    assert not [line for line in spaces.splitlines() if line.startswith("asd")]
