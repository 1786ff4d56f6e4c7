"""Looks at the replicas past the router: does each hold what the table says it serves, and was it ever paused?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from pathlib import Path

import aiohttp
import orjson

from adaptersync_core.errors import ControlError, EngineError
from adaptersync_core.registry import Registry
from adaptersync_core.table import Table
from adaptersync_core.vllm import VllmClient
from adaptersync_tools.chaos.history import Violation

REST_S = 0.5
CALL_S = 5.0
PAUSES = ("/pause", "/resume", "/sleep", "/wake_up")


class Probe:
    """`checked` counts questions that had to be answered with 200, and were.

    `token_file` tells where the agent of a replica keeps what lets it pass its engine's door. `newest` is the highest
    generation that was heard of: a table below it is one that Redis was set back to.
    """

    def __init__(
        self,
        registry: Registry,
        found: Callable[[Violation], None],
        *,
        token_file: Callable[[str], Path],
        newest: Callable[[], int],
        voided: Collection[str],
    ) -> None:
        self._registry = registry
        self._token_file = token_file
        self._newest = newest
        self._voided = voided
        self._found = found
        self.checked = 0

    async def run(self) -> None:
        """Until cancelled."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_S)) as session:
            while True:
                await asyncio.sleep(REST_S)
                table = await self.table()
                if table is None:
                    continue
                for version in self._voided:
                    if table.routable(version):
                        what = f"generation {table.generation} serves {version}, which was voided"
                        self._found(Violation(kind="voided", what=what, at=time.time()))
                for name in table.ready():
                    await self._paused(session, table.members[name].url)
                    for version in table.versions:
                        if table.routable(version):
                            await self._holds(session, table, name, version)

    async def table(self) -> Table | None:
        try:
            table = await self._registry.table()
        except ControlError:
            return None
        return table if table.generation >= self._newest() else None

    async def _paused(self, session: aiohttp.ClientSession, url: str) -> None:
        try:
            async with session.get(f"{url}/simulator/calls") as answer:
                calls = orjson.loads(await answer.read())["calls"]
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError):
            return  # killed or frozen: it is asked again
        if sent := [path for path in PAUSES if calls.get(path)]:
            self._found(Violation(kind="pause", what=f"{', '.join(sent)} was sent to {url}", at=time.time()))

    async def _holds(self, session: aiohttp.ClientSession, table: Table, name: str, version: str) -> None:
        """A 404 counts only if the table still says so afterwards, and the engine is still in the life it speaks of."""
        member = table.members[name]
        body = {"model": version, "prompt": [33, 34, 35], "max_tokens": 1, "temperature": 0}
        try:
            async with session.post(f"{member.url}/v1/completions", json=body) as answer:
                status, raw = answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError):
            return
        if status == 200:
            self.checked += 1
            return
        after = await self.table()
        if after is None or not after.routable(version) or after.members.get(name) != member:
            return
        try:
            # the engine says its life to whom its door lets in
            token = await asyncio.to_thread(self._token_file(name).read_text)
            async with VllmClient(member.url, token=token) as client:
                life = await client.identity()
                epoch = life.life if life else await client.epoch()
        except (EngineError, OSError):
            return
        if epoch == member.engine_epoch:
            text = raw[:200].decode(errors="replace")
            what = f"{name} answers {status} for {version}, which the table says it serves: {text}"
            self._found(Violation(kind="evicted", what=what, at=time.time()))
