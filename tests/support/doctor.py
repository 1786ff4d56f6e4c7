"""A host that is looked at by `adaptersync doctor`, and what is said of it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import NamedTuple

from adaptersync_core.config import Config
from adaptersync_core.redis import RedisClient
from adaptersync_tools.doctor import ROLES, Finding, Role, examine
from adaptersync_tools.servers import RedisServer


class Host(NamedTuple):
    config: Config
    control: RedisServer
    cache: RedisServer


async def look(config: Config, *roles: Role) -> list[Finding]:
    return (await examine(config, frozenset(roles or ROLES))).findings


def said(findings: list[Finding], what: str, level: str = "error") -> bool:
    """Exactly one finding says so, of that level, and what to do."""
    (found,) = [finding for finding in findings if what in finding.what]
    assert found.fix
    assert found.level == level
    assert "\n" not in str(found)
    return True


@contextlib.asynccontextmanager
async def changed(server: RedisServer, **settings: str) -> AsyncIterator[None]:
    """Other settings of a server, and its own again."""
    client = RedisClient(server.url, name="test")
    names = [name.replace("_", "-") for name in settings]
    try:
        before = {name: (await client.command("CONFIG", "GET", name)) for name in names}
        for name, value in zip(names, settings.values(), strict=True):
            await client.command("CONFIG", "SET", name, value)
        yield
        for name, found in before.items():
            await client.command("CONFIG", "SET", name, found[name] if isinstance(found, dict) else found[1])
    finally:
        await client.close()
