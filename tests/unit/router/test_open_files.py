"""The limit of open files, in a process of its own: it cannot be taken back."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import logging, resource, sys
from adaptersync.router.open_files import allow
logging.basicConfig(format="%(message)s")
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 1000))
allow(int(sys.argv[1]))
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("connections", "limits", "warns"),
    [(0, "64 1000", False), (100, "264 1000", False), (500, "1000 1000", True)],
)
def test_it_is_raised_as_far_as_needed_and_possible(connections: int, limits: str, warns: bool) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(connections)], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == limits
    said = "1000 open files are allowed, 500 connections of clients need 1064: raise the limit"
    assert (done.stderr.count("\n"), said in done.stderr) == (int(warns), warns)
