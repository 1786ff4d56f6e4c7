"""Connections to replicas, kept for the next request: the newest that is idle is taken first, the rest grow old.

What is asked on one that turns out to have been closed meanwhile is asked again on a new one, once, and only if that
shows soon and not a byte of an answer has come. Knows no replica's name and repeats nothing else: that is for the
caller to decide.
"""

from __future__ import annotations

import asyncio
import errno
import re
import ssl
from collections.abc import Sequence
from functools import lru_cache
from urllib.parse import urlsplit

from msgspec import Struct

from adaptersync.router.connection import (
    Answer,
    ConnectFailed,
    Connection,
    ConnectTimedOut,
    Gone,
    NoRoom,
    OnAsked,
    TimedOut,
    Unanswered,
    Unsendable,
)
from adaptersync.router.deadlines import Deadlines

IDLE_S = 4.0  # shorter than the 5 s after which vLLM's server closes
STALE_S = 1.0  # one that had been closed shows it sooner; later, what was asked may be what ended the other side
IDLE = 512  # connections to one replica that are kept without use

_OWN = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS})  # nobody else's fault
_TARGET = re.compile(r"/[!-~]*")


class Origin(Struct, frozen=True):
    """Where a replica listens. `name` is what it is called in a request, `prefix` stands before every target."""

    host: str
    port: int
    secure: bool
    name: bytes
    prefix: str


@lru_cache(maxsize=1024)
def origin(url: str) -> Origin:
    """ConnectFailed for what is no address of an HTTP server."""
    try:
        parts = urlsplit(url)
        port = parts.port
        name = parts.netloc.encode("ascii")
    except ValueError as error:
        raise ConnectFailed(f"address is not one: {error}") from error
    prefix = parts.path.rstrip("/")
    known = parts.scheme in ("http", "https") and parts.hostname and parts.username is None and port != 0
    if not known or not (not prefix or _TARGET.fullmatch(prefix)):
        raise ConnectFailed(f"address is not that of an HTTP server: {url.rpartition('@')[2]}")
    secure = parts.scheme == "https"
    return Origin(parts.hostname or "", port or (443 if secure else 80), secure, name, prefix)


class _Place:
    """One address: how many connections there are, or are being made, and which of them are idle, the newest last."""

    __slots__ = ("idle", "open")

    def __init__(self) -> None:
        self.open = 0
        self.idle: list[Connection] = []


