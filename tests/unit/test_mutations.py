"""The suite can fail: each rule in tests/data/mutations.toml, broken in a copy of the sources, turns its test red.

Minutes rather than seconds, so it runs when asked for: tools/mutate.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from support.source import REPOSITORY

FOUND: list[dict[str, str]] = tomllib.loads((REPOSITORY / "tests/data/mutations.toml").read_text())["mutation"]
ROOTS = ("services", "shared", "tools")
FAILED = 1  # pytest's exit code for tests that failed; 2 and more mean that it could not run them


def test_the_list_knows_the_rules_as_they_are() -> None:
    for mutation in FOUND:
        text = (REPOSITORY / mutation["file"]).read_text()
        assert text.count(mutation["old"]) == 1, f"rewritten: {mutation['breaks']}"
        module, _, name = mutation["test"].partition("::")
        assert f"def {name}(" in (REPOSITORY / module).read_text(), f"no such test: {mutation['test']}"


@pytest.mark.mutation
@pytest.mark.parametrize("mutation", FOUND, ids=[one["breaks"] for one in FOUND])
def test_a_broken_rule_is_noticed(mutation: dict[str, str], tmp_path: Path) -> None:
    for root in ROOTS:
        shutil.copytree(REPOSITORY / root, tmp_path / root, ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / mutation["file"]
    path.write_text(path.read_text().replace(mutation["old"], mutation["new"]))
    packages = [str(tmp_path / root) for root in ROOTS]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", mutation["test"]],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(packages), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=55,
    )
    assert run.returncode == FAILED, run.stdout[-2000:]
