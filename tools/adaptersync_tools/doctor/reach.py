"""Whether others can be reached from here: replicas by routers, a router by trainers. No word is said to them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from urllib.parse import urlsplit

from adaptersync_core.config import Config
from adaptersync_core.errors import ControlError
from adaptersync_core.keys import Keys
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from adaptersync_tools.doctor.finding import Role, Verdict

CONNECT_S = 3.0
AT_ONCE = 32


async def examine(verdict: Verdict, config: Config, roles: frozenset[Role]) -> None:
    if "router" in roles:
        for name, reason in (await _unreached(await _replicas(config))).items():
            what = f"{name} cannot be reached from here: {reason}"
            fix = "see its host's firewall, and what its agent has as agent.public_url"
            verdict.check("replicas", not reason, what, fix)
    if "trainer" in roles:
        (reason,) = (await _unreached({"router": config.trainer.router_url})).values()
        what = f"{config.trainer.router_url} cannot be reached from here: {reason}"
        verdict.check("router", not reason, what, "start it, or set trainer.router_url", level="warning")


async def _replicas(config: Config) -> dict[str, str]:
    """Addresses of replicas that may be sent requests; none while nobody knows them."""
    client = RedisClient(config.redis.control_url, name="doctor", timeout_s=CONNECT_S)
    try:
        table = await Registry(client, Keys(config.group.name)).table()
    except ControlError:
        return {}  # which is said of the server
    finally:
        await client.close()
    return {name: table.members[name].url for name in table.ready()}


async def _unreached(urls: Mapping[str, str]) -> dict[str, str]:
    """Why each cannot be connected to; nothing where it can."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def connect(url: str) -> str:
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
            async with turns, asyncio.timeout(CONNECT_S):
                _, writer = await asyncio.open_connection(parts.hostname, port)
        except TimeoutError:
            return f"no answer in {CONNECT_S:g} s"
        except (OSError, ValueError) as error:
            return str(error)
        writer.close()
        return ""

    return dict(zip(urls, await asyncio.gather(*map(connect, urls.values())), strict=True))
