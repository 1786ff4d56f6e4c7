"""A server that reads requests and writes whatever bytes a test wants, when it wants."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from adaptersync.router.connections import Connections


@dataclass
class Talk:
    """One connection, from the server's side."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    server: RawServer

    async def request(self) -> bytes:
        """The next request whole, which is noted; IncompleteReadError when the client is gone."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        whole = head + await self.reader.readexactly(length)
        self.server.requests.append(whole)
        return whole

    async def say(self, *pieces: bytes) -> None:
        """Each piece on its way before the next is written."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0)

    def reset(self) -> None:
        """The client is told that the connection broke, not that it ended."""
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Script = Callable[[Talk], Awaitable[None]]


@dataclass
class RawServer:
    """`accepted` counts connections, `present` is how many there are; `requests` are those read whole."""

    script: Script
    url: str = ""
    accepted: int = 0
    present: int = 0
    requests: list[bytes] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    listener: asyncio.Server | None = None

    def leave(self) -> None:
        """From now on nobody is there for those who come."""
        assert self.listener is not None
        self.listener.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        self.accepted += 1
        self.present += 1
        try:
            await self.script(Talk(reader, writer, self))
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            self.present -= 1
            self.tasks.discard(task)
            writer.close()


@contextlib.asynccontextmanager
async def raw_server(script: Script, *, port: int = 0, tls: ssl.SSLContext | None = None) -> AsyncIterator[RawServer]:
    """`script` is run for each connection, which is closed when it returns."""
    raw = RawServer(script)
    server = raw.listener = await asyncio.start_server(raw.serve, "127.0.0.1", port, ssl=tls)
    host, port = server.sockets[0].getsockname()[:2]
    raw.url = f"{'https' if tls else 'http'}://{host}:{port}"
    try:
        yield raw
    finally:
        server.close()
        for task in raw.tasks:
            task.cancel()
        await asyncio.gather(*raw.tasks, return_exceptions=True)


def answering(*answers: bytes) -> Script:
    """Each request on a connection gets the next of these; then the connection is closed."""

    async def script(talk: Talk) -> None:
        for answer in answers:
            await talk.request()
            await talk.say(answer)

    return script


@contextlib.asynccontextmanager
async def connections(
    *, connect_timeout_s: float = 5.0, most: int = 100, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Connections]:
    made = Connections(connect_timeout_s=connect_timeout_s, most=most, tls=tls)
    try:
        yield made
    finally:
        async with asyncio.timeout(5):
            await made.close()
