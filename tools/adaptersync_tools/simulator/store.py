"""A mounted store that lags, forgets and tears, over a real directory: for tests of what reads from one.

It misbehaves only for those who read through it; the directory itself stays whole. Reads go through `View`,
which is `adaptersync_core.store.Reader` with the two other questions one can ask of a mount.
"""

from __future__ import annotations

import io
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol

from msgspec import Struct

from adaptersync_core.store import Reader


class View(Reader, Protocol):
    """What a mount answers. All three raise or return as the real calls do; each of them is a look."""

    def open(self, path: Path) -> BinaryIO: ...
    def exists(self, path: Path) -> bool: ...
    def listdir(self, path: Path) -> list[str]: ...


class Mount(Struct, frozen=True, kw_only=True):
    """How the mount of the store at `root` behaves on one host; see LaggingView."""

    root: str
    visibility_delay_s: float = 0.0
    negative_ttl_s: float = 0.0

    def view(self) -> LaggingView:
        """As mounted now: what is there already shows."""
        return LaggingView(
            Path(self.root), visibility_delay_s=self.visibility_delay_s, negative_ttl_s=self.negative_ttl_s
        )


class LaggingView:
    """A view of `root` in which

    - a file or directory that came into being after the view did shows up `visibility_delay_s` later,
    - a look at something absent is remembered, by the first name of its path that is missing: it stays absent for
      `negative_ttl_s` from that first look, with all that is under it (a listing does not ask by name, so it is not
      deceived),
    - files named to `tear` are short and files named to `corrupt` have a wrong byte, until `heal`.

    `clock` is wall time, because the age of a file is. `looks` counts what was asked by name.
    """

    def __init__(
        self,
        root: Path,
        *,
        visibility_delay_s: float = 0.0,
        negative_ttl_s: float = 0.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.looks: Counter[Path] = Counter()
        self._root = root
        self._delay_s = visibility_delay_s
        self._ttl_s = negative_ttl_s
        self._clock = clock
        self._born: dict[Path, float] = {
            Path(directory, name): 0.0 for directory, _, files in os.walk(root) for name in ("", *files)
        }
        self._absent_until: dict[Path, float] = {}
        self._torn: dict[Path, int] = {}
        self._corrupt: dict[Path, int] = {}

    def tear(self, path: Path, size: int) -> None:
        """Let only the first `size` bytes of a file be there."""
        self._torn[path] = size

    def corrupt(self, path: Path, offset: int = 0) -> None:
        """Invert the byte at `offset`."""
        self._corrupt[path] = offset

    def heal(self, path: Path) -> None:
        self._torn.pop(path, None)
        self._corrupt.pop(path, None)

    def open(self, path: Path) -> BinaryIO:
        if not self._look(path):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        if path not in self._torn and path not in self._corrupt:
            return path.open("rb")
        content = bytearray(path.read_bytes())
        if path in self._corrupt:
            content[self._corrupt[path]] ^= 0xFF
        return io.BytesIO(content[: self._torn.get(path, len(content))])

    def exists(self, path: Path) -> bool:
        return self._look(path)

    def listdir(self, path: Path) -> list[str]:
        if not self._look(path):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return [name for name in sorted(os.listdir(path)) if self._visible(path / name)]

    def _look(self, path: Path) -> bool:
        """Resolve a path one name at a time, as a mount does, remembering the first that is missing."""
        self.looks[path] += 1
        now = self._clock()
        here = self._root
        for name in path.relative_to(self._root).parts:
            here = here / name
            if self._absent_until.get(here, 0.0) > now:
                return False
            self._absent_until.pop(here, None)
            if not self._visible(here):
                if self._ttl_s:
                    self._absent_until[here] = now + self._ttl_s
                return False
        return True

    def _visible(self, path: Path) -> bool:
        try:
            changed = path.stat().st_ctime
        except OSError:
            return False
        # Change time moves with every write, and a directory's with what is put into it, so the first one seen is kept.
        born = self._born.setdefault(path, changed)
        return self._clock() >= born + self._delay_s
