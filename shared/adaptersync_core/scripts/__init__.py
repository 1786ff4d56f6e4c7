"""Every write that decides anything, as one Lua script each: validate first, write last, safe to repeat.

Each script says in its head what its keys, arguments and reply are. A refusal is a reply, not an error: an array whose
first element is the word for it.
"""

from __future__ import annotations

import hashlib
from importlib import resources

_FLAGS = "#!lua"
_WITH = "-- with "


class Script:
    """One script, by name; its text is read when this is made. A first line `-- with FILE` puts that before it.

    Before that may stand `#!lua`: a server whose memory is full refuses it as a whole, and not only where its first
    write needs some; or, with `flags=allow-oom`, runs it all the same.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        source, flags = _read(f"{name}.lua"), ""
        if source.startswith(_FLAGS):
            flags, _, source = source.partition("\n")
            flags += "\n"
        if source.startswith(_WITH):
            source = _read(source.partition("\n")[0].removeprefix(_WITH)) + source
        self.source = flags + source
        # the server names a script by its SHA-1; nothing is protected by it
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()


def _read(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")
