"""Any bytes, in any pieces: the same answer however it is cut, and never a hang, another error or a doubtful reuse.

In memory, without a network: the test is the transport. What is kept is held against `http.client`, which read the
same bytes.
"""

from __future__ import annotations

import asyncio
import http.client
import io
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

from hypothesis import event, example, given
from hypothesis import strategies as st

from adaptersync.router.connection import Answer, Connection, ReplicaError
from adaptersync.router.deadlines import Deadlines

LIMIT = 1 << 20
TICKS = 10  # of the loop, in which everything must have come to its end


class MemoryTransport:
    """Takes everything, and tells its connection of its end as a real one does."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.closing = False
        self.reading = True

    def write(self, data: bytes) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def abort(self) -> None:
        if not self.closing:
            self.closing = True
            asyncio.get_running_loop().call_soon(self.connection.connection_lost, None)


class Outcome:
    """What became of one request; `heard` are the bytes that had come when the connection could be asked again."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        self.error: type[BaseException] | None = None
        self.heard: bytes | None = None
        self.gone = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Outcome) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return repr(vars(self))


def ask(pieces: Sequence[bytes], *, ends: bool = True, resets: bool = False) -> Outcome:
    """One request, answered with these pieces and then, where it `ends`, the end of the connection."""
    return asyncio.run(_ask(pieces, ends, resets))


async def _ask(pieces: Sequence[bytes], ends: bool, resets: bool) -> Outcome:
    outcome = Outcome()
    heard = b""

    def ready(_: Connection) -> None:
        assert outcome.heard is None
        outcome.heard = heard

    def gone(_: Connection) -> None:
        outcome.gone += 1

    connection = Connection(ready, gone, Deadlines())
    transport = MemoryTransport(connection)
    connection.connection_made(cast(asyncio.Transport, transport))
    reading = asyncio.create_task(_read(connection, outcome))
    await asyncio.sleep(0)
    for piece in pieces:
        assert transport.reading  # nothing here is large
        if transport.closing:
            break
        if outcome.heard is None:
            heard += piece
        connection.data_received(piece)
        await asyncio.sleep(0)
    if ends and not transport.closing:
        if not resets:
            connection.eof_received()
        transport.closing = True
        connection.connection_lost(ConnectionResetError("reset") if resets else None)
    for _ in range(TICKS):
        await asyncio.sleep(0)
    if not ends:
        if not reading.done():
            reading.cancel()
        for _ in range(TICKS):
            await asyncio.sleep(0)
    assert reading.done(), "it hangs"
    assert outcome.gone == int(transport.closing)
    if transport.closing:
        assert not connection.usable
    return outcome


async def _read(connection: Connection, outcome: Outcome) -> None:
    try:
        answer: Answer = await connection.ask(b"POST", b"", asyncio.get_running_loop().time() + 60.0)
        outcome.status, outcome.headers = answer.status, answer.headers
        with answer:
            outcome.body = await answer.read(LIMIT)
    except (ReplicaError, asyncio.CancelledError) as error:
        outcome.error = type(error)


def cut(raw: bytes, places: Sequence[int]) -> list[bytes]:
    edges = sorted({0, len(raw), *(place % (len(raw) + 1) for place in places)})
    return [raw[start:stop] for start, stop in pairwise(edges)]


