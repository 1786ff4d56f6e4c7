"""Whether a path is ours to trust: where everybody may write, as in /tmp, somebody else may have made it first.

Knows nothing of what lies there, and leaves to whoever runs a host what it gave to which user elsewhere.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def foreign_part(path: Path) -> Path | None:
    """The part of a path, as it is written or as links have it, that neither we nor root made where everybody may.

    None when there is no such part. OSError when the path is not there.
    """
    ours = (0, os.geteuid())
    for whole in (path.absolute(), path.resolve(strict=True)):
        for part in (whole, *whole.parents):
            if part.parent.stat().st_mode & stat.S_IWOTH and part.lstat().st_uid not in ours:
                return part
    return None
