"""A request's end from outside, at every moment of its answer, and that it is the end of nothing else."""

from __future__ import annotations

import asyncio

import pytest

from adaptersync.router import attempts as module
from adaptersync.router.attempts import Attempt, Attempts, Lost
from adaptersync.router.connections import Connections
from support.raw_server import RawServer, Talk, answering, connections, raw_server
from support.wait import wait_until

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
BEGUN = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n"
END = b"0\r\n\r\n"
LIMIT = 1000
WHY = "r1: silent"


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STILL_S", 0.2)


async def _ask(pool: Connections, server: RawServer, attempt: Attempt) -> bytes:
    with await pool.post(server.url, "/x", [], b"{}", 20.0, attempt.asked) as answer:
        return await answer.read(LIMIT)


async def test_what_was_lost_before_it_was_asked_for_is_not_asked_for() -> None:
    async with raw_server(answering(WHOLE)) as server, connections() as pool:
        with Attempts().at("r1", "e1") as attempt:
            attempt.end(WHY)
            with pytest.raises(Lost, match=WHY):
                await _ask(pool, server, attempt)
        await wait_until(lambda: pool.counts(server.url) == (0, 0))
        assert not server.requests


async def test_what_waits_for_the_head_ends_at_once_and_with_its_connection() -> None:
    async def silent(talk: Talk) -> None:
        await talk.request()
        await talk.reader.read()

    async with raw_server(silent) as server, connections() as pool:
        with Attempts().at("r1", "e1") as attempt:
            asking = asyncio.create_task(_ask(pool, server, attempt))
            await wait_until(lambda: server.requests)
            attempt.end(WHY)
            with pytest.raises(Lost, match=WHY):
                await asking
        await wait_until(lambda: not server.present)


async def test_an_end_also_reaches_what_is_asked_for_again() -> None:
    """On a connection that was closed meanwhile, which only the asking shows."""
    second = asyncio.Event()

    async def script(talk: Talk) -> None:
        if server.accepted == 1:
            await talk.request()
            await talk.say(WHOLE)
            await talk.request()
            return
        await talk.request()
        second.set()
        await talk.reader.read()

    async with raw_server(script) as server, connections() as pool:
        attempts = Attempts()
        with attempts.at("r1", "e1") as attempt:
            assert await _ask(pool, server, attempt) == b"hello"
        with attempts.at("r1", "e1") as attempt:
            asking = asyncio.create_task(_ask(pool, server, attempt))
            await second.wait()
            attempt.end(WHY)
            with pytest.raises(Lost, match=WHY):
                await asking
        assert server.accepted == 2


@pytest.mark.parametrize("moved", [False, True])
async def test_an_end_after_the_answers_does_no_harm_to_the_next_on_its_connection(moved: bool, hurried: None) -> None:
    go = asyncio.Event()

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.say(WHOLE)
        await talk.request()
        await go.wait()
        await talk.say(WHOLE)

    async with raw_server(script) as server, connections() as pool:
        attempts = Attempts()
        with attempts.at("r1", "e1") as first:
            if moved:
                first.moved()
            assert await _ask(pool, server, first) == b"hello"
            with attempts.at("r1", "e1") as second:
                asking = asyncio.create_task(_ask(pool, server, second))
                await wait_until(lambda: len(server.requests) == 2)
                first.end(WHY)
                await asyncio.sleep(2 * module.STILL_S)  # in which it would have been cut
                go.set()
                assert await asking == b"hello"
        assert server.accepted == 1


async def test_an_end_that_waits_goes_with_its_request(hurried: None) -> None:
    go = asyncio.Event()

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.say(BEGUN, END)
        await talk.request()
        await go.wait()
        await talk.say(WHOLE)

    async with raw_server(script) as server, connections() as pool:
        attempts = Attempts()
        with attempts.at("r1", "e1") as first:
            first.moved()
            first.end(WHY)
            assert await _ask_again(pool, server, first) == b"one"
        with attempts.at("r1", "e1") as second:
            asking = asyncio.create_task(_ask(pool, server, second))
            await wait_until(lambda: len(server.requests) == 2)
            await asyncio.sleep(2 * module.STILL_S)
            go.set()
            assert await asking == b"hello"
        assert server.accepted == 1
        assert not attempts.present


async def _ask_again(pool: Connections, server: RawServer, attempt: Attempt) -> bytes:
    """With an attempt that was told of its end after it had asked."""
    reason, attempt.lost = attempt.lost, ""
    with await pool.post(server.url, "/x", [], b"{}", 20.0, attempt.asked) as answer:
        attempt.lost = reason
        return await answer.read(LIMIT)


async def test_a_stream_that_stands_still_ends_after_what_had_come(hurried: None) -> None:
    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.say(BEGUN)
        await talk.reader.read()  # until the client is gone

    async with raw_server(script) as server, connections() as pool:
        with Attempts().at("r1", "e1") as attempt:
            with await pool.post(server.url, "/x", [], b"{}", 20.0, attempt.asked) as answer:
                attempt.moved()
                attempt.end(WHY)
                assert await answer.piece() == b"one"
                with pytest.raises(Lost, match=WHY):
                    await answer.piece()
            await wait_until(lambda: not server.present)


async def test_a_stream_that_goes_on_has_its_time_anew_with_each_piece(hurried: None) -> None:
    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.say(BEGUN)
        for _ in range(6):
            await asyncio.sleep(module.STILL_S / 3)
            await talk.say(b"3\r\ntwo\r\n")
        await talk.say(END)

    async with raw_server(script) as server, connections() as pool:
        attempt = Attempts().at("r1", "e1")
        with attempt, await pool.post(server.url, "/x", [], b"{}", 20.0, attempt.asked) as answer:
            attempt.moved()
            attempt.end(WHY)
            body = b""
            while piece := await answer.piece():
                attempt.moved()
                body += piece
            assert body == b"one" + b"two" * 6


async def test_nothing_is_left_of_attempts_that_ended() -> None:
    attempts = Attempts()
    with attempts.at("r1", "e1") as one, attempts.at("r1", "e1"), attempts.at("r2", "e1"):
        assert {replica: len(present) for replica, present in attempts.present.items()} == {"r1": 2, "r2": 1}
        one.moved()
        one.end(WHY)
    assert not attempts.present
