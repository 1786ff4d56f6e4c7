"""Telling systemd how a service does: the protocol of `sd_notify`, of which four words are enough.

READY=1 is said by a service that serves, once; WATCHDOG=1 by the loop without which it would not, so that systemd
starts a stuck one again. Before it is ready the same loop asks for more time to start: waiting for Redis or a model is
no failure, being stuck is. Nothing is said where nobody listens, and nothing waits for the listener.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import MutableMapping

SOCKET, INTERVAL, PROCESS = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"
EXTENSION_S = 60.0  # how much longer a start may take from each time on that its loop turned
PARTS = 4  # signs of life in one interval of the watchdog


class Notifier:
    """What this process says of itself; a child of it, forked or started, says nothing."""

    def __init__(self, address: str = "", *, watchdog_s: float = 0.0) -> None:
        self._process = os.getpid()
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._watchdog_s = watchdog_s
        self._alive_at = float("-inf")
        self._line = ""
        self._said: set[str] = set()

    @classmethod
    def take(cls, environment: MutableMapping[str, str]) -> Notifier:
        """The one that systemd asks for, if it does. The variables go: what is started from here must not speak for
        us."""
        address = environment.pop(SOCKET, "")
        interval, process = environment.pop(INTERVAL, ""), environment.pop(PROCESS, "")
        watched = interval.isdecimal() and process in ("", str(os.getpid()))
        return cls(address, watchdog_s=int(interval) / 1e6 if watched else 0.0)

    @property
    def is_ready(self) -> bool:
        return "READY=1" in self._said

    def ready(self) -> None:
        """It serves. Said again, nothing happens."""
        self._once("READY=1")

    def stopping(self) -> None:
        """It has begun to end, and may take its time."""
        self._once("STOPPING=1")

    def status(self, line: str) -> None:
        """One line for who asks `systemctl status`."""
        line = " ".join(line.split())
        if line != self._line:
            self._line = line
            self._send(f"STATUS={line}")

    def alive(self) -> None:
        """The loop that must turn has turned. As often as it likes: what is sent is bounded."""
        interval_s, word = self._watchdog_s, "WATCHDOG=1"
        if not self.is_ready:
            interval_s, word = EXTENSION_S, f"EXTEND_TIMEOUT_USEC={EXTENSION_S * 1e6:.0f}"
        now = time.monotonic()
        if interval_s and now - self._alive_at >= interval_s / PARTS:
            self._alive_at = now
            self._send(word)

    def _once(self, word: str) -> None:
        if word not in self._said:
            self._said.add(word)
            self._alive_at = float("-inf")  # what the next sign of life says is another thing
            self._send(word)

    def _send(self, text: str) -> None:
        if not self._address or os.getpid() != self._process:
            return
        # a full socket or a listener that has gone is not our trouble
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
            to.setblocking(False)
            to.sendto(text.encode(), self._address)


class Pulse:
    """One sign of life for several loops: it is given when each of them has turned since the last."""

    def __init__(self, notifier: Notifier, *loops: str) -> None:
        self._notifier = notifier
        self._loops = frozenset(loops)
        self._turned: set[str] = set()

    def beat(self, loop: str) -> None:
        self._turned.add(loop)
        if self._turned >= self._loops:
            self._turned.clear()
            self._notifier.alive()
