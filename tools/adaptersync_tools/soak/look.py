"""One look at everything that could grow: processes, both Redis servers, the engines' adapters, the store."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from msgspec import Struct

from adaptersync_core.keys import Keys
from adaptersync_core.redis import RedisClient
from adaptersync_core.store import ARCHIVE, ArtifactStore
from adaptersync_tools.soak.processes import Process, processes
from adaptersync_tools.up import Stack

CALL_S = 5.0
PAGE = 1000
EVENTS, LEDGER = "events", "rollouts"
RECORDS = ("manifest:", "version:", "verified:")
# streams keep jobs.ledger_kept_s; a version's bytes go ten minutes after it came, its records after thirty days; and
# a finished job, with what came of it, after an hour
APART = (EVENTS, LEDGER, "lane:", *RECORDS)
JOBS = ("rq:job:", "rq:results:")
_MARKER = ".visible-"


class Server(Struct, frozen=True, kw_only=True):
    """A Redis server: bytes it has in use, those of them that belong to what is looked at apart, keys by kind."""

    used: int
    apart: dict[str, int]
    keys: dict[str, int]


class Sample(Struct, frozen=True, kw_only=True):
    """`published` counts versions, `adapters` what each engine lists, `staged` the versions on each agent's disk.

    Of the store: `stored` versions, `markers`, and `leftovers` of what was on its way in or out. `disk` is bytes.
    """

    at_s: float
    published: int
    processes: list[Process]
    servers: dict[str, Server]
    adapters: dict[str, int]
    stored: int
    markers: int
    leftovers: int
    staged: dict[str, int]
    disk: dict[str, int]


class Look:
    """Looks, and shares nothing with what it looks at but Redis and the disk."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_S))
        self._keys = Keys(stack.config.group.name)
        self._head = self._keys.table.removesuffix("table")
        self._apart = (*(self._head + name for name in APART), *JOBS)
        self._store = ArtifactStore(Path(stack.config.store.path))
        self._servers = {
            "redis-control": RedisClient(stack.config.redis.control_url, name="soak"),
            "redis-cache": RedisClient(stack.config.redis.cache_url, name="soak"),
        }

    async def close(self) -> None:
        await self._session.close()
        for client in self._servers.values():
            await client.close()

    async def sample(self, *, at_s: float, published: int) -> Sample:
        running = await asyncio.to_thread(lambda: list(processes(self._stack.supervisor.services)))
        return Sample(
            at_s=round(at_s, 1),
            published=published,
            processes=running,
            servers={name: await self._server(client) for name, client in self._servers.items()},
            adapters={
                name: held
                for name, url in self._stack.engine_urls.items()
                if (held := await _listed(self._session, url)) is not None
            },
            **await asyncio.to_thread(self._disks),
        )

    async def _server(self, client: RedisClient) -> Server:
        info = await client.command("INFO", "memory")
        used = int(info["used_memory"] if isinstance(info, dict) else re.findall(r"used_memory:(\d+)", info)[0])
        apart, kinds = Counter[str](), Counter[str]()
        cursor = "0"
        while True:
            cursor, names = await client.command("SCAN", cursor, "COUNT", PAGE)
            kinds.update(kind(name, self._head) for name in names)
            found = [name for name in names if name.startswith(self._apart)]
            sizes = await client.pipeline([("MEMORY", "USAGE", name, "SAMPLES", 0) for name in found])
            for name, size in zip(found, sizes, strict=True):
                apart[kind(name, self._head)] += size or 0
            if str(cursor) == "0":
                return Server(used=used, apart=dict(apart), keys=dict(kinds))

    def _disks(self) -> dict[str, Any]:
        root, stages = self._store.root, self._stack.state_dir / "staged"
        found, disk = Counter[str](), Counter[str]()
        for entry in _entries(root):
            if entry.name.startswith(_MARKER):
                found["markers"] += 1
            elif entry.name.startswith("."):
                disk["archive" if entry.name == ARCHIVE else "journal"] += _bytes(Path(entry.path))
            elif entry.is_dir():
                disk["store"] += _bytes(Path(entry.path))
                found["leftovers"] += sum(version.name.startswith(".") for version in _entries(Path(entry.path)))
        return {
            "stored": sum(1 for _ in self._store.versions()),
            "markers": found["markers"],
            "leftovers": found["leftovers"],
            "staged": {name: len(list(_entries(stages / name))) for name in self._stack.engine_urls},
            "disk": disk | {"staged": _bytes(stages), "spool": _bytes(self._stack.state_dir / "spool")},
        }


def kind(key: str, head: str) -> str:
    """A key without what is particular to it; rq's own have two words."""
    own = key.removeprefix(head)
    first, colon, rest = own.partition(":")
    if own != key:
        return f"{first}:*" if colon else first
    second, more, _ = rest.partition(":")
    return f"{first}:{second}:*" if more else key


async def _listed(session: aiohttp.ClientSession, url: str) -> int | None:
    """How many adapters an engine's server lists, canaries too; None while it does not answer."""
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError):
        async with session.get(f"{url}/v1/models") as answer:
            return sum(bool(card.get("parent")) for card in orjson.loads(await answer.read())["data"])
    return None


def _entries(directory: Path) -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        yield from entries


def _bytes(directory: Path) -> int:
    if directory.is_file():
        return directory.stat().st_size
    return sum(
        _bytes(Path(entry.path)) if entry.is_dir(follow_symlinks=False) else _size(entry)
        for entry in _entries(directory)
    )


def _size(entry: os.DirEntry[str]) -> int:
    with contextlib.suppress(FileNotFoundError):
        return entry.stat(follow_symlinks=False).st_size
    return 0
