"""A TCP proxy that loses things: what a client sees when the network, or the other end, fails half-way.

Knows bytes and connections, no protocol. A fault is armed for the next requests that contain some bytes, so
that a client's own handshake does not use it up. A request is what the client sends until the server answers;
one that is longer than a socket buffer arrives in pieces, and is recognised when the piece with those bytes
has arrived.

Covered: a reply lost after the server did the work, a request lost before, cut connections, slow and silent
networks, refused connections. Not covered: reordered or corrupted bytes, which TCP does not show to a client.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from dataclasses import dataclass
from types import TracebackType
from typing import Self

_CHUNK = 65536


class Fault(enum.Enum):
    """What happens to a matching request; afterwards its connection is cut."""

    LOSE_REQUEST = "the server never sees it"
    LOSE_REPLY = "the server executes it, the client never hears of it"


@dataclass
class _Armed:
    fault: Fault
    match: bytes
    times: int


class FaultProxy:
    """Listens on a free local port and forwards to one server; an async context manager.

    delay_s: added to each piece on its way to the client. blackhole: accept and read, forward nothing in
    either direction (what was held back is forwarded when it ends). refuse: cut each new connection at once.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._armed: list[_Armed] = []
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._open = asyncio.Event()
        self._open.set()
        self.port = 0
        self.delay_s = 0.0
        self.refuse = False
        self.faults_done = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self._open.set()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def arm(self, fault: Fault, *, match: bytes = b"", times: int = 1) -> None:
        """Let the next `times` requests that contain `match` suffer the fault."""
        self._armed.append(_Armed(fault, match, times))

    def cut(self) -> None:
        """Reset every connection now."""
        for connection in self._connections:
            connection.cut()

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self._connections)

    @property
    def blackhole(self) -> bool:
        return not self._open.is_set()

    @blackhole.setter
    def blackhole(self, value: bool) -> None:
        if value:
            self._open.clear()
        else:
            self._open.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(self, reader, writer)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._connections.add(connection)
        try:
            if not self.refuse:
                await connection.run(*self._target)
        finally:
            connection.cut()
            self._connections.discard(connection)

    def _next_fault(self, seen: bytes) -> Fault | None:
        for armed in self._armed:
            if armed.match in seen:
                armed.times -= 1
                if armed.times == 0:
                    self._armed.remove(armed)
                return armed.fault
        return None


class _Connection:
    def __init__(self, proxy: FaultProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._client = (reader, writer)
        self._writers = [writer]
        self._request = b""  # what the client sent since the server last answered
        self._swallow = False

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def run(self, host: str, port: int) -> None:
        try:
            server = await asyncio.open_connection(host, port)
        except OSError:
            return
        self._writers.append(server[1])
        directions = (
            asyncio.create_task(self._requests(self._client[0], server[1])),
            asyncio.create_task(self._replies(server[0], self._client[1])),
        )
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in directions:
                task.cancel()
            await asyncio.gather(*directions, return_exceptions=True)

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while chunk := await reader.read(_CHUNK):
                self._request += chunk
                await self._proxy._open.wait()
                fault = None if self._swallow else self._proxy._next_fault(self._request)
                if fault is Fault.LOSE_REQUEST:
                    self._proxy.faults_done += 1
                    return
                self._swallow = self._swallow or fault is Fault.LOSE_REPLY
                writer.write(chunk)
                await writer.drain()

    async def _replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while chunk := await reader.read(_CHUNK):
                if self._swallow:
                    self._proxy.faults_done += 1
                    return
                self._request = b""
                await self._proxy._open.wait()
                await asyncio.sleep(self._proxy.delay_s)
                writer.write(chunk)
                await writer.drain()
