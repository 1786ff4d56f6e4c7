"""The next release, as the one before meets it: what it stores has fields that nobody knew when that was written."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import adaptersync
import adaptersync_core
import adaptersync_tools
from adaptersync_core.errors import AdapterSyncError

PACKAGES = {
    package.__name__: Path(package.__file__ or "").parent
    for package in (adaptersync, adaptersync_core, adaptersync_tools)
}
GROWN = {
    "Table": "adaptersync_core/table.py",
    "Row": "adaptersync_core/rollouts.py",
    "RouterReport": "adaptersync_core/records.py",
}
# written whatever it is: what is left out as its default would grow nothing
FIELD = '    {name}: str = __import__("msgspec").field(default_factory=lambda: "{name}")\n'


class ReleaseFailed(AdapterSyncError):
    code = "release-failed"


def next_release(directory: Path) -> str:
    """Make it there, of what runs here; returns its PYTHONPATH."""
    for name, package in PACKAGES.items():
        shutil.copytree(package, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    for kind, file in GROWN.items():
        path = directory / file
        text, found = re.subn(
            rf"^class {kind}\(.*\):\n", rf"\g<0>{FIELD.format(name=new_field(kind))}", path.read_text(), flags=re.M
        )
        if found != 1:
            raise ReleaseFailed("no such class to grow", kind=kind, file=file)
        path.write_text(text)
    return str(directory)


def new_field(kind: str) -> str:
    return f"next_of_{kind.lower()}"
