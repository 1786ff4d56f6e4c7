"""Which connection is taken, how many there are and how long they stay; and what may not be sent on one."""

from __future__ import annotations

import asyncio
import errno
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest
from blockbuster import BlockBuster

from adaptersync.router import connections as module
from adaptersync.router.connection import (
    ConnectFailed,
    ConnectTimedOut,
    CutShort,
    Gone,
    NoRoom,
    TimedOut,
    Unanswered,
    Unsendable,
)
from adaptersync.router.connections import origin
from support.raw_server import Talk, answering, connections, raw_server
from support.router_fleet import free_port
from support.wait import wait_until

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
LIMIT = 1 << 20


async def _patient(talk: Talk) -> None:
    """Answers for as long as it is asked."""
    while await talk.request():
        await talk.say(PLAIN)


async def test_a_request_is_written_as_it_should_be() -> None:
    async with raw_server(_patient) as server, connections() as pool:
        headers = [(b"X-One", b"1"), (b"x-Two", "é".encode())]
        for url in (server.url, server.url + "/", server.url + "/below/"):
            with await pool.post(url, "/v1/completions?a=b%20c", headers, b"{}", 20.0):
                pass
        host = server.url.removeprefix("http://").encode()
        lines = b" HTTP/1.1\r\nhost: " + host + b"\r\nX-One: 1\r\nx-Two: \xc3\xa9\r\ncontent-length: 2\r\n\r\n{}"
        plain = b"POST /v1/completions?a=b%20c" + lines
        assert server.requests == [plain, plain, plain.replace(b"/v1", b"/below/v1")]


@pytest.mark.parametrize("end", [b"\r\n", b"\n", b"\r", b"\0"])
@pytest.mark.parametrize("place", ["name", "value"])
async def test_a_header_with_the_end_of_a_line_in_it_is_not_sent(end: bytes, place: str) -> None:
    header = (b"x" + end + b"y", b"1") if place == "name" else (b"x", b"1" + end + b"evil: yes")
    async with raw_server(_patient) as server, connections() as pool:
        with pytest.raises(Unsendable):
            await pool.post(server.url, "/x", [header], b"{}", 20.0)
        assert server.accepted == 0


@pytest.mark.parametrize("target", ["", "x", "/a b", "/a\r\nx: y", "/a\n", "/\x00", "/é", "/\x7f", "http://other/x"])
async def test_a_target_that_is_none_is_not_sent(target: str) -> None:
    async with raw_server(_patient) as server, connections() as pool:
        with pytest.raises(Unsendable):
            await pool.post(server.url, target, [], b"{}", 20.0)
        assert server.accepted == 0


@pytest.mark.parametrize(
    "url",
    ["", "host:80", "ftp://host", "http://", "http://host:port", "http://host:99999", "http://host:0", "http://[::1",
     "http://user:word@host", "http://host/a b", "http://hést"],
)  # fmt: skip
async def test_an_address_that_is_none_is_an_error_of_connecting(url: str) -> None:
    async with connections() as pool:
        with pytest.raises(ConnectFailed) as caught:
            await pool.post(url, "/x", [], b"{}", 20.0)
        assert "word" not in str(caught.value)


def test_addresses_are_read() -> None:
    assert origin("http://[::1]:8000/") == module.Origin("::1", 8000, False, b"[::1]:8000", "")
    assert origin("https://replica-0/vllm/") == module.Origin("replica-0", 443, True, b"replica-0", "/vllm")
    assert origin("http://replica-0").port == 80


async def test_the_newest_idle_connection_is_taken_and_the_rest_grow_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.5)
    gate = asyncio.Event()

    async def script(talk: Talk) -> None:
        number = talk.server.accepted
        while await talk.request():
            await gate.wait()
            await talk.say(PLAIN.replace(b"hello", b"no.%02d" % number))

    async with raw_server(script) as server, connections() as pool:

        async def ask() -> bytes:
            with await pool.post(server.url, "/x", [], b"{}", 20.0) as answer:
                return await answer.read(LIMIT)

        asking = [asyncio.create_task(ask()) for _ in range(3)]
        await wait_until(lambda: len(server.requests) == 3)
        gate.set()
        assert {await each for each in asking} == {b"no.01", b"no.02", b"no.03"}
        assert pool.counts(server.url) == (3, 3)
        used = await ask()
        loop = asyncio.get_running_loop()
        until = loop.time() + 1.0
        while loop.time() < until:  # the one in use stays, however long
            assert await ask() == used
            await asyncio.sleep(0.05)
        await wait_until(lambda: server.present == 1)
        await wait_until(lambda: server.present == 0)
        assert pool.counts(server.url) == (0, 0)
        assert server.accepted == 3


