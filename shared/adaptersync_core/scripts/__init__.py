"""Every write that decides anything, as one Lua script each: validate first, write last, safe to repeat.

Each script says in its head what its keys, arguments and reply are. A refusal is a reply, not an error: an array whose
first element is the word for it.
"""

from __future__ import annotations

import hashlib
from importlib import resources

_WITH = "-- with "


class Script:
    """One script, by name; its text is read when this is made. A first line `-- with FILE` puts that before it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.source = _read(f"{name}.lua")
        if self.source.startswith(_WITH):
            self.source = _read(self.source.partition("\n")[0].removeprefix(_WITH)) + self.source
        # the server names a script by its SHA-1; nothing is protected by it
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()


def _read(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")
