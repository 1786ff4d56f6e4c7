"""Every write that decides anything, as one Lua script each: validate first, write last, safe to repeat.

Each script says in its head what its keys, arguments and reply are. A refusal is a reply, not an error: an array whose
first element is the word for it.
"""

from __future__ import annotations

import hashlib
from importlib import resources


class Script:
    """One script, by name; its text is read when the object is made."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.source = resources.files(__name__).joinpath(f"{name}.lua").read_text(encoding="utf-8")
        # the server names a script by its SHA-1; nothing is protected by it
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()
