"""One connection to a Redis server for many small calls a second: what one tick of the loop asks is written together.

For callers that have something to do when the server is away: a call then fails at once, and the connection is made
anew in the background. Order is kept; nothing is repeated. The general client of `redis` is for everything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

import hiredis

from adaptersync_core.address import credentials, trust, where
from adaptersync_core.errors import ConfigError, ControlError, ControlUnavailable
from adaptersync_core.scripts import Script

RETRY_S = 0.25  # between attempts to connect
HELD_UP_S = 0.02  # a loop that looks later than this after its time was busy itself: the server may have answered

log = logging.getLogger(__name__)

Argument = str | bytes | int | float


class Pipe:
    """One server. Every failure to reach it is ControlUnavailable; what it refuses is ControlError.

    A call that is not answered within `timeout_s`, or twice that where this loop was held up meanwhile, ends the
    connection: later replies could not be told apart.
    """

    def __init__(self, url: str, *, name: str, timeout_s: float) -> None:
        self._parts = urlsplit(url)
        if self._parts.scheme not in ("redis", "rediss"):
            raise ConfigError("address must begin with redis:// or rediss://", url=where(url))
        self.where = where(url)
        self._credentials = credentials(url)
        self._url = url
        self._tls: ssl.SSLContext | None = None
        self._name = name
        self._timeout_s = timeout_s
        self._line: _Line | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._closed = False
        self._complained = False  # of a call that nobody waits for, in this life of the connection

    @property
    def connected(self) -> bool:
        return self._line is not None and not self._line.broken

    async def connect(self) -> None:
        """One attempt to connect, awaited; ControlUnavailable when it fails."""
        try:
            async with asyncio.timeout(self._timeout_s):
                self._line = await self._open()
            self._complained = False
        except (OSError, TimeoutError) as error:
            raise self._away(str(error) or "no answer in time") from error

    async def call(self, *arguments: Argument) -> Any:
        return await self._live_line().send(arguments)

    def tell(self, *arguments: Argument) -> None:
        """A call that nobody waits for; the first that a server refuses is logged."""
        line = self._line
        if line is None or line.broken:
            self._reconnect()
        else:
            line.send(arguments).add_done_callback(self._unheeded)

    async def calls(self, commands: Iterable[Sequence[Argument]]) -> list[Any]:
        """Many calls in one go; each reply, or the ControlError that took its place."""
        return await self._live_line().send_all(commands)

    async def script(self, call: ScriptCall) -> Any:
        try:
            return await self._live_line().send_packed(call.packed)
        except ControlError as error:
            if "NOSCRIPT" not in error.reason:
                raise
        return await self.call("EVAL", call.script.source, *call.arguments)

    def _live_line(self) -> _Line:
        line = self._line
        if line is None or line.broken:
            self._reconnect()
            raise self._away("not connected")
        return line

    def _unheeded(self, future: asyncio.Future[Any]) -> None:
        error = None if future.cancelled() else future.exception()
        # that a server is away is said where it is connected to anew
        if error is not None and not isinstance(error, ControlUnavailable) and not self._complained:
            self._complained = True
            log.warning("what nobody waits for is not done: %s; redis=%s", error, self.where)

    async def close(self) -> None:
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._connecting
        if self._line is not None:
            self._line.end("closed")

    def _reconnect(self) -> None:
        if self._connecting is None and not self._closed:
            self._connecting = asyncio.create_task(self._until_connected(), name=f"connect {self.where}")

    async def _until_connected(self) -> None:
        said = False
        while True:
            try:
                await self.connect()
            except ControlError as error:
                if not said:
                    log.warning("%s", error)
                    said = True
                await asyncio.sleep(RETRY_S)
            else:
                self._connecting = None
                return

    async def _open(self) -> _Line:
        parts = self._parts
        known = self._credentials
        password = await asyncio.to_thread(known.password) if known.file else known.given
        if parts.scheme == "rediss" and self._tls is None:
            self._tls = await asyncio.to_thread(trust, self._url)  # reads files
        loop = asyncio.get_running_loop()
        _, line = await loop.create_connection(
            lambda: _Line(self.where, self._timeout_s), parts.hostname or "127.0.0.1", parts.port or 6379, ssl=self._tls
        )
        try:
            if password:
                await line.send(("AUTH", *((known.user,) if known.user else ()), password))
            if parts.path.strip("/"):
                await line.send(("SELECT", parts.path.strip("/")))
            await line.send(("CLIENT", "SETNAME", self._name))
        except BaseException:
            line.end("handshake failed")
            raise
        return line

    def _away(self, reason: str) -> ControlUnavailable:
        return ControlUnavailable(f"Redis cannot be reached: {reason}", next_step="check the server", redis=self.where)


class ScriptCall:
    """A call of a script, packed once: the same one may be made again and again."""

    __slots__ = ("arguments", "packed", "script")

    def __init__(self, script: Script, keys: Sequence[str], arguments: Sequence[Argument]) -> None:
        self.script = script
        self.arguments: tuple[Argument, ...] = (len(keys), *keys, *arguments)
        self.packed = _pack(("EVALSHA", script.sha, *self.arguments))


class _Waiting:
    """One call, or `count` of them whose `replies` are told together."""

    __slots__ = ("count", "future", "replies", "since")

    def __init__(
        self, future: asyncio.Future[Any], since: float, count: int = 1, replies: list[Any] | None = None
    ) -> None:
        self.future = future
        self.since = since
        self.count = count
        self.replies = replies


def _pack(arguments: tuple[Argument, ...]) -> bytes:
    packed: bytes = hiredis.pack_command(arguments)  # type: ignore[arg-type]  # numbers are fine, its stub is narrow
    return packed


class _Line(asyncio.Protocol):
    """One life of the connection: replies answer the oldest waiting call."""

    def __init__(self, where: str, timeout_s: float) -> None:
        self.broken = False
        self._where = where
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(encoding="utf-8", errors="backslashreplace", replyError=_refused)
        self._waiting: deque[_Waiting] = deque()
        self._out: list[bytes] = []
        self._watch: asyncio.TimerHandle | None = None
        self._excused = False  # since the last reply: it was this loop that was late
        self._transport: asyncio.WriteTransport | None = None

    def send(self, arguments: tuple[Argument, ...]) -> asyncio.Future[Any]:
        return self.send_packed(_pack(arguments))

    def send_packed(self, packed: bytes) -> asyncio.Future[Any]:
        """One call."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self._send(packed, _Waiting(future, self._loop.time()))
        return future

    def send_all(self, commands: Iterable[Sequence[Argument]]) -> asyncio.Future[list[Any]]:
        """Their replies together, each an error where there was one: a future for each would cost more than it."""
        future: asyncio.Future[list[Any]] = self._loop.create_future()
        packed = [_pack(tuple(command)) for command in commands]
        if packed:
            self._send(b"".join(packed), _Waiting(future, self._loop.time(), len(packed), []))
        else:
            future.set_result([])
        return future

    def _send(self, packed: bytes, waiting: _Waiting) -> None:
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(packed)
        self._waiting.append(waiting)
        if self._watch is None:
            self._watch = self._loop.call_later(self._timeout_s, self._check)

    def end(self, reason: str) -> None:
        """Nothing more will come: every waiting call fails."""
        self.broken = True
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._transport is not None:
            self._transport.abort()
        while self._waiting:
            future = self._waiting.popleft().future
            if not future.done():
                future.set_exception(ControlUnavailable(f"Redis cannot be reached: {reason}", redis=self._where))

    def connection_made(self, transport: asyncio.WriteTransport) -> None:  # type: ignore[override]
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.end(str(error) if error else "connection closed by the server")

    def data_received(self, data: bytes) -> None:
        self._excused = False
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not False:
                waiting = self._waiting[0]
                if waiting.replies is not None:
                    waiting.replies.append(reply)
                    if len(waiting.replies) < waiting.count:
                        continue
                    reply = waiting.replies
                self._waiting.popleft()
                future = waiting.future
                if future.done():
                    continue
                if isinstance(reply, ControlError):
                    future.set_exception(reply)
                else:
                    future.set_result(reply)
        except (hiredis.ProtocolError, IndexError) as error:
            self.end(f"answer is not Redis protocol: {error}")

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._transport is not None and not self.broken:
            self._transport.write(b"".join(out))

    def _check(self) -> None:
        self._watch = None
        if self._waiting:
            now, due = self._loop.time(), self._waiting[0].since + self._timeout_s
            if due <= now and not self._excused and now - due > HELD_UP_S:
                self._excused = True
                due = now + self._timeout_s
            if due <= now:
                self.end("no answer in time")
            else:
                self._watch = self._loop.call_at(due, self._check)


def _refused(text: str) -> ControlError:
    return ControlError.refused(text)
