"""The whole of it on real parts: TRL trains, vLLM serves, the adapter travels between them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

STEPS = 6


@pytest.mark.vllm
@pytest.mark.trl
@pytest.mark.timeout(900)
def test_trl_and_vllm_train_through_the_fleet(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "adaptersync_tools.quickstart", "--steps", str(STEPS), "--out", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=880)
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
    found = orjson.loads((tmp_path / "latest" / "summary.json").read_bytes())
    assert (found["mode"], found["replicas"], found["steps"], found["pauses"]) == ("trl", 2, STEPS, 0)
    # one version before the first step, one after each; every one current on both replicas, or passed over
    versions = found["versions"]
    assert versions["published"] == STEPS + 1 == versions["promoted"] + versions["superseded"]
    assert versions["promoted"] >= 2
    assert versions["rolled_back"] == 0
    assert found["rollouts"]["failed"] == 0
    assert len(found["rollouts"]["by_replica"]) == 2
    assert 0.98 < found["ratio"]["mean"] < 1.02
    # vLLM's own word: nothing cached is shared between versions, and it is within one
    assert found["prefix_cache"]["across_tokens"] == 0
    assert found["prefix_cache"]["within_tokens"] > 0
    # what was learnt is measured before and after, and drawn
    assert [(each["model"], each["problems"]) for each in found["held_out"]] == [("base", 500), ("quickstart", 500)]
    assert "● right answers" in run.stdout
    assert (tmp_path / "latest" / "curve.png").read_bytes().startswith(b"\x89PNG")
