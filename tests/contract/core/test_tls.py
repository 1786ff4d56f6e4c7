"""Redis over TLS, by every client that we have, with certificates made for it: a real Redis 7.0.

Valkey is not tried here: the program that tests run it from is built without TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from adaptersync_core.access import acl_file
from adaptersync_core.address import where
from adaptersync_core.bus import follow
from adaptersync_core.errors import ControlError, ControlUnavailable
from adaptersync_core.keys import Keys
from adaptersync_core.pipe import Pipe
from adaptersync_core.redis import RedisClient, rq_connection, translated
from adaptersync_core.registry import Registry
from support.certificates import Authority
from support.tls_server import OPERATOR, TlsServer
from support.wait import wait_until

KEYS = Keys("test")


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[TlsServer]:
    made = TlsServer(tmp_path, *getattr(request, "param", ()))
    with made.running():
        yield made


async def test_every_client_is_let_in(server: TlsServer) -> None:
    url = server.url()
    client, pipe = RedisClient(url, name="test"), Pipe(url, name="test", timeout_s=5.0)
    seen: list[str] = []

    async def listen() -> None:
        async for entries in follow(url, KEYS.events, name="test", after="0"):
            seen.extend(fields["type"] for _, fields in entries)

    listening = asyncio.create_task(listen())
    try:
        assert await Registry(client, KEYS).runs() == []
        await pipe.connect()
        assert await pipe.call("TIME")
        await client.command("XADD", KEYS.events, "*", "type", "run.ended")
        await wait_until(lambda: seen == ["run.ended"], what="the event is followed")
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        await client.close()
        await pipe.close()

    def as_rq() -> bool:
        with translated(url), contextlib.closing(rq_connection(url)) as connection:
            return bool(connection.ping())

    assert await asyncio.to_thread(as_rq)


@pytest.mark.parametrize("wrong", ["stranger", "no certificate", "no password"])
async def test_nobody_else_is_and_no_other_server_is_spoken_to(server: TlsServer, tmp_path: Path, wrong: str) -> None:
    """A server that another authority vouches for; a client without a certificate; one with another password."""
    url = server.url()
    if wrong == "stranger":
        url = server.url(Authority(tmp_path / "theirs").ca)
    elif wrong == "no certificate":
        url = server.url(shows=False)
    else:
        server.password.write_text("another\n")
    client, pipe = RedisClient(url, name="test"), Pipe(url, name="test", timeout_s=5.0)
    try:
        with pytest.raises(ControlError) as error:
            await client.command("PING")
        assert where(url) in str(error.value)
        assert "another" not in str(error.value)
        assert "password_file" not in str(error.value)
        with pytest.raises(ControlError):
            await pipe.connect()
    finally:
        await client.close()
        await pipe.close()


@pytest.mark.parametrize("server", [("elsewhere.example",)], indirect=True)
async def test_a_server_that_poses_as_another_is_not_spoken_to(server: TlsServer) -> None:
    """One that our own authority vouches for, by another name."""
    client, pipe = RedisClient(server.url(), name="test"), Pipe(server.url(), name="test", timeout_s=5.0)
    try:
        with pytest.raises(ControlUnavailable):
            await client.command("PING")
        with pytest.raises(ControlUnavailable):
            await pipe.connect()
    finally:
        await client.close()
        await pipe.close()
    with (
        pytest.raises(ControlUnavailable),
        translated(server.url()),
        contextlib.closing(rq_connection(server.url())) as connection,
    ):
        await asyncio.to_thread(connection.ping)


async def test_a_password_that_was_replaced_is_used_by_the_next_connection(server: TlsServer) -> None:
    url = server.url()
    admin = RedisClient(server.url(who="admin:root@"), name="test")
    client = RedisClient(url, name="test")
    try:
        assert await client.command("PING")
        server.acl.write_text(acl_file("test", {OPERATOR: "word-2"}, admin="root"))
        server.password.write_text("word-2\n")
        await admin.command("ACL", "LOAD")  # which ends connections of users that are other ones now

        async def again() -> bool:
            try:
                return bool(await client.command("PING"))
            except ControlUnavailable:
                return False

        await wait_until(again, what="it is let in with the next password")
    finally:
        await client.close()
        await admin.close()
