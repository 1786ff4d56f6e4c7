"""A real Redis 7.0 that is spoken to over TLS, and wants to know its clients by certificate and by password."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from adaptersync_core.access import RedisUser, acl_file
from adaptersync_core.address import complete
from support.certificates import Authority
from support.redis_servers import server_binary
from support.wait import wait_until_sync

OPERATOR = RedisUser("operator", "ops")


class TlsServer:
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

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        log = self.config.with_name("log")
        with log.open("wb") as output:
            process = subprocess.Popen([server_binary("redis7"), str(self.config)], stdout=output, stderr=output)
        try:
            wait_until_sync(self.listens, what=f"the server listens: {log.read_text()}")
            yield
        finally:
            process.terminate()
            process.wait()
