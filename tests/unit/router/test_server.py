"""The router's server over sockets, on both loops: who asks well is answered, others cost no more than is said."""

from __future__ import annotations

import asyncio
import tracemalloc

import orjson
import pytest

from adaptersync.router.server import AHEAD, HEADERS, TOLD
from support.loops import on_both_loops
from support.raw_client import LARGE, listening
from support.wait import wait_until

POST = b"POST /x HTTP/1.1\r\nhost: a\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
GET = b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n"
WAIT = b"GET /wait HTTP/1.1\r\nhost: a\r\n\r\n"


def post(body: bytes, *, path: bytes = b"/x") -> bytes:
    return b"POST %b HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%b" % (path, len(body), body)


# a connection and its requests


@on_both_loops
async def test_a_connection_serves_one_request_after_another() -> None:
    async with listening() as place:
        client = await place.client()
        for number in range(3):
            client.say(post(b"%d" % number, path=b"/x?%d" % number))
            got = await client.answer()
            assert (got.status, got.headers.get("connection")) == (200, None)
            said = orjson.loads(got.body)
            assert (said["method"], said["target"], said["body"]) == ("POST", f"/x?{number}", str(number))
            assert said["headers"] == [["host", "a"], ["content-length", "1"]]
        assert len(place.server.connections) == 1
        assert place.served.seen[0].path == "/x"


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"GET /x HTTP/1.0\r\n\r\n", "close"),
        (b"GET /x HTTP/1.1\r\nConnection: close\r\n\r\n", "close"),
        (b"GET /x HTTP/1.1\r\nConnection: x, Close\r\n\r\n", "close"),
        (b"GET /x HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n", "keep-alive"),
        (b"\r\n\r\nGET /x HTTP/1.1\r\n\r\n", None),
    ],
)
@on_both_loops
async def test_a_connection_is_kept_when_its_client_keeps_it(raw: bytes, said: str | None) -> None:
    async with listening() as place:
        client = await place.client()
        client.say(raw)
        got = await client.answer()
        assert (got.status, got.headers.get("connection")) == (200, said)
        if said == "close":
            assert await client.ended() == b""
        else:
            client.say(raw)
            assert (await client.answer()).status == 200


