"""Answers of every shape, and of none, on a connection to a server that may say anything."""

from __future__ import annotations

import asyncio

import pytest

from adaptersync.router.connection import (
    AHEAD_BYTES,
    HEAD_BYTES,
    HEADERS,
    CutShort,
    Malformed,
    ReplicaError,
    TimedOut,
    Unanswered,
)
from adaptersync.router.connections import IDLE_S
from support.raw_server import RawServer, Talk, answering, connections, raw_server
from support.wait import wait_until

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: a/b\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
LIMIT = 1 << 20


async def _ask(server: RawServer, within_s: float = 20.0) -> tuple[int, bytes, int]:
    """Status, body, and how many connections were kept."""
    async with connections() as pool:
        with await pool.post(server.url, "/x", [], b"{}", within_s) as answer:
            body = await answer.read(LIMIT)
        return answer.status, body, pool.counts(server.url)[1]


@pytest.mark.parametrize(
    ("raw", "status", "body"),
    [
        (PLAIN, 200, b"hello"),
        (CHUNKED + b"5\r\nhello\r\n0\r\n\r\n", 200, b"hello"),
        (CHUNKED + b'2;a=b;c="d"\r\nhe\r\n3\r\nllo\r\n0\r\nx-trailer: y\r\n\r\n', 200, b"hello"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN, 200, b"hello"),
        (b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n" + PLAIN, 200, b"hello"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
        (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 7\r\n\r\n", 304, b""),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", 200, b""),
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\nno", 404, b"no"),
        (b"HTTP/1.1 200\r\ncontent-length: 2\r\n\r\nok", 200, b"ok"),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_an_answer_that_ends_leaves_its_connection_to_the_next(
    raw: bytes, status: int, body: bytes, size: int
) -> None:
    async def script(talk: Talk) -> None:
        while await talk.request():
            await talk.say(*(raw[start : start + size] for start in range(0, len(raw), size)))

    async with raw_server(script) as server, connections() as pool:
        for _ in range(2):
            with await pool.post(server.url, "/x", [], b"{}", 20.0) as answer:
                assert answer.status == status
                assert await answer.read(LIMIT) == body
        assert pool.counts(server.url) == (1, 1)
        assert server.accepted == 1


@pytest.mark.parametrize(
    ("raw", "body"),
    [
        (PLAIN + PLAIN, b"hello"),
        (PLAIN + b"HTTP", b"hello"),
        (PLAIN + b"\0", b"hello"),
        (CHUNKED + b"5\r\nhello\r\n0\r\n\r\n" + PLAIN, b"hello"),
        (PLAIN.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n"), b"hello"),
        (PLAIN.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n") + PLAIN, b"hello"),
        (PLAIN.replace(b"1.1", b"1.0"), b"hello"),
        (PLAIN.replace(b"1.1", b"2.0"), b"hello"),
        (b"HTTP/1.1 204 No Content\r\n\r\nhello", b""),
    ],
)
async def test_after_a_surplus_or_a_farewell_the_connection_is_not_used_again(raw: bytes, body: bytes) -> None:
    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.say(raw)
        await talk.reader.read()  # until the client closes

    async with raw_server(script) as server, connections() as pool:
        for _ in range(2):
            with await pool.post(server.url, "/x", [], b"{}", 20.0) as answer:
                assert await answer.read(LIMIT) == body
            assert pool.counts(server.url)[1] == 0
        assert server.accepted == 2
        await wait_until(lambda: server.present == 0)


async def test_what_comes_later_on_an_idle_connection_answers_nothing() -> None:
    more = asyncio.Event()

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.say(PLAIN)
        if talk.server.accepted == 1:
            await more.wait()
            await talk.say(PLAIN.replace(b"hello", b"wrong"))
        await talk.reader.read()

    async with raw_server(script) as server, connections() as pool:
        with await pool.post(server.url, "/x", [], b"{}", 20.0):
            pass
        assert pool.counts(server.url) == (1, 1)
        more.set()
        await wait_until(lambda: pool.counts(server.url) == (0, 0), timeout_s=IDLE_S / 2)  # not for its age
        with await pool.post(server.url, "/x", [], b"{}", 20.0) as answer:
            assert await answer.read(LIMIT) == b"hello"


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\n\r\nhello",
        b"HTTP/1.0 200 OK\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello",
    ],
)
async def test_an_answer_without_length_ends_with_its_connection(raw: bytes) -> None:
    async with raw_server(answering(raw)) as server:
        assert await _ask(server) == (200, b"hello", 0)


async def test_half_a_close_is_the_end_as_well() -> None:
    async def script(talk: Talk) -> None:
        await talk.request()
        talk.writer.write(b"HTTP/1.1 200 OK\r\n\r\nhello")
        talk.writer.write_eof()
        await talk.reader.read()  # returns when the client has closed its half

    async with raw_server(script) as server:
        assert await _ask(server) == (200, b"hello", 0)
        await wait_until(lambda: server.present == 0)


MALFORMED = {
    "no HTTP": b"hello, who is there?\r\n\r\n",
    "bad version": b"HTTP/x 200 OK\r\n\r\n",
    "bad status": b"HTTP/1.1 20x OK\r\n\r\n",
    "status below all": b"HTTP/1.1 099 OK\r\ncontent-length: 0\r\n\r\n",
    "upgrade": b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nhello",
    "bad length": b"HTTP/1.1 200 OK\r\ncontent-length: 5x\r\n\r\nhello",
    "negative length": b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\nhello",
    "length beyond numbers": b"HTTP/1.1 200 OK\r\ncontent-length: " + b"9" * 30 + b"\r\n\r\nhello",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
    "length and chunks": CHUNKED.replace(b"\r\n\r\n", b"\r\ncontent-length: 5\r\n\r\n") + b"5\r\nhello\r\n0\r\n\r\n",
    "chunks and length": b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\nhello",
    "unknown coding": b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\nhello",
    "coding on coding": b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": CHUNKED.replace(b"\r\n\r\n", b"\r\ntransfer-encoding: chunked\r\n\r\n") + b"0\r\n\r\n",
    "header without name": b"HTTP/1.1 200 OK\r\n: x\r\ncontent-length: 0\r\n\r\n",
    "header over two lines": b"HTTP/1.1 200 OK\r\nx: a\r\n b\r\ncontent-length: 0\r\n\r\n",
    "header with NUL": b"HTTP/1.1 200 OK\r\nx: a\0b\r\ncontent-length: 0\r\n\r\n",
    "one huge header": b"HTTP/1.1 200 OK\r\nx: " + b"a" * HEAD_BYTES + b"\r\ncontent-length: 0\r\n\r\n",
    "huge header without end": b"HTTP/1.1 200 OK\r\nx: " + b"a" * (HEAD_BYTES + 1),
    "huge status line": b"HTTP/1.1 200 " + b"a" * (HEAD_BYTES + 1),
    "too many headers": b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * (HEADERS + 1) + b"content-length: 0\r\n\r\n",
    "interim answers without end": b"HTTP/1.1 100 Continue\r\n\r\n" * (HEAD_BYTES // 25 + 1),
}
MALFORMED_BODY = {
    "bad chunk": CHUNKED + b"5\r\nhello\r\nzz\r\n",
    "chunk longer than said": CHUNKED + b"3\r\nhello\r\n0\r\n\r\n",
    "chunk without number": CHUNKED + b"\r\nhello\r\n",
    "chunk beyond numbers": CHUNKED + b"f" * 20 + b"\r\nhello\r\n",
    "extension without end": CHUNKED + b"5;" + b"a" * (8 * HEAD_BYTES),  # more than one read brings
    "trailers without end": CHUNKED + b"5\r\nhello\r\n0\r\n" + b"x: y\r\n" * (HEAD_BYTES // 5),
}


@pytest.mark.parametrize("piece", [100, 1 << 20])
@pytest.mark.parametrize("raw", [*MALFORMED.values(), *MALFORMED_BODY.values()], ids=[*MALFORMED, *MALFORMED_BODY])
async def test_what_is_no_answer_is_an_error_and_the_connection_ends(raw: bytes, piece: int) -> None:
    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.say(*(raw[start : start + piece] for start in range(0, len(raw), piece)))
        await talk.reader.read()

    async with raw_server(script) as server:
        with pytest.raises(Malformed) as caught:
            await _ask(server)
        assert len(str(caught.value)) < 200
        await wait_until(lambda: server.present == 0)


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"", Unanswered),
        (b"H", CutShort),
        (b"HTTP/1.1 200 OK\r\ncontent-le", CutShort),
        (b"HTTP/1.1 100 Continue\r\n\r\n", CutShort),
        (PLAIN[:-1], CutShort),
        (CHUNKED + b"5\r\nhello\r\n", CutShort),
        (CHUNKED + b"5\r\nhello\r\n0\r\n", CutShort),
    ],
)
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
async def test_a_connection_that_ends_early_is_no_end_of_an_answer(
    raw: bytes, error: type[ReplicaError], reset: bool
) -> None:
    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.say(raw)
        if reset:
            talk.reset()

    async with raw_server(script) as server:
        # a reset may overtake what was sent before it
        with pytest.raises((error, CutShort, Unanswered) if reset else error):
            await _ask(server)


async def test_a_reset_does_not_end_an_answer_without_length() -> None:
    proceed = asyncio.Event()

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.say(b"HTTP/1.1 200 OK\r\n\r\nhello")
        await proceed.wait()
        talk.reset()

    async with raw_server(script) as server, connections() as pool:
        with await pool.post(server.url, "/x", [], b"{}", 20.0) as answer:
            assert await answer.piece() == b"hello"
            proceed.set()
            with pytest.raises(CutShort):
                await answer.piece()


async def test_what_came_before_an_error_is_told_before_it() -> None:
    async with raw_server(answering(CHUNKED + b"5\r\nhello\r\n")) as server, connections() as pool:
        with await pool.post(server.url, "/x", [], b"{}", 20.0) as answer:
            await wait_until(lambda: pool.counts(server.url) == (0, 0))
            assert await answer.piece() == b"hello"
            for _ in range(2):
                with pytest.raises(CutShort):
                    await answer.piece()


async def test_pieces_come_one_by_one_and_then_nothing() -> None:
    proceed = asyncio.Semaphore(0)

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.say(CHUNKED)
        for piece in (b"3\r\none\r\n", b"3\r\ntwo\r\n", b"0\r\n\r\n"):
            await proceed.acquire()
            await talk.say(piece)
        await talk.reader.read()

    async with raw_server(script) as server, connections() as pool:
        with await pool.post(server.url, "/x", [], b"{}", 20.0) as answer:
            for expected in (b"one", b"two", b""):
                proceed.release()
                assert await answer.piece() == expected
        assert pool.counts(server.url) == (1, 1)


async def test_of_an_answer_larger_than_its_reader_takes_the_beginning_is_read_and_then_the_rest() -> None:
    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.say(CHUNKED)
        while True:
            await talk.say(b"400\r\n" + b"x" * 1024 + b"\r\n")

    async with raw_server(script) as server, connections() as pool:
        with await pool.post(server.url, "/x", [], b"{}", 20.0) as answer:
            assert 100_000 < len(await answer.read(100_000)) < LIMIT
            assert set(await answer.piece()) == set(b"x")
        await wait_until(lambda: server.present == 0)
    async with raw_server(answering(PLAIN)) as server, connections() as pool:
        with await pool.post(server.url, "/x", [], b"{}", 20.0) as answer:
            assert (await answer.read(4), await answer.piece()) == (b"hello", b"")


async def test_a_slow_reader_holds_the_server_up_and_loses_nothing() -> None:
    said = 0

    async def script(talk: Talk) -> None:
        nonlocal said
        await talk.request()
        await talk.say(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (64 << 20))
        for _ in range(64):
            talk.writer.write(b"x" * (1 << 20))
            await talk.writer.drain()
            said += 1
        await talk.request()
        await talk.say(PLAIN)

    async with raw_server(script) as server, connections() as pool:
        with await pool.post(server.url, "/x", [], b"{}", 20.0) as answer:
            before = -1
            while before != said:  # until nothing moves any more
                before = said
                await asyncio.sleep(0.2)
            assert said < 32
            sizes = []
            while piece := await answer.piece():
                sizes.append(len(piece))
            assert sum(sizes) == 64 << 20
            assert max(sizes) <= AHEAD_BYTES + (256 << 10)  # and what one read brings
        # it is read again when it is used again
        with await pool.post(server.url, "/x", [], b"{}", 20.0) as answer:
            assert await answer.read(LIMIT) == b"hello"
        assert server.accepted == 1


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\ncontent-", PLAIN[:-1], CHUNKED + b"5\r\nhello\r\n"])
async def test_an_answer_that_takes_too_long_is_given_up(said: bytes) -> None:
    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.say(said)
        await talk.reader.read()

    async with raw_server(script) as server:
        with pytest.raises(TimedOut):
            await _ask(server, 0.2)
        await wait_until(lambda: server.present == 0)
        assert len(server.requests) == 1


@pytest.mark.parametrize("said", [b"", CHUNKED + b"5\r\nhello\r\n"])
async def test_who_stops_waiting_ends_the_connection(said: bytes) -> None:
    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.say(said)
        await talk.reader.read()

    async with raw_server(script) as server, connections() as pool:

        async def ask() -> None:
            with await pool.post(server.url, "/x", [], b"{}", 20.0) as answer:
                await answer.read(LIMIT)

        asking = asyncio.create_task(ask())
        await wait_until(lambda: len(server.requests) == 1)
        assert server.present == 1
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await wait_until(lambda: server.present == 0)
        assert pool.counts(server.url) == (0, 0)


async def test_a_large_body_arrives_whole_while_others_are_served() -> None:
    body = bytes(range(256)) * (32 << 10)  # 8 MiB

    async def script(talk: Talk) -> None:
        while await talk.request():
            await talk.say(PLAIN)

    async with raw_server(script) as server, connections() as pool:
        for _ in range(2):
            with await pool.post(server.url, "/x", [], body, 20.0) as answer:
                assert await answer.read(LIMIT) == b"hello"
        assert [request.partition(b"\r\n\r\n")[2] for request in server.requests] == [body, body]
        assert server.accepted == 1


async def test_an_answer_that_comes_early_ends_the_writing() -> None:
    """And what was not written must not be missed by the next request."""

    async def script(talk: Talk) -> None:
        await talk.reader.readuntil(b"\r\n\r\n")
        await talk.say(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\nno")
        await talk.reader.read(1)
        await stay.wait()

    stay = asyncio.Event()
    async with raw_server(script) as server, connections() as pool:
        with await pool.post(server.url, "/x", [], b"x" * (64 << 20), 20.0) as answer:
            assert (answer.status, await answer.read(LIMIT)) == (400, b"no")
        assert pool.counts(server.url)[1] == 0
        await wait_until(lambda: pool.counts(server.url) == (0, 0))
        stay.set()


async def test_a_server_that_takes_no_more_of_a_body_is_given_up() -> None:
    async def script(talk: Talk) -> None:
        await talk.reader.readuntil(b"\r\n\r\n")
        await stay.wait()

    stay = asyncio.Event()
    async with raw_server(script) as server, connections() as pool:
        with pytest.raises(TimedOut):
            await pool.post(server.url, "/x", [], b"x" * (64 << 20), 0.3)
        asking = asyncio.create_task(pool.post(server.url, "/x", [], b"x" * (64 << 20), 20.0))
        await wait_until(lambda: server.accepted == 2)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        stay.set()