class Connections:
    """To all replicas of one router; `most` may be open to each.

    `tls` is for addresses with https; without one, the system's certificates are trusted.
    """

    def __init__(self, *, connect_timeout_s: float, most: int, tls: ssl.SSLContext | None = None) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._most = most
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._places: dict[str, _Place] = {}  # by address
        self._deadlines = Deadlines()
        self._sweeping: asyncio.TimerHandle | None = None
        self._closed = False
        self._empty = asyncio.Event()

    async def post(
        self,
        url: str,
        target: str,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes,
        within_s: float,
        asked: OnAsked = lambda answer: None,
    ) -> Answer:
        """The answer to a POST, once its head is there; all of it must be within `within_s`, or it is TimedOut.

        Host and length are added to the headers. Whatever else goes wrong is another ReplicaError.

        `asked` gets the answer before it is asked for, to `fail` it; twice, where it is asked for again.
        """
        if within_s <= 0:
            raise TimedOut("there is no time left")
        where = origin(url)
        head = _head(where, target, headers, len(body))
        deadline = self._loop.time() + within_s
        connection = self._idle(url)
        if connection is None:
            connection = await self._connect(url, where, deadline)
            return await connection.ask(head, body, deadline, asked)
        asked_at = self._loop.time()
        try:
            return await connection.ask(head, body, deadline, asked)
        except Unanswered as error:
            if self._loop.time() - asked_at > STALE_S:
                raise
            unanswered = str(error)  # it may have been closed before it was asked; kept, the error would keep the body
        try:
            connection = await self._connect(url, where, deadline)
        except ConnectFailed as error:
            raise Gone(f"{unanswered}; and now: {error}") from error
        return await connection.ask(head, body, deadline, asked)

    async def close(self) -> None:
        """Close the idle ones, and each of the others when its answer has ended; waits until all are closed."""
        self._closed = True
        if self._sweeping is not None:
            self._sweeping.cancel()
        for place in self._places.values():
            for connection in place.idle:
                connection.close()
        while self._places:
            self._empty.clear()
            await self._empty.wait()

    def counts(self, url: str) -> tuple[int, int]:
        """How many connections there are to this address, and how many of them are idle."""
        place = self._places.get(url)
        return (place.open, len(place.idle)) if place else (0, 0)

    def _idle(self, url: str) -> Connection | None:
        place = self._places.get(url)
        oldest = self._loop.time() - IDLE_S
        while place and place.idle:
            connection = place.idle.pop()
            if connection.usable and connection.idle_since > oldest:
                return connection
            connection.close()
        return None

    async def _connect(self, url: str, where: Origin, deadline: float) -> Connection:
        place = self._places.setdefault(url, _Place())
        if place.open >= self._most:
            raise NoRoom(f"{place.open} to this replica are open")
        connection = Connection(
            lambda connection: self._ready(place, connection),
            lambda connection: self._gone(url, place, connection),
            self._deadlines,
        )
        place.open += 1
        made = False
        until = self._loop.time() + self._connect_timeout_s
        try:
            async with asyncio.timeout_at(min(until, deadline)):
                await self._loop.create_connection(
                    lambda: connection,
                    where.host,
                    where.port,
                    ssl=await self._trust() if where.secure else None,
                )
                made = True
        except TimeoutError as error:
            if until > deadline:
                raise TimedOut("there was no time left to connect") from error
            raise ConnectTimedOut("connecting took too long") from error
        except (OSError, UnicodeError) as error:
            failed = NoRoom if isinstance(error, OSError) and error.errno in _OWN else ConnectFailed
            raise failed(str(error) or type(error).__name__) from error
        finally:
            if not made:
                connection.give_up()
        return connection

    async def _trust(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = await asyncio.to_thread(ssl.create_default_context)  # reads files
        return self._tls

    def _ready(self, place: _Place, connection: Connection) -> None:
        if self._closed or len(place.idle) >= IDLE:
            connection.close()
            return
        connection.idle_since = self._loop.time()
        place.idle.append(connection)
        if self._sweeping is None:
            self._sweeping = self._loop.call_at(connection.idle_since + IDLE_S, self._sweep)

    def _gone(self, url: str, place: _Place, connection: Connection) -> None:
        place.open -= 1
        if connection in place.idle:
            place.idle.remove(connection)
        if not place.open and self._places.get(url) is place:
            del self._places[url]
            if not self._places:
                self._empty.set()

    def _sweep(self) -> None:
        """Close what has been idle for long enough; look again when the next one will have been."""
        self._sweeping = None
        oldest = self._loop.time() - IDLE_S
        waiting = []
        for place in self._places.values():
            while place.idle and place.idle[0].idle_since <= oldest:
                place.idle.pop(0).close()
            if place.idle:
                waiting.append(place.idle[0].idle_since)
        if waiting:
            self._sweeping = self._loop.call_at(min(waiting) + IDLE_S, self._sweep)


@lru_cache(maxsize=1024)
def _first_lines(where: Origin, target: str) -> bytes:
    if not _TARGET.fullmatch(target):
        raise Unsendable("path or query has characters that must be escaped")
    return b"POST %b HTTP/1.1\r\nhost: %b\r\n" % (f"{where.prefix}{target}".encode(), where.name)


def _head(where: Origin, target: str, headers: Sequence[tuple[bytes, bytes]], length: int) -> bytes:
    """Unsendable when a part of it would be read as something else."""
    lines = [b"%b: %b\r\n" % pair for pair in headers]
    head = b"%b%bcontent-length: %d\r\n\r\n" % (_first_lines(where, target), b"".join(lines), length)
    ends = len(headers) + 4
    if head.count(b"\n") != ends or head.count(b"\r") != ends or b"\0" in head:
        raise Unsendable("a header has the end of a line in it")
    return head