async def test_one_that_has_been_idle_for_too_long_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although nobody has swept."""
    async with raw_server(_patient) as server, connections() as pool:
        with await pool.post(server.url, "/x", [], b"{}", 20.0):
            pass
        await wait_until(lambda: pool.counts(server.url) == (1, 1))
        monkeypatch.setattr(module, "IDLE_S", 0.0)
        with await pool.post(server.url, "/x", [], b"{}", 20.0) as answer:
            assert await answer.read(LIMIT) == b"hello"
        assert server.accepted == 2


async def test_no_more_are_kept_or_opened_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE", 2)
    gate = asyncio.Event()

    async def script(talk: Talk) -> None:
        while await talk.request():
            await gate.wait()
            await talk.say(PLAIN)

    async with raw_server(script) as server, connections(most=4) as pool:

        async def ask() -> bytes:
            with await pool.post(server.url, "/x", [], b"{}", 20.0) as answer:
                return await answer.read(LIMIT)

        asking = [asyncio.create_task(ask()) for _ in range(6)]
        await wait_until(lambda: len(server.requests) == 4)
        gate.set()
        results = await asyncio.gather(*asking, return_exceptions=True)
        assert [type(each) for each in results].count(NoRoom) == 2
        assert server.accepted == 4
        await wait_until(lambda: pool.counts(server.url) == (2, 2))
        assert await ask() == b"hello"  # those that ended made room


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
async def test_what_is_asked_on_a_connection_closed_meanwhile_is_asked_anew(reset: bool) -> None:
    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.say(PLAIN)
        if talk.server.accepted == 1:
            await talk.reader.readexactly(1)  # the second request has begun
            if reset:
                talk.reset()
        else:
            await talk.reader.read()

    async with raw_server(script) as server, connections() as pool:
        for _ in range(2):
            with await pool.post(server.url, "/x", [], b"{}", 20.0) as answer:
                assert await answer.read(LIMIT) == b"hello"
        assert server.accepted == 2
        assert pool.counts(server.url) == (1, 1)


async def test_what_was_closed_while_idle_is_not_taken() -> None:
    async with raw_server(answering(PLAIN)) as server, connections() as pool:
        for _ in range(3):
            with await pool.post(server.url, "/x", [], b"{}", 20.0) as answer:
                assert await answer.read(LIMIT) == b"hello"
            await wait_until(lambda: pool.counts(server.url) == (0, 0))
        assert [len(server.requests), server.accepted] == [3, 3]


async def test_it_is_asked_anew_only_once_and_not_when_an_answer_had_begun() -> None:
    async def silent(talk: Talk) -> None:
        await talk.request()
        if talk.server.accepted == 1:
            await talk.say(PLAIN)
            await talk.request()

    async with raw_server(silent) as server, connections() as pool:
        with await pool.post(server.url, "/x", [], b"{}", 20.0):
            pass
        with pytest.raises(Unanswered):
            await pool.post(server.url, "/x", [], b"{}", 20.0)
        assert len(server.requests) == 3

    async def begins(talk: Talk) -> None:
        await talk.request()
        await talk.say(PLAIN)
        await talk.request()
        await talk.say(b"H")

    async with raw_server(begins) as server, connections() as pool:
        with await pool.post(server.url, "/x", [], b"{}", 20.0):
            pass
        with pytest.raises(CutShort):
            await pool.post(server.url, "/x", [], b"{}", 20.0)
        assert len(server.requests) == 2


async def _answers_once(talk: Talk) -> None:
    await talk.request()
    await talk.say(PLAIN)
    await talk.request()


async def test_what_ran_for_a_while_is_not_asked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be what ended the other side."""
    monkeypatch.setattr(module, "STALE_S", 0.0)
    async with raw_server(_answers_once) as server, connections() as pool:
        with await pool.post(server.url, "/x", [], b"{}", 20.0):
            pass
        with pytest.raises(Unanswered) as caught:
            await pool.post(server.url, "/x", [], b"{}", 20.0)
        assert not isinstance(caught.value, Gone)  # nobody has looked
        assert (server.accepted, len(server.requests)) == (1, 2)


async def test_what_was_asked_and_then_nobody_was_there_is_not_as_if_nothing_was_asked() -> None:
    async def dies(talk: Talk) -> None:
        await _answers_once(talk)
        talk.server.leave()

    async with raw_server(dies) as server, connections() as pool:
        with await pool.post(server.url, "/x", [], b"{}", 20.0):
            pass
        with pytest.raises(Gone):
            await pool.post(server.url, "/x", [], b"{}", 20.0)
        assert pool.counts(server.url) == (0, 0)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS])
async def test_want_of_room_on_this_side_is_another_error(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object, **__: object) -> NoReturn:
        raise OSError(number, "no room")

    async with raw_server(_patient) as server, connections() as pool:
        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", fails)
        with pytest.raises(NoRoom, match="no room"):
            await pool.post(server.url, "/x", [], b"{}", 20.0)
        assert pool.counts(server.url) == (0, 0)


