"""What has failed keeps nothing: with its frames an error would keep bodies, and the collector looks rarely."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Iterator

import pytest

from adaptersync.router import server
from adaptersync.router.call import Call
from adaptersync.router.connection import Answer
from adaptersync.router.course import Course
from support.router_fleet import V1, Fleet
from support.wait import wait_until

pytestmark = pytest.mark.usefixtures("no_collector")


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # what other tests have left is not looked at
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


async def nothing_is_left(*kinds: type) -> None:
    def freed() -> bool:
        return not any(isinstance(each, kinds) for each in gc.get_objects())

    await wait_until(freed, what=f"{[kind.__name__ for kind in kinds]} are freed")


async def test_a_request_that_nobody_could_answer(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        for replica in fleet.replicas.values():
            replica.fail = [500]
        assert (await fleet.complete(V1, [1] * 1000)).status == 500
        await nothing_is_left(Call, Course, Answer)


async def test_a_request_whose_replicas_cut_the_connection(fleet: Fleet) -> None:
    async with _cutting() as url:
        await fleet.tables.write({V1: "current"}, dict.fromkeys(fleet.urls, url))
        async with fleet.router():
            assert (await fleet.complete(V1, [1] * 1000)).status == 503
            await nothing_is_left(Call, Course, Answer)


async def test_a_body_that_is_refused_in_its_midst(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router(body_bytes=1 << 16) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(2):
            writer.write(b"10000\r\n" + b"x" * (1 << 16) + b"\r\n")
        assert b" 413 " in await reader.readline()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        await nothing_is_left(server._Connection)


@contextlib.asynccontextmanager
async def _cutting() -> AsyncIterator[str]:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nx")
        await writer.drain()
        writer.transport.abort()

    listening = await asyncio.start_server(cut, "127.0.0.1", 0)
    async with listening:
        host, port = listening.sockets[0].getsockname()
        yield f"http://{host}:{port}"
