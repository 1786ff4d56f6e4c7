"""The token with which an agent passes its engine's door.

Each start of the agent makes a new one, which shuts out whatever an older agent still has on its way. Agent and engine
share the file and no other secret.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from adaptersync_core.errors import ConfigError
from adaptersync_core.own_place import foreign_part


def new_token(file: str) -> str:
    """Make the present token and leave it in `file`, for owner and group only; nothing where there is no door."""
    if not file:
        return ""
    token = secrets.token_urlsafe(32)
    path = Path(file)
    scratch = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        if part := foreign_part(path.parent):
            raise ConfigError(
                "token would lie in a place of somebody else's",
                next_step="remove it, or set engine.run_path to a directory of your own",
                key="agent.token_file",
                place=str(part),
            )
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
        with os.fdopen(descriptor, "w") as out:
            out.write(token)
        scratch.rename(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise ConfigError(f"token cannot be written: {error.strerror}", key="agent.token_file", path=file) from error
    return token
