"""The router's server and clients that are slow, deaf or gone; handlers that fail; and its end. On both loops."""

from __future__ import annotations

import asyncio
import logging

import orjson
import pytest

from adaptersync.router import server as module
from support.loops import on_both_loops
from support.raw_client import LARGE, Client, Place, listening
from support.wait import wait_until

POST = b"POST /x HTTP/1.1\r\nhost: a\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
GET = b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n"
WAIT = b"GET /wait HTTP/1.1\r\nhost: a\r\n\r\n"
PARTIAL = POST + b"content-length: 5\r\n\r\nhell"


# what takes too long


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SWEEP_S", 0.02)
    for name in ("ARRIVE_S", "LINGER_S", "STALL_S"):
        monkeypatch.setattr(module, name, 0.3)
    monkeypatch.setattr(module, "IDLE_S", 1.5)


@pytest.mark.parametrize("raw", [b"GET", b"GET /x HTTP/1.1\r\nx: y", CHUNKED + b"5\r\nhe", PARTIAL])
@on_both_loops
async def test_a_request_that_does_not_end_is_given_up(raw: bytes, hurried: None) -> None:
    async with listening() as place:
        client = await place.client()
        client.say(GET + raw)
        assert (await client.answer()).status == 200
        got = await client.answer()
        assert (got.status, got.body) == (408, b"request did not arrive in time")
        assert await client.ended() == b""
        await wait_until(lambda: not place.server.connections)  # also when the client stays
        assert place.server.arriving == 0


@on_both_loops
async def test_bytes_now_and_then_do_not_keep_a_request_alive(hurried: None) -> None:
    async with listening() as place:
        client = await place.client()
        client.say(b"GET /x HTTP/1.1\r\n")
        dripping = asyncio.create_task(_drip(client))
        try:
            assert (await client.answer()).status == 408
        finally:
            dripping.cancel()


async def _drip(client: Client) -> None:
    while True:
        client.say(b"x: y\r\n")
        await asyncio.sleep(0.05)


@on_both_loops
async def test_an_idle_connection_is_closed_and_one_that_waits_for_an_answer_is_not(hurried: None) -> None:
    async with listening() as place:
        waiting, idle = await place.client(), await place.client()
        waiting.say(WAIT)
        idle.say(GET)
        assert (await idle.answer()).status == 200
        assert await idle.ended() == b""
        place.served.gate.set()
        assert (await waiting.answer()).status == 200


@pytest.mark.parametrize("path", [b"/flood", b"/large"])
@on_both_loops
async def test_a_client_that_takes_nothing_is_cut(path: bytes, hurried: None) -> None:
    async with listening() as place:
        client = await place.client(receives=4096)
        client.say(b"GET %b HTTP/1.1\r\n\r\n" % path * 3)
        await wait_until(lambda: place.served.seen)
        await wait_until(lambda: not place.server.connections)
        await wait_until(lambda: not place.served.in_flight)
        assert len(place.served.seen) == 1


@on_both_loops
async def test_a_refusal_reaches_a_client_that_goes_on_sending() -> None:
    """Closing with bytes unread would reset the connection, and the answer would be lost."""
    async with listening(body_bytes=1000) as place:
        client = await place.client()
        client.say(POST + b"content-length: 8000000\r\n\r\n")
        await wait_until(lambda: place.served.refused)
        for _ in range(80):
            client.say(b"b" * 100_000)
            await client.writer.drain()
        got = await client.answer()
        assert (got.status, got.body) == (413, b"request body is larger than 1000 bytes")


@on_both_loops
async def test_who_goes_on_sending_for_long_after_a_refusal_is_cut(hurried: None) -> None:
    async with listening(body_bytes=1000) as place:
        client = await place.client()
        client.say(POST + b"content-length: 8000000\r\n\r\n")
        dripping = asyncio.create_task(_drip(client))
        try:
            assert (await client.answer()).status == 413
            await wait_until(lambda: not place.server.connections)
        finally:
            dripping.cancel()


# handlers that fail, clients that leave


@pytest.mark.parametrize("line", [b"GET /wait HTTP/1.1\r\n\r\n", b"GET /wait HTTP/1.0\r\n\r\n"])
@on_both_loops
async def test_who_has_said_all_gets_every_answer_and_then_the_end(line: bytes) -> None:
    """As `nc -N` does, and tools of HTTP/1.0."""
    many = 1 if b"1.0" in line else 3
    async with listening() as place:
        client = await place.client()
        client.say(line * many)
        client.writer.write_eof()
        await wait_until(lambda: place.served.seen)
        await asyncio.sleep(0.3)
        assert (place.served.in_flight, place.served.cancelled) == (1, 0)
        place.served.gate.set()
        if many > 1:
            assert (await client.answer()).status == 100
        gots = [await client.answer() for _ in range(many)]
        assert [(got.status, got.target) for got in gots] == [(200, "/wait")] * many
        assert [got.headers.get("connection") for got in gots] == [None] * (many - 1) + ["close"]
        assert await client.ended() == b""
        await wait_until(lambda: not place.server.connections)


@on_both_loops
async def test_who_has_said_all_gets_a_stream_to_its_end() -> None:
    """The zero before the second length asks whether anybody is there."""
    async with listening() as place:
        client = await place.client()
        client.say(b"GET /stream HTTP/1.1\r\n\r\n")
        place.served.pieces.release()
        assert b"200 OK" in await client.reader.readuntil(b"one \r\n")
        client.writer.write_eof()
        await asyncio.sleep(0.1)
        place.served.pieces.release()
        place.served.pieces.release()
        assert await client.ended() == b"04\r\ntwo \r\n5\r\nthree\r\n0\r\n\r\n"