async def test_nobody_there() -> None:
    async with connections() as pool:
        url = f"http://127.0.0.1:{free_port()}"
        with pytest.raises(ConnectFailed) as caught:
            await pool.post(url, "/x", [], b"{}", 20.0)
        assert not isinstance(caught.value, ConnectTimedOut)
        assert pool.counts(url) == (0, 0)
        with pytest.raises(ConnectFailed):
            await pool.post("http://nobody.invalid", "/x", [], b"{}", 20.0)


async def test_connecting_has_its_time_and_can_be_given_up() -> None:
    async def mute(talk: Talk) -> None:
        await talk.reader.read()

    # whoever speaks TLS waits here for an answer to its greeting
    async with raw_server(mute) as server, connections(connect_timeout_s=0.2) as pool:
        url = server.url.replace("http:", "https:")
        with pytest.raises(ConnectTimedOut):
            await pool.post(url, "/x", [], b"{}", 20.0)
        with pytest.raises(TimedOut):  # which says nothing of the other side
            await pool.post(url, "/x", [], b"{}", 0.1)
        asking = asyncio.create_task(pool.post(url, "/x", [], b"{}", 20.0))
        await wait_until(lambda: server.accepted == 3)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert pool.counts(url) == (0, 0)
        await wait_until(lambda: server.present == 0)


async def test_a_cancellation_at_any_moment_leaves_nothing_open() -> None:
    async with raw_server(_patient) as server, connections() as pool:
        for steps in range(12):
            asking = asyncio.create_task(pool.post(server.url, "/x", [], b"{}", 20.0))
            for _ in range(steps):
                await asyncio.sleep(0)
            if not asking.cancel():
                (await asking).close()
                continue
            with pytest.raises(asyncio.CancelledError):
                await asking
            await wait_until(lambda: server.present == pool.counts(server.url)[0] == pool.counts(server.url)[1])


async def test_closing_waits_for_what_is_in_flight() -> None:
    gate = asyncio.Event()

    async def script(talk: Talk) -> None:
        await talk.request()
        await gate.wait()
        await talk.say(PLAIN)
        await talk.reader.read()

    async with raw_server(script) as server, connections() as pool:
        asking = asyncio.create_task(pool.post(server.url, "/x", [], b"{}", 20.0))
        await wait_until(lambda: len(server.requests) == 1)
        closing = asyncio.create_task(pool.close())
        gate.set()
        assert await (await asking).read(LIMIT) == b"hello"
        await closing
        await wait_until(lambda: server.present == 0)


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Key and certificate of 127.0.0.1 in one file, signed by itself."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed: apt-get install openssl")
    directory = tmp_path_factory.mktemp("tls")
    made, key = directory / "certificate.pem", directory / "key.pem"
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-days", "2", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(made)),
        ],
        check=True,
        capture_output=True,
    )
    made.write_text(made.read_text() + key.read_text())
    return made


def _server_tls(certificate: Path) -> ssl.SSLContext:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    return tls


async def test_a_replica_behind_tls(certificate: Path, no_blocking: BlockBuster) -> None:
    large = b"HTTP/1.1 200 OK\r\nContent-Length: 4000000\r\n\r\n" + b"x" * 4_000_000

    async def script(talk: Talk) -> None:
        while await talk.request():
            await talk.say(large)

    client_tls = await asyncio.to_thread(ssl.create_default_context, cafile=str(certificate))
    server_tls = await asyncio.to_thread(_server_tls, certificate)
    body = b"y" * 3_000_000
    async with raw_server(script, tls=server_tls) as server, connections(tls=client_tls) as pool:
        for _ in range(3):
            with await pool.post(server.url, "/x", [], body, 20.0) as answer:
                read = 0
                while piece := await answer.piece():
                    read += len(piece)
                assert read == 4_000_000
        assert server.accepted == 1
        assert server.requests[0].endswith(body)
        asking = asyncio.create_task(pool.post(server.url, "/x", [], body, 20.0))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await wait_until(lambda: server.present == 0, what="nobody is connected")


async def test_a_certificate_nobody_vouches_for_is_not_taken(certificate: Path) -> None:
    async with raw_server(_patient, tls=_server_tls(certificate)) as server, connections() as pool:
        with pytest.raises(ConnectFailed, match="certificate"):
            await pool.post(server.url, "/x", [], b"{}", 20.0)
        assert server.requests == []
        assert pool.counts(server.url) == (0, 0)


async def test_what_has_no_time_left_is_not_asked() -> None:
    async with raw_server(_patient) as server, connections() as pool:
        with await pool.post(server.url, "/x", [], b"{}", 20.0) as answer:
            await answer.read(100)
        with pytest.raises(TimedOut):
            await pool.post(server.url, "/x", [], b"{}", 0.0)
        assert (len(server.requests), pool.counts(server.url)) == (1, (1, 1))
