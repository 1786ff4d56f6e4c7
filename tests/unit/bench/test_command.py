"""Every bench speaks as the other commands do."""

from __future__ import annotations

import pytest

from adaptersync_tools.cli import main
from adaptersync_tools.cli.bench import bench


@pytest.mark.parametrize("name", sorted(bench.commands))
def test_help_teaches(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", name, "--help"]) == 0
    out = capsys.readouterr().out
    assert "Example" in out
    assert f"adaptersync bench {name}" in out
    assert "--json" in out
