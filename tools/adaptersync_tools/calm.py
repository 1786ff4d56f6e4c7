"""Whether the fleet is well, and at rest: what it must come to by itself after every fault."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import aiohttp
import orjson

from adaptersync_core.errors import ControlError
from adaptersync_core.registry import Registry
from adaptersync_core.table import Table
from adaptersync_tools.supervisor import Service

LOOK_S = 0.2
CALL_S = 5.0


class Calm:
    """Asks the engines and routers themselves."""

    def __init__(
        self,
        registry: Registry,
        *,
        services: Mapping[str, Service],
        engines: Mapping[str, str],
        routers: Sequence[str],
        runs: Sequence[str],
    ) -> None:
        self._registry = registry
        self._services = services
        self._engines = engines
        self._routers = routers
        self._runs = runs

    async def well(self, before: Collection[str], limit_s: float) -> str:
        """Wait until every replica is ready and every router serves a version of each run that is not in `before`.

        What is still missing when `limit_s` has passed, or nothing.
        """
        deadline = time.monotonic() + limit_s
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_S)) as session:
            while why := await self._unwell(session, before):
                if time.monotonic() > deadline:
                    return why
                await asyncio.sleep(LOOK_S)
        return ""

    async def at_rest(self, limit_s: float) -> str:
        """With nothing published any more: wait until every engine lists what is served and nothing else."""
        deadline = time.monotonic() + limit_s
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_S)) as session:
            while why := await self._restless(session):
                if time.monotonic() > deadline:
                    return why
                await asyncio.sleep(LOOK_S)
        return ""

    async def _unwell(self, session: aiohttp.ClientSession, before: Collection[str]) -> str:
        given_up = [name for name, service in self._services.items() if service.given_up]
        if given_up:
            return f"given up: {', '.join(given_up)}"
        try:
            table = await self._registry.table()
            missing = [f"{name}: {_said(table, name)}" for name in self._engines if name not in table.ready()]
            if missing:
                return f"not ready: {'; '.join(missing)}"
            for run in self._runs:
                current = table.runs[run].current if run in table.runs else None
                if current is None or current in before:
                    return f"no newer version of {run} is current"
                for url in self._routers:
                    body = {"model": current, "prompt": [33], "max_tokens": 1}
                    status = await _status(session, f"{url}/v1/completions", body)
                    if status != 200 and (await self._registry.table()).routable(current):
                        return f"{url} answers {status} for {current}"
        except ControlError as error:
            return str(error)
        return ""

    async def _restless(self, session: aiohttp.ClientSession) -> str:
        try:
            table = await self._registry.table()
        except ControlError as error:
            return str(error)
        served = {name for name in table.versions if table.routable(name)}
        if set(table.versions) != served:
            return f"still on their way: {', '.join(sorted(set(table.versions) - served))}"
        for name, url in self._engines.items():
            held = await _listed(session, url)
            if held != served:
                return f"{name} lists {sorted(held or ())} instead of {sorted(served)}"
        return ""


def _said(table: Table, name: str) -> str:
    member = table.members.get(name)
    return f"{member.state}, {member.reason}" if member else "is no member"


async def _status(session: aiohttp.ClientSession, url: str, body: object) -> int:
    try:
        async with session.post(url, json=body) as answer:
            await answer.read()
            return answer.status
    except (aiohttp.ClientError, TimeoutError, OSError):
        return 0


async def _listed(session: aiohttp.ClientSession, url: str) -> set[str] | None:
    """Adapters of ours that an engine's server lists."""
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError):
        async with session.get(f"{url}/v1/models") as answer:
            cards: list[dict[str, Any]] = orjson.loads(await answer.read())["data"]
            return {card["id"] for card in cards if card.get("parent") and not card["id"].startswith("canary")}
    return None
