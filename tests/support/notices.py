"""Listening as systemd does: a socket that notices who says what."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Self

from support.wait import wait_until_sync

CLI = [sys.executable, "-m", "adaptersync_tools.cli"]
_WHO = struct.Struct("iII")


class Notice(NamedTuple):
    """`process` is who said it, by the kernel's word."""

    process: int
    text: str
    at: float


class Notices:
    """`environment` is what systemd would give the service."""

    def __init__(self, watchdog_s: float = 0.0) -> None:
        self.directory = tempfile.mkdtemp(prefix="notify-")  # a socket's path must be short
        self.address = str(Path(self.directory) / "s")
        self.environment = {"NOTIFY_SOCKET": self.address}
        if watchdog_s:
            self.environment["WATCHDOG_USEC"] = str(round(watchdog_s * 1e6))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.setblocking(False)
        self._socket.bind(self.address)
        self._heard: list[Notice] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        shutil.rmtree(self.directory)

    @property
    def heard(self) -> list[Notice]:
        with contextlib.suppress(BlockingIOError):
            while True:
                data, control, _, _ = self._socket.recvmsg(4096, socket.CMSG_SPACE(_WHO.size))
                ((_, _, who),) = control
                self._heard.append(Notice(_WHO.unpack(who)[0], data.decode(), time.monotonic()))
        return self._heard

    @property
    def words(self) -> list[str]:
        return [notice.text for notice in self.heard]

    def count(self, word: str) -> int:
        return sum(text.startswith(word) for text in self.words)

    def wait(self, word: str, *, times: int = 1, timeout_s: float = 30.0) -> None:
        wait_until_sync(
            lambda: self.count(word) >= times, timeout_s=timeout_s, what=f"{word} was said; heard: {self.words}"
        )

    def silent_for(self, word: str, seconds: float) -> bool:
        """Whether nothing more of that is heard for so long; what was under way at the beginning does not count."""
        time.sleep(0.2)
        before = self.count(word)
        time.sleep(seconds)
        return self.count(word) == before


@contextlib.contextmanager
def service(
    notices: Notices, *arguments: str, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A command of ours as a unit would run it, ended with all that it started."""
    process = subprocess.Popen(
        [*CLI, *arguments],
        env={**os.environ, **notices.environment, **(environment or {})},
        start_new_session=True,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGCONT)
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
