"""A whole fleet that speaks TLS wherever it leaves a host: to Redis, and from routers to replicas."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

from support.certificates import Authority
from support.tls_server import TlsServer
from support.whole_fleet import WholeFleet, fleet_config, whole_fleet


@contextlib.asynccontextmanager
async def ending_tls(port: int, context: ssl.SSLContext) -> AsyncIterator[str]:
    """The https address of what listens at `port`."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(65536):
                writer.write(piece)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, behind[1]), pump(behind[0], writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def behind(fleet: WholeFleet, authority: Authority, opened: contextlib.AsyncExitStack) -> None:
    """Start the fleet with TLS before each of its engines."""
    fleet.start_coordinator()
    for replica in fleet.replicas.values():
        await replica.start_engine()
        url = await opened.enter_async_context(ending_tls(replica.port, authority.server()))
        replica.start_agent(public_url=url)
    await fleet.ready()
    await fleet.start_router(replica_ca_file=str(authority.ca))


async def test_a_fleet_over_tls_promotes_and_serves(tmp_path: Path) -> None:
    directories = [tmp_path / name for name in ("control", "cache")]
    for directory in directories:
        directory.mkdir()
    control, cache = (TlsServer(directory) for directory in directories)
    authority = Authority(tmp_path / "replicas")
    with control.running(), cache.running():
        config = fleet_config(control.url(who="admin:root@"), cache.url(who="admin:root@"), tmp_path)
        async with (
            contextlib.AsyncExitStack() as opened,
            whole_fleet(config, tmp_path, start=False) as fleet,
        ):
            await behind(fleet, authority, opened)
            trainer = await fleet.trainer()
            version = await fleet.promoted(trainer)
            answer = await fleet.complete("run")
            assert (answer.status, answer.headers["x-adaptersync-version"]) == (200, version)
            table = await fleet.table()
            assert all(member.url.startswith("https://") for member in table.members.values())
            assert await fleet.promoted(trainer) != version
