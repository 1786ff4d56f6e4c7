"""One connection to a replica: one HTTP/1.1 request at a time, its answer as it comes.

`httptools` parses; what it does not bound is bounded here. A connection is ready for another request only when the
answer has ended, nothing came after it, and both sides meant to keep it. Knows nothing of replicas, nor which
connection to take: see `connections`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from adaptersync.router.deadlines import Deadlines

HEAD_BYTES = 64 << 10  # of an answer without getting on to its body, or from one piece of that to the next
HEADERS = 256  # of an answer
AHEAD_BYTES = 256 << 10  # of an answer wait for whoever reads it; with more, the connection is left unread
ONE_WRITE = 256 << 10  # bytes; larger bodies are written piece by piece, so that the loop is not held up


class ReplicaError(Exception):
    """What was asked of a replica came to nothing, or not to its end."""


class ConnectFailed(ReplicaError):
    """There is no connection, so nothing was asked."""


class ConnectTimedOut(ConnectFailed):
    """Nor did anybody say why."""


class NoRoom(ReplicaError):
    """This side can open no connection, so nothing was asked."""


class Unsendable(ReplicaError):
    """What was to be asked cannot be said in HTTP, so nothing was."""


class Unanswered(ReplicaError):
    """The connection ended before one byte of an answer."""


class Gone(Unanswered):
    """And after it there is nobody there."""


class CutShort(ReplicaError):
    """The connection ended in the middle of an answer."""


class Malformed(ReplicaError):
    """The answer is not HTTP, or more of it than is taken."""


class TimedOut(ReplicaError):
    """The answer did not end in time."""


class Answer:
    """Head and body of an answer. `length` is that of the body, where the head says so.

    Use as a context: an answer that has not ended when it is closed ends with its connection, and so does the work of
    the replica.
    """

    __slots__ = ("_connection", "_error", "_loop", "_pieces", "_size", "_waiter", "headers", "length", "status")

    def __init__(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._connection: Connection | None = connection  # until nothing more comes
        self._error: ReplicaError | None = None
        self._pieces: list[bytes] = []
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []  # names in lower case
        self.length: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.fail(CutShort("answer was given up"))

    def fail(self, error: ReplicaError) -> None:
        """End it with this error, and its connection; nothing happens when it has ended."""
        if self._connection is not None:
            self._connection.fail(error)

    @property
    def late(self) -> bool:
        """It did not end in time."""
        return isinstance(self._error, TimedOut)

    async def piece(self) -> bytes:
        """What has come since the last one, at least a byte; nothing at the end. ReplicaError when there is no end."""
        while not self._pieces:
            if self._connection is None:
                if self._error is not None:
                    raise self._anew(self._error)
                return b""
            await self.change()
        pieces = self._pieces
        piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._size = 0
        if self._connection is not None:
            self._connection.go_on()
        return piece

    async def read(self, limit: int) -> bytes:
        """The whole body; of one with more than `limit` bytes its beginning, a little more than that."""
        body = await self.piece()
        if self._connection is not None or self._error is not None or self._pieces:
            parts, size = [body], len(body)
            while size <= limit and (piece := await self.piece()):
                parts.append(piece)
                size += len(piece)
            body = b"".join(parts)
        return body

    # for its connection

    @property
    def begun(self) -> bool:
        """Whether its head is there; ReplicaError when that will never be."""
        if not self.status and self._error is not None:
            raise self._anew(self._error)
        return self.status != 0

    def change(self) -> asyncio.Future[None]:
        """Done when there is news."""
        waiter = self._waiter = self._loop.create_future()
        return waiter

    def begin(self, status: int, headers: list[tuple[bytes, bytes]], length: int | None) -> None:
        self.status, self.headers, self.length = status, headers, length
        self._wake()

    def add(self, piece: bytes) -> bool:
        """Whether more waits now than should."""
        self._pieces.append(piece)
        self._size += len(piece)
        self._wake()
        return self._size > AHEAD_BYTES

    def end(self, error: ReplicaError | None) -> None:
        self._connection, self._error = None, error
        self._wake()

    @staticmethod
    def _anew(error: ReplicaError) -> ReplicaError:
        """One that is kept here and raised would keep whoever waited, and with them the body of their request."""
        return type(error)(*error.args)

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


OnAsked = Callable[[Answer], None]


class Connection(asyncio.Protocol):
    """Calls `ready` each time it can be asked again, and `gone` once, when it is no more."""

    __slots__ = (
        "_answer",
        "_answered",
        "_chunked",
        "_complete",
        "_deadlines",
        "_forgotten",
        "_gone",
        "_head",
        "_head_bytes",
        "_held",
        "_interim",
        "_keeps",
        "_length",
        "_loop",
        "_open",
        "_parser",
        "_quiet",
        "_ready",
        "_room",
        "_transport",
        "_written",
        "idle_since",
        "made",
    )

    def __init__(
        self, ready: Callable[[Connection], None], gone: Callable[[Connection], None], deadlines: Deadlines
    ) -> None:
        self._ready = ready
        self._gone = gone
        self._deadlines = deadlines
        self._loop = asyncio.get_running_loop()
        self._parser = HttpResponseParser(self)
        self._transport: asyncio.Transport
        self._room: asyncio.Future[None] | None = None  # waits for room to write in
        self._open = False
        self._forgotten = False
        self._held = False  # is not read for the moment
        self._answer: Answer | None = None  # asked for, and not ended
        self.made = False
        self.idle_since = 0.0
        self._expect()

    def _expect(self) -> None:
        """A new answer."""
        self._head: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._length: int | None = None
        self._chunked = False
        self._interim = False
        self._answered = False  # a byte of it has come
        self._complete = False
        self._keeps = False
        self._quiet = 0  # bytes since it last got on
        self._written = True

    @property
    def usable(self) -> bool:
        return self._open and not self._transport.is_closing()

    async def ask(self, head: bytes, body: bytes, deadline: float, asked: OnAsked = lambda answer: None) -> Answer:
        """The answer, once its head is there; it must end by `deadline`, of the loop's clock.

        `asked` gets it before anything is sent, to `fail` it at any time.
        """
        self._expect()
        answer = self._answer = Answer(self, self._loop)
        self._deadlines.add(self, deadline)
        try:
            asked(answer)
            if len(body) <= ONE_WRITE:
                self._transport.write(head + body)
            else:
                await self._write(answer, head, body)
            while not answer.begun:
                await answer.change()
        except BaseException:
            answer.close()
            raise
        return answer

    async def _write(self, answer: Answer, head: bytes, body: bytes) -> None:
        """As fast as it is taken; no further once there is an answer, or can be none."""
        self._written = False
        self._transport.write(head)
        with memoryview(body) as view:
            for start in range(0, len(body), ONE_WRITE):
                if self._room is not None:
                    await self._room
                else:
                    await asyncio.sleep(0)
                if answer.status or self._answer is not answer:
                    return
                self._transport.write(view[start : start + ONE_WRITE])
        self._written = True

    def go_on(self) -> None:
        """What had come was taken."""
        if self._held:
            self._held = False
            self._transport.resume_reading()

    def fail(self, error: ReplicaError) -> None:
        """Cut it: whoever waits for an answer gets this error."""
        self._end(error)
        self.close()

    def close(self) -> None:
        self._open = False
        if self.made:
            self._transport.abort()

    def give_up(self) -> None:
        """Connecting was given up, however far it has come: not every loop tells of the end of such a connection."""
        self.close()
        self._forget()

    def _forget(self) -> None:
        if not self._forgotten:
            self._forgotten = True
            self._gone(self)

    def _end(self, error: ReplicaError | None) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            self._deadlines.drop(self)
            answer.end(error)
        self._make_room()

    def expire(self) -> None:
        """Its time has come."""
        self.fail(TimedOut("answer did not end in time"))

    def _make_room(self) -> None:
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    # what the transport tells

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self.made = True
        if self._forgotten:
            transport.abort()
        else:
            self._open = True

    def connection_lost(self, error: Exception | None) -> None:
        self._cut(error)
        del self._parser  # which knows us
        self._forget()

    def eof_received(self) -> None:
        self._cut(None)

    def pause_writing(self) -> None:
        self._room = self._loop.create_future()

    def resume_writing(self) -> None:
        self._make_room()

    def data_received(self, data: bytes) -> None:
        if self._answer is None:
            self.fail(Malformed("nothing was asked"))  # it must not become the answer to what is asked next
            return
        self._answered = True
        self._quiet += len(data)
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self._keeps = False
            if not self._complete:
                why = error.__context__ if isinstance(error.__context__, Malformed) else error
                self.fail(Malformed(f"answer is not what it should be: {why}"))
                return
        if self._complete:
            self._finish()
        elif self._quiet > HEAD_BYTES:
            self.fail(Malformed("answer does not get on"))

    def _finish(self) -> None:
        self._end(None)
        if self._keeps and self._written and self._open and not self._transport.get_write_buffer_size():
            self.go_on()
            self._ready(self)
        else:
            self.close()

    def _cut(self, error: Exception | None) -> None:
        self._open = False
        answer = self._answer
        if answer is None:
            return
        if answer.status and error is None and self._length is None and not self._chunked:
            self._end(None)  # this is how such an answer ends
        elif self._answered:
            self.fail(CutShort(f"connection ended in the middle of an answer{_why(error)}"))
        else:
            self.fail(Unanswered(f"connection ended before an answer{_why(error)}"))

    # what the parser tells

    def on_message_begin(self) -> None:
        if self._complete:
            raise Malformed("something follows the answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > HEAD_BYTES or len(self._head) >= HEADERS:
            raise Malformed("head is too large")
        answer = self._answer
        if answer is None or answer.status:
            return  # a trailer
        kind = name.lower()
        if kind == b"content-length":
            self._length = int(value)
        elif kind == b"transfer-encoding":
            if self._chunked or value.strip().lower() != b"chunked":
                raise Malformed("transfer coding is not known")
            self._chunked = True
        self._head.append((kind, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            if status < 100 or status == 101 or self._length or self._chunked:
                raise Malformed("status was not asked for")
            self._interim = True
            self._head.clear()
            self._length = None
        elif self._chunked and self._length is not None:
            raise Malformed("length is said twice")
        elif self._answer is not None:
            self._quiet = 0
            self._answer.begin(status, self._head, self._length)
            self._make_room()  # nobody waits for the rest of the request

    def on_body(self, piece: bytes) -> None:
        self._quiet = 0
        if self._answer is not None and self._answer.add(piece) and not self._held:
            self._held = True
            self._transport.pause_reading()

    def on_chunk_header(self) -> None:
        self._quiet = 0

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = False
        else:
            self._keeps = self._parser.should_keep_alive()
            self._complete = True


def _why(error: Exception | None) -> str:
    return "" if error is None else f": {error}"
