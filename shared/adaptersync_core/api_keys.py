"""Keys that clients show, and what each may do; kept as a file of their hashes.

One key a line, `name scopes sha256`, as `adaptersync api-key` writes them: who reads the file learns no key. Keys are
long and drawn by lot, so one plain hash is enough and costs a microsecond. The file is looked at once a second; while
it cannot be read, or is not one, the keys that were known stay, and the log says so.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from msgspec import Struct

from adaptersync_core.errors import ConfigError
from adaptersync_core.identity import check_name

Scope = Literal["rollout", "publish", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
LOOK_S = 1.0
PREFIX = "as-"  # by which one that leaked is recognised

_HASH = re.compile(r"[0-9a-f]{64}")

log = logging.getLogger(__name__)


class ApiKey(Struct, frozen=True):
    """`admin` includes the other scopes."""

    name: str
    scopes: frozenset[str]
    sha256: bytes

    def may(self, scope: str) -> bool:
        return scope in self.scopes or "admin" in self.scopes

    def line(self) -> str:
        return f"{self.name} {','.join(scope for scope in SCOPES if scope in self.scopes)} {self.sha256.hex()}\n"


def new_key(name: str, scopes: Sequence[str]) -> tuple[str, ApiKey]:
    """A key, to be told once, and what is kept of it."""
    text = PREFIX + secrets.token_urlsafe(32)
    return text, ApiKey(check_name("key", name), frozenset(scopes), _hash(text.encode()))


def parse(text: str) -> tuple[ApiKey, ...]:
    """ConfigError names the line, and nothing that is in it: it may hold a key by mistake."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        scopes = frozenset(words[1].split(",")) if len(words) == 3 else frozenset()
        if not scopes or not scopes <= set(SCOPES) or not _HASH.fullmatch(words[2]):
            raise ConfigError(
                "line is none of: name, scopes with commas, sha256 in hex",
                next_step=f"write it with adaptersync api-key; scopes are {' '.join(SCOPES)}",
                line=number,
            )
        found.append(ApiKey(words[0], scopes, bytes.fromhex(words[2])))
    return tuple(found)


class ApiKeys:
    """The keys of one file."""

    def __init__(self, path: Path) -> None:
        """ConfigError when it cannot be read: without it nobody could be let in, or everybody would be."""
        self._path = path
        self._mark, self._known = self._read()
        self._complained = False
        self._emptied: tuple[int, int, int] | None = None

    def who(self, authorization: bytes) -> ApiKey | None:
        """Whose key this header's is. All are compared, in the time that all take."""
        scheme, _, shown = authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        shown_hash, found = _hash(shown.strip()), None
        for key in self._known:
            if hmac.compare_digest(key.sha256, shown_hash):
                found = key
        return found

    async def follow(self) -> None:
        """Read the file again whenever it is another; runs until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await asyncio.to_thread(self.look)

    def look(self) -> None:
        try:
            if self._seen() == self._mark:
                return
            mark, known = self._read()
            if self._known and not known and mark != self._emptied:
                self._emptied = mark  # as it is while somebody writes it; nobody is known if the next look finds it so
                return
            self._mark, self._known = mark, known
            log.info("%d API keys are known now", len(self._known))
            self._complained = False
        except (OSError, ConfigError) as error:
            if not self._complained:
                log.error("API keys stay as they were: %s", error)
            self._complained = True

    def _read(self) -> tuple[tuple[int, int, int], tuple[ApiKey, ...]]:
        try:
            return self._seen(), parse(self._path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ConfigError(f"API keys cannot be read: {reason}", file=str(self._path)) from error

    def _seen(self) -> tuple[int, int, int]:
        seen = self._path.stat()
        return seen.st_mtime_ns, seen.st_size, seen.st_ino


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def bearer(path: str) -> dict[str, str]:
    """The header that shows the key in a file; none without a file. ConfigError when it cannot be shown."""
    if not path:
        return {}
    return {"Authorization": f"Bearer {read_secret(Path(path))}"}


def read_secret(path: Path) -> str:
    """One line of printable characters; ConfigError names the file and never what is in it."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"secret cannot be read: {reason}", file=str(path)) from error
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise ConfigError("secret must be one word of ASCII characters", file=str(path))
    return text