_token = st.text("abcxyz-XYZ019", min_size=1, max_size=12).map(lambda name: f"x-{name}".encode())
_value = st.text("abc XYZ;=\"',/é", max_size=30).map(lambda value: value.strip().encode())
_headers = st.lists(st.tuples(_token, _value), max_size=6)
_interim = st.sampled_from([b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nlink: <a>\r\n\r\n"])


def _lines(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    return b"".join(name + b": " + value + b"\r\n" for name, value in headers)


@st.composite
def answers(draw: st.DrawFn) -> tuple[bytes, int, bytes, bool]:
    """An answer as bytes, its status and body, and whether its connection may be kept."""
    status = draw(st.sampled_from([200, 200, 400, 404, 500, 503]))
    body = draw(st.binary(max_size=200))
    form = draw(st.sampled_from(["length", "chunked", "until closed"]))
    stays = draw(st.booleans()) and form != "until closed"
    head = draw(_interim) + b"HTTP/1.1 %d Some Reason\r\n" % status + _lines(draw(_headers))
    if not stays:
        head += b"Connection: close\r\n"
    if form == "length":
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body, status, body, stays
    if form == "until closed":
        return head + b"\r\n" + body, status, body, stays
    chunks = [piece for piece in cut(body, draw(st.lists(st.integers(0, 300), max_size=5))) if piece]
    extension = draw(st.sampled_from([b"", b";a", b';a=b;c="d e"']))
    coded = b"".join(b"%x" % len(chunk) + extension + b"\r\n" + chunk + b"\r\n" for chunk in chunks)
    trailers = _lines(draw(_headers))
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + coded + b"0\r\n" + trailers + b"\r\n", status, body, stays


@given(answers(), st.lists(st.integers(0, 1000), max_size=20))
def test_an_answer_is_the_same_however_it_is_cut(made: tuple[bytes, int, bytes, bool], places: list[int]) -> None:
    raw, status, body, stays = made
    whole = ask([raw])
    assert (whole.status, whole.body, whole.error) == (status, body, None)
    assert (whole.heard == raw) == stays
    assert ask(cut(raw, places)) == whole
    assert ask([raw[place : place + 1] for place in range(len(raw))]) == whole


@given(answers(), st.integers(0, 1000), st.booleans())
def test_an_answer_without_its_end_is_never_taken_for_one(
    made: tuple[bytes, int, bytes, bool], place: int, resets: bool
) -> None:
    raw, _, body, _ = made
    outcome = ask([raw[: place % len(raw)]], resets=resets)
    assert outcome.heard is None
    if outcome.error is None:  # without a length, where the connection ends is the end
        assert b"Content-Length" not in raw
        assert b"chunked" not in raw
        assert not resets
        assert body.startswith(outcome.body)


_fragments = st.sampled_from(
    [
        *(b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.0 200\r\n", b"HTTP/1.1 204 No\r\n\r\n"),
        *(b"HTTP/1.1 304 No\r\n", b"HTTP/1.1 101 Switching\r\n", b"Upgrade: x\r\nConnection: upgrade\r\n"),
        *(b"Content-Length: 5\r\n", b"Content-Length: 0\r\n", b"content-length:7 \r\n", b"Content-Length: +5\r\n"),
        *(b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip\r\n", b"transfer-encoding:\tchunked\r\n"),
        *(b"Connection: close\r\n", b"Connection: keep-alive\r\n", b"x: y\r\n", b" folded\r\n", b": no name\r\n"),
        *(b"\r\n", b"\n", b"\r", b"\0", b"hello", b"5\r\nhello\r\n", b"5;a=b\r\nhello\r\n", b"0\r\n", b"0\r\n\r\n"),
        *(b"-1\r\n", b"ffffffffffffffffff\r\n", b"5 \r\nhello\r\n", b"\xff\xfe"),
    ]
)
_noise = st.lists(_fragments | st.binary(max_size=8), max_size=14).map(b"".join)


@given(_noise, st.lists(st.integers(0, 1000), max_size=6), st.booleans(), st.booleans())
@example(
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhelloHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwrong",
    [],
    True,
    False,
)
def test_any_bytes_are_an_answer_or_our_error_and_only_a_clean_connection_is_kept(
    raw: bytes, places: list[int], ends: bool, resets: bool
) -> None:
    _hold(ask(cut(raw, places), ends=ends, resets=resets))


@given(answers(), st.data())
def test_an_answer_with_something_else_in_it_is_an_answer_or_our_error(
    made: tuple[bytes, int, bytes, bool], data: st.DataObject
) -> None:
    raw = made[0]
    place = data.draw(st.integers(0, len(raw)))
    gone = data.draw(st.integers(0, 4))
    raw = raw[:place] + data.draw(_noise) + raw[place + gone :]
    _hold(ask(cut(raw, data.draw(st.lists(st.integers(0, 1000), max_size=6)))))


def _hold(outcome: Outcome) -> None:
    """What was kept had brought exactly one answer, and another reader finds the same in it."""
    event("kept" if outcome.heard is not None else outcome.error.__name__ if outcome.error else "ended")
    if outcome.heard is None:
        return
    assert outcome.error is None
    status, body, rest = _by_the_standard_library(outcome.heard)
    assert (outcome.status, outcome.body) == (status, body)
    assert not rest.strip(b"\r\n")  # empty lines before an answer are not part of any


class _Bytes(io.BytesIO):
    """What is left can still be read after the answer was."""

    def close(self) -> None:
        pass

    def makefile(self, mode: str) -> _Bytes:
        return self


def _by_the_standard_library(raw: bytes) -> tuple[int, bytes, bytes]:
    raw = raw.lstrip(b"\r\n")
    while raw[9:10] == b"1":  # it skips no other than 100 by itself
        raw = raw.partition(b"\r\n\r\n")[2].lstrip(b"\r\n")
    file = _Bytes(raw)
    response = http.client.HTTPResponse(file, method="POST")  # type: ignore[arg-type]
    response.begin()
    return response.status, response.read(), file.read()
