"""What runs on this machine."""

from __future__ import annotations

import os
from pathlib import Path

NUL = bytes(1)


def family(directory: Path) -> list[str]:
    """Command lines of every process that speaks of `directory`, or was started by one that does."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = ((process / name).read_bytes() for name in ("cmdline", "environ"))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if str(directory).encode() in command + environment and process.name != str(os.getpid()):
            found.append(f"{process.name} {command.replace(NUL, b' ').decode()[:150]}")
    return found
