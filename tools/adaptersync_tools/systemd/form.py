"""How unit files are written: sections of lines, and words in them. Knows no unit of ours."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from adaptersync_core.errors import ConfigError

Lines = Iterable[tuple[str, str]]
Sections = Mapping[str, Lines]

# and what lies below them
SYSTEM = frozenset(("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/proc", "/sbin", "/sys", "/usr"))
# but not what lies below these
SHARED = frozenset(("/", "/opt", "/run", "/srv", *(f"/var{part}" for part in ("", "/cache", "/lib", "/log", "/spool"))))
MEMORY = "/dev/shm"  # noqa: S108 - below it is a disk like others

_PLAIN_PATH = re.compile(r"/[A-Za-z0-9._/@+:=,~-]*")


def unit(header: str, sections: Sections) -> str:
    body = (f"[{name}]\n" + "".join(f"{key}={value}\n" for key, value in lines) for name, lines in sections.items())
    return header + "\n" + "\n".join(body)


def path(value: str, key: str) -> str:
    """A path as it stands in any line. Only plain ones are taken: each kind of line quotes otherwise."""
    if not _PLAIN_PATH.fullmatch(value) or ".." in value.split("/"):
        raise ConfigError(
            "path cannot stand in a unit",
            next_step="use an absolute one of letters, digits and ._/@+:=,~-",
            key=key,
            value=value,
        )
    return value.rstrip("/") or "/"


def own(value: str, key: str) -> str:
    """A path that is given away, with its mode and its owner: no directory of the system's."""
    place = Path("/", *Path(path(value, key)).parts[1:])
    above = {str(parent) for parent in place.parents}
    if str(place) in SHARED or (SYSTEM & {str(place), *above} and MEMORY not in above):
        raise ConfigError(
            "directory is the system's: installing would give it to our users",
            next_step="name one of its own, as /var/lib/adaptersync/store",
            key=key,
            value=value,
        )
    return str(place)


def word(text: str) -> str:
    """Any text as one word of Environment=; specifiers and quotes are taken as they are."""
    if any(ord(c) < 32 or ord(c) == 127 for c in text):
        raise ConfigError("setting cannot stand in a unit: it has control characters", value=text[:96])
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") + '"'


def seconds(value: float) -> str:
    return f"{value:.0f}s"


def mebibytes(size: int) -> str:
    return f"{-(-size >> 20)}M"
