"""Any bytes, cut anyhow: answers that another reader understands, and no request that another reader reads otherwise.

In memory, without a network: the test is the transport. Answers are held against `http.client`; requests against the
small reader below, which takes only what nobody could read in two ways.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, cast

from hypothesis import event, example, given
from hypothesis import strategies as st

from adaptersync.router.request import Refused, Reply, Request
from adaptersync.router.server import Limits, Server, _Connection

LIMITS = Limits(head_bytes=2000, body_bytes=300, arriving_bytes=500, connections=10)
TICKS = 20  # of the loop, in which everything must have come to its end

Read = tuple[bytes, bytes, list[tuple[bytes, bytes]], bytes]  # method, target, headers, body


class MemoryTransport:
    """Keeps what is written, and tells its connection of its end as a real one does."""

    def __init__(self, connection: _Connection) -> None:
        self.connection = connection
        self.written = b""
        self.ended = False  # nothing more can be written
        self.closing = False
        self.reading = True

    def write(self, data: bytes) -> None:
        assert not self.ended
        if not self.closing:
            self.written += data

    def write_eof(self) -> None:
        self.ended = True

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True

    def close(self) -> None:
        self.lose(None)

    def abort(self) -> None:
        self.lose(None)

    def lose(self, error: Exception | None) -> None:
        if not self.closing:
            self.closing = True
            asyncio.get_running_loop().call_soon(self.connection.connection_lost, error)

    def get_extra_info(self, name: str) -> Any:
        raise AssertionError(f"no answer here needs its {name}")


class Echo:
    """Answers once the loop has turned, and notes what it was asked."""

    def __init__(self) -> None:
        self.seen: list[Read] = []
        self.refused: list[int] = []

    async def handle(self, request: Request) -> Reply | None:
        await asyncio.sleep(0)
        self.seen.append((request.method.encode(), request.target.encode(), list(request.headers), request.body))
        return Reply(200, (), b"%d" % len(self.seen))

    def refuse(self, request: Request, error: Refused) -> Reply:
        self.refused.append(error.status)
        return Reply(error.status, (), error.reason.encode())


class Outcome:
    """What came of some bytes."""

    def __init__(self) -> None:
        self.seen: list[Read] = []
        self.refused: list[int] = []
        self.written = b""
        self.open = True


def serve(pieces: Sequence[bytes], *, leaves: bool = False) -> Outcome:
    """These pieces on one connection, whose client then waits, or `leaves`."""
    return asyncio.run(_serve(pieces, leaves))


async def _serve(pieces: Sequence[bytes], leaves: bool) -> Outcome:
    loop, errors = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: errors.append(context))
    server, echo, outcome = Server(LIMITS), Echo(), Outcome()
    server.service = echo
    connection = _Connection(server)
    transport = MemoryTransport(connection)
    connection.connection_made(cast(asyncio.Transport, transport))
    for piece in pieces:
        await _until(lambda: transport.reading)
        if transport.closing:
            break
        connection.data_received(piece)
        assert server.arriving >= 0
    if leaves:
        transport.lose(None)
    await _until(lambda: connection.task is None or leaves)
    for _ in range(TICKS):
        await asyncio.sleep(0)
    assert connection.task is None or connection.task.done()
    outcome.seen, outcome.refused, outcome.written = echo.seen, echo.refused, transport.written
    outcome.open = not transport.closing and not transport.ended
    transport.lose(None)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert connection.closed.done()
    assert server.arriving == 0
    assert not server.connections
    assert not errors, errors
    return outcome


async def _until(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it hangs")


def cut(raw: bytes, places: Sequence[int]) -> list[bytes]:
    edges = sorted({0, len(raw), *(place % (len(raw) + 1) for place in places)})
    return [raw[start:stop] for start, stop in pairwise(edges)]


# another reader


class Unclear(Exception):
    """These bytes are no request, or one that somebody might read in another way."""


_LINE = re.compile(rb"([A-Z-]+) (/[!-~]*) HTTP/1\.[01]")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\0-\x08\x0a-\x1f\x7f]*)")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})(;[^\r\n\0]*)?")


def by_the_book(raw: bytes) -> list[Read]:
    """Requests that these bytes are whole; Unclear when there is anything else."""
    found = []
    while raw := _without_empty_lines(raw):
        head, end, rest = raw.partition(b"\r\n\r\n")
        line, *fields = head.split(b"\r\n")
        match = _LINE.fullmatch(line)
        if match is None or not end:
            raise Unclear(line)
        headers = [_field(field) for field in fields]
        lengths = [value for name, value in headers if name == b"content-length"]
        coded = [value for name, value in headers if name == b"transfer-encoding"]
        if len(lengths) + len(coded) > 1 or any(value.strip().lower() != b"chunked" for value in coded):
            raise Unclear("framing")
        if coded:
            body, raw = _chunks(rest)
        else:
            if lengths and not re.fullmatch(rb"[0-9]+[ \t]*", lengths[0]):
                raise Unclear("length")
            length = int(lengths[0]) if lengths else 0
            body, raw = rest[:length], rest[length:]
            if len(body) < length:
                raise Unclear("ends")
        found.append((match[1], match[2], headers, body))
    return found


def _without_empty_lines(raw: bytes) -> bytes:
    while raw.startswith(b"\r\n"):
        raw = raw[2:]
    return raw


def _field(line: bytes) -> tuple[bytes, bytes]:
    match = _FIELD.fullmatch(line)
    if match is None:
        raise Unclear(line)
    return match[1].lower(), match[2]


def _chunks(raw: bytes) -> tuple[bytes, bytes]:
    body = b""
    while True:
        line, _, raw = raw.partition(b"\r\n")
        match = _CHUNK.fullmatch(line)
        if match is None:
            raise Unclear(line)
        size = int(match[1], 16)
        if not size:
            break
        body += raw[:size]
        if raw[size : size + 2] != b"\r\n":
            raise Unclear("chunk")
        raw = raw[size + 2 :]
    while True:
        line, end, raw = raw.partition(b"\r\n")
        if not end:
            raise Unclear("trailers")
        if not line:
            return body, raw
        _field(line)


def answered(written: bytes) -> list[int]:
    """Statuses of the answers in these bytes, as the standard library reads them."""
    statuses = []
    while written:
        if written.startswith(b"HTTP/1.1 100 Continue\r\n\r\n"):
            written = written[25:]
            continue
        file = _Bytes(written)
        response = http.client.HTTPResponse(file, method="POST")  # type: ignore[arg-type]
        response.begin()
        assert response.length is not None
        assert len(response.read()) == int(response.headers["content-length"])
        statuses.append(response.status)
        written = file.read()
    return statuses


class _Bytes(io.BytesIO):
    """What is left can still be read after the answer was."""

    def close(self) -> None:
        pass

    def makefile(self, mode: str) -> _Bytes:
        return self


# good requests

_token = st.text("abcxyz-XYZ019", min_size=1, max_size=12).map(lambda name: f"x-{name}".encode())
_value = st.text("abc XYZ;=\"',/é", max_size=30).map(lambda value: value.strip().encode())
_headers = st.lists(st.tuples(_token, _value), max_size=6)
_blank = st.sampled_from([b"", b" ", b"\t", b" \t "])


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, Read]:
    """A request as bytes, and what it says; its connection can be kept."""
    method = draw(st.sampled_from([b"POST", b"GET", b"PUT", b"DELETE", b"OPTIONS", b"M-SEARCH"]))
    target = b"/" + draw(st.text("abc/?&=%20.;~", max_size=20)).encode()
    headers = draw(_headers)
    body = draw(st.binary(max_size=80))
    form = draw(st.sampled_from(["length", "chunked", "none"]))
    if form == "length":
        headers.insert(draw(st.integers(0, len(headers))), (b"Content-Length", b"%d" % len(body)))
    elif form == "chunked":
        headers.insert(draw(st.integers(0, len(headers))), (b"Transfer-Encoding", b"chunked"))
    else:
        body = b""
    lines = b"".join(name + b":" + draw(_blank) + value + b"\r\n" for name, value in headers)
    before = draw(st.sampled_from([b"", b"\r\n", b"\r\n\r\n"]))
    raw = before + method + b" " + target + b" HTTP/1.1\r\n" + lines + b"\r\n"
    said = [(name.lower(), value) for name, value in headers]
    if form != "chunked":
        return raw + body, (method, target, said, body)
    pieces = [piece for piece in cut(body, draw(st.lists(st.integers(0, 300), max_size=5))) if piece]
    extension = draw(st.sampled_from([b"", b";a", b';a=b;c="d e"']))
    coded = b"".join(b"%x" % len(piece) + extension + b"\r\n" + piece + b"\r\n" for piece in pieces)
    trailers = b"".join(name + b": " + value + b"\r\n" for name, value in draw(_headers))
    return raw + coded + b"0\r\n" + trailers + b"\r\n", (method, target, said, body)


@given(st.lists(requests(), min_size=1, max_size=12), st.lists(st.integers(0, 3000), max_size=20))
def test_requests_are_the_same_however_they_are_cut(made: list[tuple[bytes, Read]], places: list[int]) -> None:
    raw, said = b"".join(each for each, _ in made), [read for _, read in made]
    for pieces in ([raw], cut(raw, places), [raw[place : place + 1] for place in range(len(raw))]):
        outcome = serve(pieces)
        assert outcome.seen == said
        assert answered(outcome.written) == [200] * len(said)
        assert outcome.open
    assert by_the_book(raw) == said  # so it can be trusted below


@given(st.lists(requests(), min_size=1, max_size=3), st.integers(0, 3000), st.booleans())
def test_a_request_without_its_end_is_never_handled(made: list[tuple[bytes, Read]], place: int, leaves: bool) -> None:
    raw = b"".join(each for each, _ in made)
    outcome = serve(cut(raw[: place % len(raw)], []), leaves=leaves)
    assert outcome.seen == [read for _, read in made][: len(outcome.seen)]
    whole, ends = 0, 0
    for each, _ in made:
        ends += len(each)
        whole += ends <= place % len(raw)
    assert len(outcome.seen) == (0 if leaves else whole)


# anything

_fragments = st.sampled_from(
    [
        *(
            b"POST /x HTTP/1.1\r\n",
            b"GET / HTTP/1.0\r\n",
            b"GET /\r\n",
            b"PUT /y?z HTTP/1.1\r\n\r\n",
            b"GET  / HTTP/1.1\r\n",
        ),
        *(b"GET / HTTP/2.0\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        *(b"OPTIONS * HTTP/1.1\r\n\r\n", b"GET http://a/b HTTP/1.1\r\n\r\n", b"DESCRIBE / RTSP/1.0\r\n\r\n"),
        *(b"Content-Length: 5\r\n", b"Content-Length: 0\r\n", b"content-length:5 \r\n", b"Content-Length: +5\r\n"),
        *(b"Content-Length: 5, 5\r\n", b"Content-Length : 5\r\n", b"Content-Length: 400\r\n", b"Content-Length:\r\n"),
        *(b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip\r\n", b"transfer-encoding:\tchunked\r\n"),
        *(b"Transfer-Encoding: gzip, chunked\r\n", b"Transfer-Encoding: \x0bchunked\r\n", b"Expect: 100-continue\r\n"),
        *(b"Connection: close\r\n", b"Connection: keep-alive\r\n", b"Upgrade: h2c\r\nConnection: upgrade\r\n"),
        *(b"x: y\r\n", b" folded\r\n", b": no name\r\n", b"x: \0\r\n", b"x: a\nb: c\r\n", b"x: \xff\xe9\r\n"),
        *(b"\r\n", b"\n", b"\r", b"\0", b"hello", b"5\r\nhello\r\n", b"5;a=b\r\nhello\r\n", b"0\r\n", b"0\r\n\r\n"),
        *(b"-1\r\n", b"ffffffffffffffffff\r\n", b"5 \r\nhello\r\n", b"12d\r\n" + b"x" * 301, b"\xff\xfe", b"x" * 700),
    ]
)
_noise = st.lists(_fragments | st.binary(max_size=8), max_size=14).map(b"".join)


@given(_noise, st.lists(st.integers(0, 1000), max_size=6), st.booleans())
@example(
    b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhelloPOST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nwrong!", [], False
)
@example(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n", [], False)
def test_any_bytes_are_requests_or_a_refusal(raw: bytes, places: list[int], leaves: bool) -> None:
    _hold(raw, places, leaves=leaves)


@given(st.lists(requests(), min_size=1, max_size=3), st.data())
def test_requests_with_something_else_in_them_are_requests_or_a_refusal(
    made: list[tuple[bytes, Read]], data: st.DataObject
) -> None:
    raw = b"".join(each for each, _ in made)
    place = data.draw(st.integers(0, len(raw)))
    gone = data.draw(st.integers(0, 4))
    raw = raw[:place] + data.draw(_noise) + raw[place + gone :]
    _hold(raw, data.draw(st.lists(st.integers(0, 1000), max_size=6)), leaves=False)


def _hold(raw: bytes, places: Sequence[int], *, leaves: bool) -> None:
    whole = serve([raw])
    event("refused" if whole.refused else "served")
    statuses = answered(whole.written)
    assert statuses[: len(whole.seen)] == [200] * len(whole.seen)
    assert len(statuses) - len(whole.seen) in (0, 1)
    assert statuses[len(whole.seen) :] == whole.refused[:1]
    assert len(whole.refused) <= 1
    other = serve(cut(raw, places), leaves=leaves)
    assert other.seen == whole.seen[: len(other.seen)]
    if not leaves:
        assert other.seen == whole.seen
        assert bool(other.refused) == bool(whole.refused)
        assert other.open == whole.open
    try:
        clear = by_the_book(raw)
    except Unclear:
        return
    for ours, theirs in zip(whole.seen, clear, strict=False):
        assert ours == theirs
    if whole.open:  # nothing of it was left out
        assert len(whole.seen) == len(clear)
