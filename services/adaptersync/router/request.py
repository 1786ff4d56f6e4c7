"""A whole request and its answer, as whoever serves it has them. Knows no sockets and no parser: see `server`."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Protocol

from msgspec import Struct

Pair = tuple[bytes, bytes]

AUTHORIZATION = b"authorization"

_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


class Reply(Struct, frozen=True):
    """A whole answer. Its length is added to the headers, which are in lower case."""

    status: int
    headers: Sequence[Pair] = ()
    body: bytes = b""


ROUTER_FAILED = Reply(
    500,
    ((b"content-type", b"application/json"),),
    b'{"error":{"message":"router failed","type":"api_error","code":"internal_error","param":null}}',
)


class ClientGone(ConnectionError):
    """Nobody is there to take the answer, or not in time."""


class Refused(Exception):
    """A request that is not to be served, before anybody has seen it."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class Client(Protocol):
    """Whom an answer goes to."""

    @property
    def stopping(self) -> bool:
        """No further request is taken."""

    def send(self, data: bytes) -> None:
        """ClientGone when it cannot be."""

    async def room(self) -> None:
        """Wait until there is room for more; ClientGone."""


class Request:
    """A whole request; names of headers are in lower case. It answers, too: `begin`, any number of `write`, `end`."""

    __slots__ = ("_chunked", "_client", "_old", "_state", "body", "headers", "keeps", "method", "path", "target")

    def __init__(
        self,
        client: Client,
        *,
        method: str = "",
        target: str = "",
        headers: Sequence[Pair] = (),
        body: bytes = b"",
        keeps: bool = False,
        old: bool = False,
    ) -> None:
        """`old`: the client speaks HTTP/1.0. `keeps`: it goes on with this connection."""
        self._client = client
        self._old = old
        self._state = "new"
        self._chunked = False
        self.method = method
        self.target = target
        self.path = target.partition("?")[0]
        self.headers = headers
        self.body = body
        self.keeps = keeps

    def header(self, name: bytes) -> bytes:
        """Its value, or nothing."""
        for each, value in self.headers:
            if each == name:
                return value.rstrip(b" \t")
        return b""

    @property
    def begun(self) -> bool:
        return self._state != "new"

    @property
    def ended(self) -> bool:
        return self._state == "ended"

    def promise(self) -> None:
        """Tell the client that there will be an answer, or more of it, where its HTTP has a word for that."""
        if not self.begun and not self._old:
            self._client.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif self._state == "begun" and self._chunked:
            self._client.send(b"0")  # with which the next chunk's length may begin

    def begin(self, status: int, headers: Sequence[Pair], length: int | None) -> None:
        """Send the head of an answer; without a `length` the client learns of its end as HTTP has it."""
        more: list[Pair] = []
        if length is not None:
            more.append((b"content-length", b"%d" % length))
        elif not self._old:
            self._chunked = True
            more.append((b"transfer-encoding", b"chunked"))
        else:
            self.keeps = False
        self._state = "begun"
        self._client.send(self._head(status, (*headers, *more)))

    async def write(self, piece: bytes) -> None:
        """Send some of the body, at least a byte; returns when there is room for more. ClientGone."""
        self._client.send(b"%x\r\n%b\r\n" % (len(piece), piece) if self._chunked else piece)
        await self._client.room()

    def end(self) -> None:
        """The answer is whole."""
        if self._chunked:
            self._client.send(b"0\r\n\r\n")
        self._state = "ended"

    def answer(self, reply: Reply) -> None:
        """All of it at once."""
        head = self._head(reply.status, (*reply.headers, (b"content-length", b"%d" % len(reply.body))))
        self._state = "ended"
        self._client.send(head if self.method == "HEAD" else head + reply.body)

    def _head(self, status: int, headers: Sequence[Pair]) -> bytes:
        lines = [_LINES.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status]
        lines += [b"%b: %b\r\n" % pair for pair in headers]
        if self._client.stopping:
            self.keeps = False
        if not self.keeps:
            lines.append(b"connection: close\r\n")
        elif self._old:
            lines.append(b"connection: keep-alive\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)
