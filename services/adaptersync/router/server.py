"""The router's HTTP/1.1 server: a request is handled once all of it is here, and one at a time on each connection.

`httptools` parses; what it does not bound is bounded here. Until a request is whole it costs a connection and its
bytes, so slow clients hold nobody up. When a client goes, what was asked for it is cancelled; one that only says no
more gets its answers. Knows no paths.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable
from socket import SO_ERROR, SO_LINGER, SOL_SOCKET
from struct import pack
from typing import Protocol
from urllib.parse import urlsplit, urlunsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from msgspec import Struct

from adaptersync.router.request import ROUTER_FAILED, ClientGone, Pair, Refused, Reply, Request

HEADERS = 128  # of a request
AHEAD = 8  # requests that a client may send before the first is answered; then it is not read
ARRIVE_S = 30.0  # from the first byte of a request to its last
IDLE_S = 75.0  # between two requests of a connection
STALL_S = 60.0  # in which a client takes too little of its answers for more to be written
LINGER_S = 2.0  # after a refusal what still comes is read away: an answer must not be lost to a reset
SWEEP_S = 1.0  # between two looks at the four above, and for clients that are gone
GONE_S = 0.05  # in which a client that is gone, and not only silent, has mostly refused what it was told
TOLD = 64  # connections above the limit that are told so; any more are cut
OFFER = (b"connection", b"upgrade", b"http2-settings")  # headers by which another protocol is offered
PIECES = 64  # of a body are kept as they come; after that what is small must not cost more than its bytes

log = logging.getLogger(__name__)

_RESET = pack("ii", 1, 0)  # a connection that lingers so does not end but break


class Limits(Struct, frozen=True, kw_only=True):
    """Bytes of one head and of one body, of all bodies not yet handled, and how many connections may be open."""

    head_bytes: int
    body_bytes: int
    arriving_bytes: int
    connections: int


class Service(Protocol):
    """What is served. `handle` returns the whole answer, or None when it has given it with `begin` and `write`."""

    def handle(self, request: Request) -> Awaitable[Reply | None]: ...

    def refuse(self, request: Request, error: Refused) -> Reply:
        """The answer to what is no request, or too much of one; it is known as far as it was read."""


class Server:
    """Listens where `listen` says; `stop` lets what is being handled end."""

    service: Service

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.arriving = 0  # bytes of bodies that are not whole, or wait for the request before them
        self.connections: set[_Connection] = set()
        self.stopping = False
        self.loop = asyncio.get_running_loop()
        self._listener: asyncio.Server | None = None
        self._sweeping: asyncio.TimerHandle | None = None

    async def listen(self, service: Service, host: str, port: int) -> tuple[str, int]:
        """The address. Several processes may share one."""
        self.service = service
        self._listener = await self.loop.create_server(
            lambda: _Connection(self), host, port, reuse_port=True, backlog=2048
        )
        self._sweep()
        address: tuple[str, int] = self._listener.sockets[0].getsockname()[:2]
        return address

    async def stop(self, drain_s: float) -> None:
        """Take nothing more; wait up to `drain_s` for what is being handled, then cancel it."""
        self.stopping = True
        if self._listener is not None:
            self._listener.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
        for connection in [*self.connections]:
            connection.stop()
        if self.connections:
            await asyncio.wait([connection.closed for connection in self.connections], timeout=drain_s)
        late = [*self.connections]
        for connection in late:
            connection.close()
        if late:
            await asyncio.wait([each for one in late for each in (one.closed, one.task) if each is not None])

    def _sweep(self) -> None:
        now = self.loop.time()
        for connection in [*self.connections]:
            connection.look(now)
        self._sweeping = self.loop.call_later(SWEEP_S, self._sweep)


class _Connection(asyncio.Protocol):
    """One client. A request is read while the one before is handled, but handled only after it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._parser = HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._waiting: deque[Request] = deque()  # whole, and not yet handled
        self._room: asyncio.Future[None] | None = None  # waits for room to write in
        self._stalled_since = 0.0
        self._held = False  # is not read for the moment
        self._old = False  # what is read is HTTP/1.0
        self._offers = False  # and another protocol instead
        self._broken: Refused | None = None  # nothing more is read, ever
        self._silent = False  # nothing more is said, ever
        self._since = 0.0  # when the first byte of a request came, or the connection became idle
        self._quiet = 0  # bytes since a request last got on
        self.task: asyncio.Task[None] | None = None  # handles this request:
        self._request: Request | None = None
        self.closed = server.loop.create_future()
        self._clear()

    def _clear(self) -> None:
        """Nothing of a request is here."""
        self._stage = "between"  # then "head", and "body"
        self._target = b""
        self._headers: list[Pair] = []
        self._length = 0  # of the head, so far
        self._body: list[bytes | bytearray] = []
        self._size = 0

    # for the request

    @property
    def stopping(self) -> bool:
        return self._server.stopping or (self._silent and not self._waiting)

    def send(self, data: bytes) -> None:
        if self._transport.is_closing():
            raise ClientGone("client is gone")
        self._transport.write(data)

    async def room(self) -> None:
        while self._room is not None:
            await self._room
        if self._transport.is_closing():
            raise ClientGone("client is gone")

    # for the server

    def look(self, now: float) -> None:
        """Give up what takes too long, or has nobody left to take it."""
        if self._silent and self._gone():
            self.close()
        elif self._room is not None:
            if now - self._stalled_since > STALL_S:
                self.close()
        elif self._broken is not None:
            if self.task is None and now - self._since > LINGER_S:
                self.close()
        elif self.task is None:
            between = self._stage == "between"
            if between and now - self._since > IDLE_S:
                self.close()
            elif not between and now - self._since > ARRIVE_S:
                self._refuse(Refused(408, "request did not arrive in time"))

    def stop(self) -> None:
        """Close once the client has what was written; what is being handled ends first."""
        if self.task is None:
            self._transport.close()

    def close(self) -> None:
        """Cut it; what is being handled is cancelled."""
        self._transport.abort()

    # what the transport tells

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._since = self._server.loop.time()
        self._server.connections.add(self)
        over = len(self._server.connections) - self._server.limits.connections
        if over > TOLD:
            self.close()
        elif over > 0:
            self._refuse(Refused(503, "no more connections can be open"))

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections.discard(self)
        self.closed.set_result(None)
        self._server.arriving -= self._size + sum(len(request.body) for request in self._waiting)
        self._size = 0
        self._waiting.clear()
        self.resume_writing()
        if self.task is not None:
            self.task.cancel()
        del self._parser  # which knows us

    def eof_received(self) -> bool:
        """Who is gone says no more, and so does who has only said all: the first refuses whatever it is told then.

        What cannot be told anything before its answer is there, as HTTP/1.0, is answered.
        """
        if self.task is None:
            return False
        self._silent = True
        if self._request is not None:
            self._request.promise()
        self._server.loop.call_later(GONE_S, self._look_for_it)
        return True

    def _look_for_it(self) -> None:
        if self._gone():
            self.close()

    def _gone(self) -> bool:
        """Once nothing is read any more, no loop tells of it."""
        if self._transport.is_closing():
            return False
        return bool(self._transport.get_extra_info("socket").getsockopt(SOL_SOCKET, SO_ERROR))

    def pause_writing(self) -> None:
        self._stalled_since = self._server.loop.time()
        self._room = self._server.loop.create_future()

    def resume_writing(self) -> None:
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    def data_received(self, data: bytes) -> None:
        if self._broken is not None:
            return
        if self._stage == "between" and self.task is None:
            self._since = self._server.loop.time()
        self._quiet += len(data)
        try:
            while data:
                data = self._read(data)
            if self._quiet > self._server.limits.head_bytes:
                raise Refused(431, "request does not get on")
        except Refused as error:
            self._refuse(error)
        except HttpParserError as error:
            self._refuse(_said(error))

    def _read(self, data: bytes) -> bytes:
        """Returns what is to be read anew, from a request on that offers another protocol.

        The parser ends where such a request's body would begin. We do not take it up, so it is read without the offer.
        """
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade as offer:
            said = (value.split(b",") for name, value in self._headers if name == b"connection")
            others = [option for options in said for option in options if option.strip().lower() not in OFFER]
            kept = [pair for pair in self._headers if pair[0] not in OFFER]
            if others:
                kept.append((b"connection", b",".join(others)))
            first = b"%b %b HTTP/%b" % (self._parser.get_method(), self._target, b"1.0" if self._old else b"1.1")
            self._clear()
            self._parser = HttpRequestParser(self)
            return b"\r\n".join((first, *(b"%b: %b" % pair for pair in kept), b"", data[offer.args[0] :]))
        return b""

    # what the parser tells

    def on_message_begin(self) -> None:
        self._stage = "head"

    def on_url(self, url: bytes) -> None:
        self._quiet = 0
        self._target += url
        self._grow(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._stage != "head":
            return  # a trailer
        self._quiet = 0
        self._grow(len(name) + len(value) + 4)
        self._headers.append((name.lower(), value))
        if len(self._headers) > HEADERS:
            raise Refused(431, f"request has more than {HEADERS} headers")

    def _grow(self, more: int) -> None:
        self._length += more
        if self._length > self._server.limits.head_bytes:
            raise Refused(431, f"request's head is larger than {self._server.limits.head_bytes} bytes")

    def on_headers_complete(self) -> None:
        self._stage = "body"
        self._quiet = 0
        length, coded, expects = 0, False, False
        version = self._parser.get_http_version()
        if version != "1.1" and version != "1.0":
            raise Refused(505, "HTTP/1.1 is spoken here")
        self._old = version == "1.0"
        self._offers = self._parser.should_upgrade()
        if self._offers and self._parser.get_method() != b"CONNECT":
            return
        for name, value in self._headers:
            if name == b"content-length":
                length = int(value)
            elif name == b"transfer-encoding":
                coded = True
                if self._old or value.strip().lower() != b"chunked":
                    raise Refused(501, "transfer coding is not known")
            elif name == b"expect":
                expects = value.strip().lower() == b"100-continue" and not self._old
            elif name == b"content-encoding" and value.strip().lower() != b"identity":
                raise Refused(415, "request body is compressed")
        if self._offers:
            raise Refused(400, "no other protocol is spoken here")
        self._room_for(length)
        if expects and (length or coded) and self.task is None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_chunk_header(self) -> None:
        self._quiet = 0

    def on_body(self, piece: bytes) -> None:
        self._quiet = 0
        self._room_for(self._size + len(piece))
        pieces = self._body
        if len(pieces) < PIECES:
            pieces.append(piece)
        elif len(pieces) == PIECES:
            pieces.append(bytearray(piece))
        else:
            pieces[-1] += piece
        self._size += len(piece)
        self._server.arriving += len(piece)

    def _room_for(self, size: int) -> None:
        limits = self._server.limits
        if size > limits.body_bytes:
            raise Refused(413, f"request body is larger than {limits.body_bytes} bytes")
        if self._server.arriving - self._size + size > limits.arriving_bytes:
            raise Refused(503, "too much is being received")

    def on_message_complete(self) -> None:
        if self._offers:
            return  # it is read again
        parser = self._parser
        body = bytes(self._body[0]) if len(self._body) == 1 else b"".join(self._body)
        request = Request(
            self,
            method=parser.get_method().decode(),
            target=_origin_form(self._target.decode("latin-1")),
            headers=self._headers,
            body=body,
            keeps=parser.should_keep_alive(),
            old=self._old,
        )
        self._clear()
        self._waiting.append(request)
        if self.task is None:
            self._next()
        elif len(self._waiting) >= AHEAD and not self._held:
            self._held = True
            self._transport.pause_reading()

    # handling

    def _next(self) -> None:
        request = self._request = self._waiting.popleft()
        self._server.arriving -= len(request.body)
        self.task = self._server.loop.create_task(self._handle(request))

    async def _handle(self, request: Request) -> None:
        try:
            if self._room is not None:
                await self.room()  # the client takes what it has asked for, or gets no more
            reply = await self._server.service.handle(request)
            if reply is not None:
                request.answer(reply)
        except ClientGone:
            pass
        except Exception:
            log.exception("%s %s could not be handled", request.method, request.path[:96])
            if not request.begun:
                with contextlib.suppress(ClientGone):
                    request.answer(ROUTER_FAILED)
        finally:
            self.task = self._request = None
            if not request.ended:
                # half an answer must not look like a whole one, also where the connection's end would be its own
                if not request.keeps and not self._transport.is_closing():
                    self._transport.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, _RESET)
                self._transport.abort()
            elif not request.keeps or self._transport.is_closing():
                self._transport.close()
            else:
                self._go_on()

    def _go_on(self) -> None:
        if self._server.stopping:
            self._transport.close()
            return
        if self._held and len(self._waiting) < AHEAD:
            self._held = False
            self._transport.resume_reading()
        if self._waiting:
            self._next()
        elif self._broken is not None:
            self._say(self._broken)
        elif self._silent:
            self._transport.close()
        else:
            self._since = self._server.loop.time()

    def _refuse(self, error: Refused) -> None:
        """Nothing more is read; what came before is still answered."""
        self._broken = Refused(error.status, error.reason)  # as it was raised it would keep all that led to it
        self._server.arriving -= self._size
        self._size = 0
        self._body = []
        if self.task is None:
            self._say(error)

    def _say(self, error: Refused) -> None:
        self._since = self._server.loop.time()
        if not self._transport.is_closing():
            request = Request(self, target=self._target.decode("latin-1"), headers=self._headers)
            request.answer(self._server.service.refuse(request, error))
            self._transport.write_eof()


def _said(error: HttpParserError) -> Refused:
    """What one of our callbacks has raised, or the parser itself."""
    cause = error.__context__
    return cause if isinstance(cause, Refused) else Refused(400, f"request is not HTTP: {error}")


def _origin_form(target: str) -> str:
    """Path and query: who takes us for a proxy names the host, too."""
    if target.startswith("/"):
        return target
    parts = urlsplit(target)
    return urlunsplit(("", "", parts.path or "/", parts.query, ""))
