"""The servers that tests run on: a real Redis, our floor, and a real Valkey. Never a fake, never skipped.

Knows which program is which and starts each once per test session and role. Knows nothing of our keys but
that each must expire or be one that `adaptersync_core.keys` names as permanent.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import redis

from adaptersync_core import keys
from adaptersync_tools.servers import RedisServer, Role, ServerError, embedded_binary

KINDS = ("redis7", "valkey9")
GONE = "none"  # what TYPE says of a key that expired since SCAN listed it


def server_binary(kind: str) -> str:
    """The program of a kind; its absence fails the test with the command that ends it."""
    if kind == "redis7":
        found = shutil.which("redis-server")
        if found is None:
            pytest.fail("no redis-server on PATH: apt-get install redis-server (tools/test does it)", pytrace=False)
        return found
    try:
        return str(embedded_binary())
    except ServerError as error:
        pytest.fail(f"{error} (tools/test does it)", pytrace=False)


def objection(key: str, kind: str, ttl_s: int, role: Role) -> str | None:
    """Why a key with this type and time to live may not be on a server of this role; -1 is no time to live."""
    if kind == GONE:
        return None
    for spec in keys.SPECS:
        pattern = re.sub(r"\\{\w+\\}", "[^:]+", re.escape(spec.pattern))
        if re.fullmatch(rf"{keys.PREFIX}:\{{[^}}]+\}}:{pattern}", key):
            if spec.server != role:
                return f"belongs on the {spec.server} server"
            if spec.type != kind:
                return f"is a {kind}, listed as {spec.type}"
            if spec.ttl_s and ttl_s == -1:
                return f"never expires, listed with {spec.ttl_s} s"
            return None
    return "is no key of adaptersync_core.keys"


class RedisServers:
    """Servers by kind and role, started when first asked for, emptied for each test that asks."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._servers: dict[tuple[str, Role], RedisServer] = {}
        self._in_use: set[tuple[str, Role]] = set()

    def url(self, kind: str, role: Role) -> str:
        """The address of an empty server of that kind and role."""
        server = self._servers.get((kind, role))
        if server is None or server.pid is None:
            server = RedisServer(role, self._directory / f"{kind}-{role}", binary=server_binary(kind), maxmemory_mb=256)
            server.start()
            self._servers[kind, role] = server
        with redis.Redis.from_url(server.url) as client:
            client.flushall()
        self._in_use.add((kind, role))
        return server.url

    def unlisted_keys(self) -> list[str]:
        """What the test left that `adaptersync_core.keys` does not allow, with the reason; forgets what was in use."""
        found = []
        for kind, role in sorted(self._in_use):
            with redis.Redis.from_url(self._servers[kind, role].url, decode_responses=True) as client:
                for key in client.scan_iter(count=1000):
                    if reason := objection(key, client.type(key), client.ttl(key), role):
                        found.append(f"{kind} {role}: {key}: {reason}")
        self._in_use.clear()
        return found

    def stop(self) -> None:
        for server in self._servers.values():
            server.stop()