@on_both_loops
async def test_half_a_request_after_a_whole_one_is_left_when_nothing_more_is_said() -> None:
    async with listening() as place:
        client = await place.client()
        client.say(WAIT + PARTIAL)
        client.writer.write_eof()
        await wait_until(lambda: place.served.seen)
        assert (await client.answer()).status == 100
        place.served.gate.set()
        assert (await client.answer()).status == 200
        assert await client.ended() == b""


@on_both_loops
async def test_a_handler_that_fails_is_a_500_and_the_connection_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async with listening() as place:
        client = await place.client()
        client.say(b"GET /fail HTTP/1.1\r\n\r\n" + GET)
        got = await client.answer()
        assert (got.status, orjson.loads(got.body)["error"]["code"]) == (500, "internal_error")
        assert (await client.answer()).status == 200
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [
        "GET /fail could not be handled"
    ]


@pytest.mark.parametrize("path", [b"/half", b"/break"])
@on_both_loops
async def test_half_an_answer_is_never_taken_for_a_whole_one(path: bytes) -> None:
    async with listening() as place:
        for version in (b"1.1", b"1.0"):
            client = await place.client()
            client.say(b"GET %b HTTP/%b\r\n\r\n" % (path, version) + GET)
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await client.answer()
        assert not [request for request in place.served.seen if request.path == "/x"]


@pytest.mark.parametrize("raw", [WAIT, WAIT + GET, WAIT + b"hello\r\n\r\n", WAIT + PARTIAL])
@on_both_loops
async def test_what_a_client_asked_for_is_cancelled_when_it_leaves(raw: bytes) -> None:
    async with listening() as place:
        client = await place.client()
        client.say(raw)
        await wait_until(lambda: place.served.in_flight)
        await client.leave()
        await wait_until(lambda: place.served.cancelled == 1)
        await wait_until(lambda: not place.server.connections)
        assert len(place.served.seen) == 1


@on_both_loops
async def test_a_client_that_leaves_in_the_middle_of_a_stream_ends_it() -> None:
    async with listening() as place:
        for again in (False, True):
            client = await place.client()
            client.say(b"GET /stream HTTP/1.1\r\n\r\n")
            place.served.pieces.release()
            assert b"one" in await client.reader.readuntil(b"one")
            await client.leave()
            if again:  # its next piece comes before anybody knows
                place.served.pieces.release()
            await wait_until(lambda: not place.served.in_flight)
        await wait_until(lambda: not place.server.connections)


# the end


async def _stop(place: Place, drain_s: float) -> asyncio.Task[None]:
    stopping = asyncio.create_task(place.server.stop(drain_s))
    await wait_until(lambda: place.server.stopping)
    return stopping


@on_both_loops
async def test_a_stop_lets_what_is_handled_end_and_takes_nothing_more() -> None:
    async with listening() as place:
        idle, busy, partial = [await place.client() for _ in range(3)]
        idle.say(GET)
        await idle.answer()
        busy.say(WAIT + GET)
        partial.say(PARTIAL)
        await wait_until(lambda: place.served.in_flight == 1 and place.server.arriving == 4)
        stopping = await _stop(place, 20.0)
        assert await idle.ended() == b""
        assert await partial.ended() == b""
        with pytest.raises(ConnectionRefusedError):
            await place.client()
        assert not stopping.done()
        place.served.gate.set()
        got = await busy.answer()
        assert (got.status, got.headers["connection"]) == (200, "close")
        assert await busy.ended() == b""
        await stopping
        assert [request.path for request in place.served.seen] == ["/x", "/wait"]


@on_both_loops
async def test_a_stream_that_began_before_a_stop_ends_whole_and_is_the_last() -> None:
    async with listening() as place:
        client = await place.client()
        client.say(b"GET /stream HTTP/1.1\r\n\r\n")
        await wait_until(lambda: place.served.in_flight)
        stopping = await _stop(place, 20.0)
        client.say(GET)
        for _ in range(3):
            place.served.pieces.release()
        assert (await client.answer()).body == b"one two three"
        assert await client.ended() == b""
        await stopping
        assert len(place.served.seen) == 1


@on_both_loops
async def test_a_stop_waits_for_clients_to_take_their_answers() -> None:
    async with listening() as place:
        clients = [await place.client(receives=4096) for _ in range(2)]
        clients[0].say(b"GET /large HTTP/1.1\r\n\r\n")
        clients[1].say(WAIT + b"GET /large HTTP/1.1\r\n\r\n")
        await wait_until(lambda: len(place.served.seen) == 2)
        place.served.gate.set()
        assert (await clients[1].answer()).status == 200
        await wait_until(lambda: len(place.served.seen) == 3)
        stopping = await _stop(place, 20.0)
        for client in clients:
            assert (await client.answer()).body == LARGE
        await stopping


@on_both_loops
async def test_a_stop_cancels_what_does_not_end_in_time() -> None:
    async with listening() as place:
        clients = [await place.client(receives=4096) for _ in range(3)]
        for client, path in zip(clients, (b"/wait", b"/flood", b"/large"), strict=True):
            client.say(b"GET %b HTTP/1.1\r\n\r\n" % path)
        await wait_until(lambda: len(place.served.seen) == 3)
        await asyncio.wait_for(place.server.stop(0.2), 10.0)
        assert (place.served.in_flight, place.served.cancelled) == (0, 2)
        assert not place.server.connections
        assert await clients[0].ended() == b""
