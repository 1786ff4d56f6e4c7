"""Putting rendered files below a root: all or none, and never over a file that is not ours."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from adaptersync_core.errors import ConfigError, StoreError
from adaptersync_tools.systemd.units import MARK

OLDEST = 252  # Debian 12 and RHEL 9; what units say is known to it
ASK_S = 10.0


def systemd_version() -> int:
    """Of this host; where there is none, the oldest that units are made for."""
    tool = shutil.which("systemctl") or shutil.which("systemd-analyze")
    if tool is None:
        return OLDEST
    said = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=ASK_S, check=False)  # noqa: S603
    found = re.match(r"systemd (\d+)", said.stdout)
    return int(found[1]) if found else OLDEST


def look(files: Mapping[str, str], root: Path) -> dict[str, str]:
    """What writing would do to each: new, changed or same; ConfigError where a file is not ours."""
    states = {}
    for place, text in files.items():
        target = root / place
        try:
            there = target.read_text()
        except FileNotFoundError:
            states[place] = "new"
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"file in the way cannot be read: {error}", path=str(target)) from error
        if not there.startswith(MARK):
            raise ConfigError(
                "a file that is not ours is in the way; nothing was written", next_step="move it", path=str(target)
            )
        states[place] = "same" if there == text else "changed"
    return states


def write(files: Mapping[str, str], root: Path) -> dict[str, str]:
    """Write what is new or changed, each file whole; says which is which."""
    if root.resolve() == Path("/") and os.geteuid() != 0:
        raise ConfigError("only root may write there", next_step="use sudo, or --dry-run", root="/")
    states = look(files, root)
    for place, state in states.items():
        if state == "same":
            continue
        target = root / place
        scratch = target.with_name(f".{target.name}.new")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            scratch.write_text(files[place])
            scratch.chmod(0o644)
            scratch.rename(target)
        except OSError as error:
            scratch.unlink(missing_ok=True)
            raise StoreError(f"file cannot be written: {error.strerror}", path=str(target)) from error
    return states
