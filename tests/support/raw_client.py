"""A service whose answers a test decides, behind the router's server, and a client that says and reads plain bytes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import orjson

from adaptersync.router.request import Refused, Reply, Request
from adaptersync.router.server import Limits, Server

LIMITS = {"head_bytes": 4096, "body_bytes": 1 << 20, "arriving_bytes": 16 << 20, "connections": 100}
LARGE = bytes(range(256)) * (48 << 10)  # 12 MiB: more than sockets hold


class Served:
    """Handles by path, and notes what it was asked. `gate` lets /wait go, `pieces` one piece of /stream each time."""

    def __init__(self) -> None:
        self.seen: list[Request] = []
        self.refused: list[tuple[int, str]] = []
        self.gate = asyncio.Event()
        self.pieces = asyncio.Semaphore(0)
        self.in_flight = 0
        self.cancelled = 0

    async def handle(self, request: Request) -> Reply | None:
        self.seen.append(request)
        self.in_flight += 1
        try:
            return await self._handle(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1

    async def _handle(self, request: Request) -> Reply | None:
        match request.path:
            case "/wait":
                await self.gate.wait()
            case "/large":
                return Reply(200, (), LARGE)
            case "/fail":
                raise ValueError("on purpose")
            case "/half":
                request.begin(200, (), 10)
                await request.write(b"half")
                return None
            case "/break":
                request.begin(200, (), None)
                raise ValueError("on purpose")
            case "/stream":
                request.begin(200, ((b"x-kind", b"stream"),), None)
                for piece in (b"one ", b"two ", b"three"):
                    await self.pieces.acquire()
                    await request.write(piece)
                request.end()
                return None
            case "/flood":
                request.begin(200, (), None)
                while True:
                    await request.write(LARGE)
        said = {
            "method": request.method,
            "target": request.target,
            "headers": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in request.headers],
            "body": request.body.decode("latin-1"),
        }
        return Reply(200, ((b"content-type", b"application/json"),), orjson.dumps(said))

    def refuse(self, request: Request, error: Refused) -> Reply:
        self.refused.append((error.status, error.reason))
        return Reply(error.status, (), error.reason.encode())


@dataclass
class Got:
    """One answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def target(self) -> str:
        return str(orjson.loads(self.body)["target"])


@dataclass
class Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def say(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self, *, bodiless: bool = False) -> Got:
        """The next one, framed as its head says; IncompleteReadError when it is cut."""
        async with asyncio.timeout(20.0):
            status, headers = _head(await self.reader.readuntil(b"\r\n\r\n"))
            if bodiless or status < 200:
                return Got(status, headers, b"")
            if headers.get("transfer-encoding") == "chunked":
                return Got(status, headers, await self._chunks())
            if "content-length" in headers:
                return Got(status, headers, await self.reader.readexactly(int(headers["content-length"])))
            return Got(status, headers, await self.reader.read())

    async def _chunks(self) -> bytes:
        body = b""
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            body += await self.reader.readexactly(size)
            assert await self.reader.readexactly(2) == b"\r\n"
        assert await self.reader.readexactly(2) == b"\r\n"
        return body

    async def ended(self) -> bytes:
        """What comes until the connection ends, however it ends."""
        rest = b""
        async with asyncio.timeout(20.0):
            try:
                while piece := await self.reader.read(65_536):
                    rest += piece
            except ConnectionError:
                pass
        return rest

    async def leave(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


def _head(raw: bytes) -> tuple[int, dict[str, str]]:
    line, *lines = raw.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    assert line.startswith("HTTP/1.1 ")
    headers: dict[str, str] = {}
    for each in lines:
        name, _, value = each.partition(": ")
        assert name not in headers, f"twice: {name}"
        headers[name] = value
    return int(line.split()[1]), headers


@dataclass
class Place:
    """A server that listens."""

    server: Server
    served: Served
    host: str
    port: int
    clients: list[Client] = field(default_factory=list)

    async def client(self, *, receives: int = 0) -> Client:
        """One more connection, whose system holds so many bytes that nobody has read."""
        plain = socket.socket()
        if receives:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
        plain.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(plain, (self.host, self.port))
        except OSError:
            plain.close()
            raise
        client = Client(*await asyncio.open_connection(sock=plain, limit=65_536))
        self.clients.append(client)
        return client


@contextlib.asynccontextmanager
async def listening(*, drain_s: float = 0.0, **limits: int) -> AsyncIterator[Place]:
    """Nothing is left when it ends: neither connections nor bytes that are said to arrive."""
    server, served = Server(Limits(**LIMITS | limits)), Served()
    place = Place(server, served, *await server.listen(served, "127.0.0.1", 0))
    try:
        yield place
    finally:
        await server.stop(drain_s)
        for client in place.clients:
            await client.leave()
    assert not server.connections
    assert server.arriving == 0
    assert served.in_flight == 0
