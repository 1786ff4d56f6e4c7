"""Redis over TLS, by every client that we have, with certificates made for it: a real Redis 7.0.

Valkey is not tried here: the program that tests run it from is built without TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from adaptersync_core.access import Instance, acl_file
from adaptersync_core.address import complete, where
from adaptersync_core.bus import follow
from adaptersync_core.errors import ControlError, ControlUnavailable
from adaptersync_core.keys import Keys
from adaptersync_core.pipe import Pipe
from adaptersync_core.redis import RedisClient, rq_connection, translated
from adaptersync_core.registry import Registry
from support.certificates import Authority
from support.redis_servers import server_binary
from support.wait import wait_until, wait_until_sync

OPERATOR = Instance("operator", "ops")
KEYS = Keys("test")


class Server:
    """One that wants to know its clients by certificate and by password."""

    def __init__(self, directory: Path, *hosts: str) -> None:
        self.authority = Authority(directory / "ours")
        certificate, key = self.authority.issue("server", *hosts)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.password = directory / "password"
        self.password.write_text("word-1\n")
        self.acl = directory / "users.acl"
        self.acl.write_text(acl_file("test", {OPERATOR: "word-1"}, admin="root"))
        lines = {
            "port": 0, "tls-port": self.port, "bind": "127.0.0.1", "tls-cert-file": certificate, "tls-key-file": key,
            "tls-ca-cert-file": self.authority.ca, "tls-auth-clients": "yes", "aclfile": self.acl, "dir": directory,
            "save": '""',
        }  # fmt: skip
        self.config = directory / "server.conf"
        self.config.write_text("".join(f"{name} {value}\n" for name, value in lines.items()))

    def url(self, ca: Path | None = None, *, shows: bool = True, who: str = "") -> str:
        certificate, key = (str(path) for path in self.authority.issue("client")) if shows else ("", "")
        return complete(
            f"rediss://{who}127.0.0.1:{self.port}/0",
            user=OPERATOR.user("test"),
            password_file=str(self.password),
            ca_file=str(ca or self.authority.ca),
            cert_file=certificate,
            key_file=key,
        )

    def listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1.0):
            return True
        return False


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    made = Server(tmp_path, *getattr(request, "param", ()))
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([server_binary("redis7"), str(made.config)], stdout=log, stderr=log)
    try:
        wait_until_sync(made.listens, what=f"the server listens: {(tmp_path / 'log').read_text()}")
        yield made
    finally:
        process.terminate()
        process.wait()


async def test_every_client_is_let_in(server: Server) -> None:
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
async def test_nobody_else_is_and_no_other_server_is_spoken_to(server: Server, tmp_path: Path, wrong: str) -> None:
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
async def test_a_server_that_poses_as_another_is_not_spoken_to(server: Server) -> None:
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


async def test_a_password_that_was_replaced_is_used_by_the_next_connection(server: Server) -> None:
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