@on_both_loops
async def test_an_answer_of_unknown_length_ends_as_its_client_can_tell() -> None:
    async with listening() as place:
        place.served.pieces = asyncio.Semaphore(100)
        client = await place.client()
        client.say(b"GET /stream HTTP/1.1\r\n\r\n")
        got = await client.answer()
        assert (got.headers["transfer-encoding"], got.headers["x-kind"], got.body) == (
            "chunked",
            "stream",
            b"one two three",
        )
        client.say(b"GET /stream HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
        got = await client.answer()
        assert "transfer-encoding" not in got.headers
        assert (got.headers["connection"], got.body) == ("close", b"one two three")


@on_both_loops
async def test_head_has_the_length_and_no_body() -> None:
    async with listening() as place:
        client = await place.client()
        client.say(b"HEAD /large HTTP/1.1\r\n\r\n" + GET)
        assert (await client.answer(bodiless=True)).headers["content-length"] == str(len(LARGE))
        assert (await client.answer()).target == "/x"


@pytest.mark.parametrize("target", ["http://host:80/x?y=/z", "HTTP://host/x?y=/z", "http://u@[::1]/x?y=/z"])
@on_both_loops
async def test_a_target_may_name_the_host(target: str) -> None:
    async with listening() as place:
        client = await place.client()
        client.say(f"GET {target} HTTP/1.1\r\n\r\nGET http://host HTTP/1.1\r\n\r\nOPTIONS * HTTP/1.1\r\n\r\n".encode())
        assert [(await client.answer()).target for _ in range(3)] == ["/x?y=/z", "/", "*"]
        assert place.served.seen[0].path == "/x"


@on_both_loops
async def test_blanks_around_a_value_are_not_part_of_it() -> None:
    async with listening() as place:
        client = await place.client()
        client.say(b"POST /x HTTP/1.1\r\nContent-Length:  2 \t\r\nX-A: \t a b \t\r\n\r\nok")
        assert orjson.loads((await client.answer()).body)["body"] == "ok"
        (request,) = place.served.seen
        assert request.header(b"x-a") == b"a b"
        assert request.header(b"x-b") == b""


# pipelining


@on_both_loops
async def test_requests_sent_ahead_are_answered_in_order_one_at_a_time() -> None:
    async with listening() as place:
        client = await place.client()
        client.say(b"GET /wait HTTP/1.1\r\n\r\n" + b"".join(b"GET /%d HTTP/1.1\r\n\r\n" % n for n in range(100)))
        await wait_until(lambda: place.served.in_flight)
        assert len(place.served.seen) == 1
        place.served.gate.set()
        assert [(await client.answer()).target for _ in range(101)] == ["/wait", *(f"/{n}" for n in range(100))]


@on_both_loops
async def test_a_client_that_sends_too_far_ahead_is_not_read() -> None:
    size, count = 100_000, 200
    async with listening() as place:
        client = await place.client()
        client.say(WAIT + b"".join(post(b"b" * size, path=b"/%d" % number) for number in range(count)))
        await wait_until(lambda: place.server.arriving >= AHEAD * size)
        for _ in range(20):
            await asyncio.sleep(0)
        assert place.server.arriving < (AHEAD + 6) * size  # and what one read had brought
        assert client.writer.transport.get_write_buffer_size() > count * size // 2
        place.served.gate.set()
        await client.answer()
        assert [(await client.answer()).target for _ in range(count)] == [f"/{number}" for number in range(count)]


@on_both_loops
async def test_what_waits_for_the_request_before_it_is_counted_as_arriving() -> None:
    async with listening(arriving_bytes=2500) as place:
        client = await place.client()
        client.say(WAIT)
        for number in (1, 2):
            client.say(post(b"b" * 1000))
            await wait_until(lambda number=number: place.server.arriving == number * 1000)  # type: ignore[misc]
        other = await place.client()
        other.say(post(b"b" * 1000))
        assert (await other.answer()).status == 503
        place.served.gate.set()
        assert [(await client.answer()).status for _ in range(3)] == [200] * 3
        third = await place.client()
        third.say(post(b"b" * 1000))
        assert (await third.answer()).status == 200


@on_both_loops
async def test_who_takes_no_answers_gets_no_more() -> None:
    """Else what one client asks for, and leaves, would fill the router's memory."""
    async with listening() as place:
        client = await place.client(receives=4096)
        client.say(b"GET /large HTTP/1.1\r\n\r\n" * 5)
        await wait_until(lambda: place.served.seen)
        for _ in range(50):
            await asyncio.sleep(0.001)
        assert len(place.served.seen) == 1
        for _ in range(5):
            assert (await client.answer()).body == LARGE


# bodies


@pytest.mark.parametrize("size", [1, 3, 1000])
@on_both_loops
async def test_a_chunked_body_is_whole_and_its_trailers_are_no_headers(size: int) -> None:
    raw = CHUNKED + b'5;a=b;c="d"\r\nhello\r\n6\r\n world\r\n0\r\nx-trailer: y\r\nX-Adaptersync-Gate: z\r\n\r\n' + GET
    async with listening() as place:
        client = await place.client()
        for start in range(0, len(raw), size):
            client.say(raw[start : start + size])
            await asyncio.sleep(0)
        said = orjson.loads((await client.answer()).body)
        assert said["body"] == "hello world"
        assert said["headers"] == [["host", "a"], ["transfer-encoding", "chunked"]]
        assert orjson.loads((await client.answer()).body)["headers"] == [["host", "a"]]


@on_both_loops
async def test_a_body_in_many_small_chunks_costs_little_more_than_its_bytes() -> None:
    count = 20_000
    async with listening() as place:
        client = await place.client()
        client.say(CHUNKED)
        tracemalloc.start()
        try:
            for _ in range(20):
                client.say(b"2\r\nab\r\n" * (count // 20))
                await client.writer.drain()
            await wait_until(lambda: place.server.arriving == 2 * count)
            assert tracemalloc.get_traced_memory()[0] < 10 * 2 * count
        finally:
            tracemalloc.stop()
        client.say(b"0\r\n\r\n")
        assert orjson.loads((await client.answer()).body)["body"] == "ab" * count


@on_both_loops
async def test_who_waits_to_be_told_to_send_its_body_is_told() -> None:
    async with listening() as place:
        client = await place.client()
        for expected in (b"100-continue", b"100-Continue \t"):
            client.say(POST + b"content-length: 2\r\nexpect: " + expected + b"\r\n\r\n")
            assert (await client.answer()).status == 100
            client.say(b"ok")
            assert (await client.answer()).status == 200


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (POST + b"content-length: 1001\r\nexpect: 100-continue\r\n\r\n", 413),
        (POST + b"content-length: 0\r\nexpect: 100-continue\r\n\r\n", 200),
        (POST + b"content-length: 2\r\nexpect: wonders\r\n\r\nok", 200),
        (b"POST /x HTTP/1.0\r\ncontent-length: 2\r\nexpect: 100-continue\r\n\r\nok", 200),
    ],
)
@on_both_loops
async def test_nobody_else_is_told_to_go_on(raw: bytes, status: int) -> None:
    async with listening(body_bytes=1000) as place:
        client = await place.client()
        client.say(raw)
        assert (await client.answer()).status == status


# limits


@pytest.mark.parametrize(
    ("raw", "status", "reason"),
    [
        (b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\n\r\n", 431, "head is larger than 4096 bytes"),
        (b"GET /" + b"x" * 5000, 431, "head is larger than 4096 bytes"),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 5000, 431, "request does not get on"),
        (b"GET / HTTP/1.1\r\n" + b"x" * 5000, 431, "request does not get on"),
        (b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * 1000 + b"\r\nx: " + b"y" * 3500 + b"\r\nx", 431, "head is larger"),
        (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * (HEADERS + 1) + b"x", 431, f"more than {HEADERS} headers"),
        (b"\r\n" * 3000, 431, "request does not get on"),
        (POST + b"content-length: 1001\r\n\r\n", 413, "larger than 1000 bytes"),
        (CHUNKED + b"3e8\r\n" + b"b" * 1000 + b"\r\n1\r\nb", 413, "larger than 1000 bytes"),
        (CHUNKED + b"ffffffff\r\n" + b"b" * 1001, 413, "larger than 1000 bytes"),
        (CHUNKED + b"0\r\n" + b"x: y\r\n" * 1000, 431, "request does not get on"),
        (CHUNKED + b"1;" + b"x" * 5000, 431, "request does not get on"),
    ],
)
@on_both_loops
async def test_what_is_too_large_is_refused_as_soon_as_that_is_known(raw: bytes, status: int, reason: str) -> None:
    async with listening(body_bytes=1000) as place:
        for size in (len(raw), 100):
            if size > 100 and "get on" in reason:
                continue  # what one read brings is not looked at twice
            client = await place.client()
            for start in range(0, len(raw), size):
                client.say(raw[start : start + size])
                await asyncio.sleep(0)
            got = await client.answer()
            assert (got.status, got.headers["connection"]) == (status, "close")
            assert reason in got.body.decode()
            assert await client.ended() == b""
        assert not place.served.seen


@on_both_loops
async def test_what_is_just_small_enough_is_served() -> None:
    async with listening(body_bytes=1000) as place:
        client = await place.client()
        client.say(b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * HEADERS + b"\r\n")
        assert (await client.answer()).status == 200
        client.say(b"GET / HTTP/1.1\r\nx: " + b"y" * 4000 + b"\r\n\r\n")
        assert (await client.answer()).status == 200
        client.say(post(b"b" * 1000))
        assert (await client.answer()).status == 200
        client.say(CHUNKED + b"1f4\r\n" + b"b" * 500 + b"\r\n" + b"1\r\nb\r\n" * 500 + b"0\r\n\r\n")
        assert (await client.answer()).status == 200


@on_both_loops
async def test_all_that_arrives_together_is_bounded_and_given_back() -> None:
    async with listening(arriving_bytes=2500) as place:
        clients = [await place.client() for _ in range(2)]
        for client in clients:
            client.say(POST + b"content-length: 1001\r\n\r\n" + b"b" * 1000)
        await wait_until(lambda: place.server.arriving == 2000)
        for late in (post(b"b" * 501), CHUNKED + b"1f5\r\n" + b"b" * 501):
            other = await place.client()
            other.say(late)
            got = await other.answer()
            assert (got.status, got.body) == (503, b"too much is being received")
        clients[0].say(b"b")
        assert (await clients[0].answer()).status == 200
        await clients[1].leave()
        await wait_until(lambda: place.server.arriving == 0)
        other = await place.client()
        other.say(post(b"b" * 2500))
        assert (await other.answer()).status == 200


@on_both_loops
async def test_connections_are_bounded_and_who_comes_later_is_told() -> None:
    async with listening(connections=2) as place:
        kept = [await place.client() for _ in range(2)]
        await wait_until(lambda: len(place.server.connections) == 2)
        late = await place.client()
        late.say(GET)
        assert (await late.answer()).status == 503
        assert await late.ended() == b""
        for client in kept:
            client.say(GET)
            assert (await client.answer()).status == 200
        for client in (late, kept.pop()):
            await client.leave()
        await wait_until(lambda: len(place.server.connections) == 1)
        other = await place.client()
        other.say(GET)
        assert (await other.answer()).status == 200


@on_both_loops
async def test_who_only_collects_refusals_does_not_hold_more_and_more_connections() -> None:
    async with listening(connections=1) as place:
        clients = [await place.client() for _ in range(1 + TOLD)]
        await wait_until(lambda: len(place.server.connections) == 1 + TOLD)
        cut = [await place.client() for _ in range(5)]
        for client in cut:
            assert await client.ended() == b""
        assert len(place.server.connections) == 1 + TOLD
        assert (await clients[-1].answer()).status == 503


# what is no HTTP, or another


@pytest.mark.parametrize(
    "raw",
    [
        b"hello\r\n\r\n",
        b"get /x HTTP/1.1\r\n\r\n",
        b"GET /x HTTP/1.2\r\n\r\n",
        b"GET /x\nHTTP/1.1\r\n\r\n",
        b"GET /a b HTTP/1.1\r\n\r\n",
        b"GET /\xc3\xa9 HTTP/1.1\r\n\r\n",
        b"GET /\0 HTTP/1.1\r\n\r\n",
        b"GET /x HTTP/1.1\nx: y\n\n",
        POST + b"x: y\nz: a\r\n\r\n",
        POST + b"x: y\rz: a\r\n\r\n",
        POST + b"x: y\r\n folded\r\n\r\n",
        POST + b"x: y\0z\r\n\r\n",
        POST + b"x\0: y\r\n\r\n",
        POST + b": y\r\n\r\n",
        POST + b"no colon\r\n\r\n",
        POST + b"content-length : 2\r\n\r\nok",
        POST + b"content-length: +2\r\n\r\nok",
        POST + b"content-length: -2\r\n\r\nok",
        POST + b"content-length: 0x2\r\n\r\nok",
        POST + b"content-length: 2, 2\r\n\r\nok",
        POST + b"content-length: 2\r\ncontent-length: 2\r\n\r\nok",
        POST + b"content-length: 2\r\ncontent-length: 3\r\n\r\nok!",
        POST + b"content-length: 99999999999999999999\r\n\r\n",
        POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        CHUNKED + b"x\r\n\r\n",
        CHUNKED + b"-1\r\n\r\n",
        CHUNKED + b"5 \r\nhello\r\n0\r\n\r\n",
        CHUNKED + b"5\nhello\r\n0\r\n\r\n",
        CHUNKED + b"5\r\nhello, world\r\n0\r\n\r\n",
        CHUNKED + b"fffffffffffffffff\r\n",
        CHUNKED + b"0\r\ncontent-length: 3\r\n\r\n",
        b"CONNECT host:80 HTTP/1.1\r\nhost: host:80\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
@on_both_loops
async def test_what_is_not_http_is_refused_after_the_good_request_before_it(raw: bytes) -> None:
    async with listening() as place:
        alone, after = await place.client(), await place.client()
        alone.say(raw)
        assert (await alone.answer()).status == 400
        assert await alone.ended() == b""
        assert not place.served.seen
        after.say(WAIT + raw)
        await wait_until(lambda: place.served.in_flight)
        place.served.gate.set()
        assert (await after.answer()).status == 200
        got = await after.answer()
        assert (got.status, got.headers["connection"]) == (400, "close")
        assert await after.ended() == b""
        assert len(place.served.seen) == 1


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET /x\r\n\r\n", 505),
        (b"GET /x HTTP/0.9\r\n\r\n", 505),
        (b"GET /x HTTP/2.0\r\n\r\n", 505),
        (POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (POST + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n", 501),
        (b"POST /x HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 501),
        (POST + b"content-encoding: gzip\r\ncontent-length: 2\r\n\r\nok", 415),
    ],
)
@on_both_loops
async def test_what_is_http_but_not_spoken_here_is_refused(raw: bytes, status: int) -> None:
    async with listening() as place:
        client = await place.client()
        client.say(raw)
        assert (await client.answer()).status == status
        assert await client.ended() == b""
        assert not place.served.seen


@on_both_loops
async def test_nothing_is_served_after_a_request_that_was_to_be_the_last() -> None:
    async with listening() as place:
        client = await place.client()
        client.say(b"GET /1 HTTP/1.1\r\nconnection: close\r\n\r\nGET /2 HTTP/1.1\r\n\r\n")
        assert (await client.answer()).target == "/1"
        assert await client.ended() == b""
        assert len(place.served.seen) == 1


@on_both_loops
@pytest.mark.parametrize("at_once", [True, False])
async def test_an_offer_of_another_protocol_is_not_taken_up(at_once: bool) -> None:
    """Java's client offers HTTP/2 with its first request, and goes on as before when nobody takes it up."""
    offer = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: a\r\n"
    requests = [
        b"POST /x HTTP/1.1\r\n" + offer + b"content-length: 5\r\n\r\nhello",
        b"GET /y HTTP/1.1\r\n" + offer + b"\r\n",
        b"POST /z HTTP/1.1\r\ncontent-length: 2\r\n\r\nok",
    ]
    async with listening() as place:
        place.served.gate.set()
        client = await place.client()
        if at_once:
            client.say(b"".join(requests))
        seen = []
        for request in requests:
            if not at_once:
                client.say(request)
            answer = await client.answer()
            assert answer.status == 200
            echoed = orjson.loads(answer.body)
            seen.append((echoed["target"], echoed["body"]))
    assert seen == [("/x", "hello"), ("/y", ""), ("/z", "ok")]
