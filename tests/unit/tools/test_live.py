"""How a run is followed: step lines as they grow, and what is said where there is no terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from adaptersync_core.config import load_config
from adaptersync_tools import live
from adaptersync_tools.live import Live
from adaptersync_tools.servers import HOST
from adaptersync_tools.up import free_ports

STEP = '{"step": %d, "reward": 0.5, "ratio": 1.001, "behind": 1}\n'


def test_whole_lines_are_followed_and_a_lost_server_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "PLAIN_S", 0.0)
    said = io.StringIO()
    lines = tmp_path / "steps.jsonl"
    (port,) = free_ports(1)
    config = load_config(environment={"ADAPTERSYNC_REDIS__CONTROL_URL": f"redis://{HOST}:{port}/0"})
    with Live(Console(file=said, width=200), config, run="my-run", steps=9, lines=lines) as following:
        assert following.look() == 0  # the trainer has not begun
        lines.write_text(STEP % 1 + STEP % 2 + '{"step": 3, "rew')
        assert following.look() == 2
        assert following.look() == 2  # half a line is none
        lines.write_text(STEP % 1 + STEP % 2 + STEP % 3)
        assert following.look() == 3
    figures = "reward 0.50  ratio 1.001  behind 1  (control server does not answer)"
    assert said.getvalue().splitlines() == [f"step 2/9  {figures}", f"step 3/9  {figures}"]
