"""The baseline: how the published Hugging Face proxy synchronizes an adapter. Written from its description.

The fleet is paused, every replica is told to load the version and told again while it finds nothing, and the fleet is
resumed when all have it. Only "no adapter found" is worth another try; whatever else happens, replicas that accepted
give the version up. Nothing is announced to the replicas' side, so the first try of each is made at once: on a mount
that remembers a miss, it is that try which hides what comes later.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path

import aiohttp

from adaptersync_core.errors import AdapterSyncError

EVERY_S = 0.5  # between two tries of one replica
CALL_S = 30.0  # for one call to an engine


class PollingFailed(AdapterSyncError):
    code = "polling-failed"


def store(source: Path, place: Path) -> None:
    """As its trainer does: under another name first, then renamed."""
    half = place.with_name(f".half-{place.name}")
    shutil.copytree(source, half)
    half.rename(place)


async def synchronize(
    engines: Sequence[str], name: str, path: Path, *, timeout_s: float, every_s: float = EVERY_S
) -> Counter[str]:
    """Have all engines serve the adapter at `path` as `name`; how often each was asked. PollingFailed, or all do."""
    tries: Counter[str] = Counter()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_S)) as session:
        await _all(session, engines, "/pause?mode=keep")
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(_load(session, url, name, path, tries, every_s) for url in engines))
        except (PollingFailed, TimeoutError) as error:
            with contextlib.suppress(PollingFailed):  # those that never accepted have nothing to give up
                await _all(session, engines, "/v1/unload_lora_adapter", {"lora_name": name})
            if isinstance(error, PollingFailed):
                raise
            raise PollingFailed(f"not on every replica in {timeout_s:g} s", version=name) from None
        finally:
            await _all(session, engines, "/resume")
    return tries


async def forget(engines: Sequence[str], name: str) -> None:
    """Unload what is beyond the window."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_S)) as session:
        await _all(session, engines, "/v1/unload_lora_adapter", {"lora_name": name})


async def _load(
    session: aiohttp.ClientSession, url: str, name: str, path: Path, tries: Counter[str], every_s: float
) -> None:
    while True:
        began = time.monotonic()
        tries[url] += 1
        status, text = await _post(session, url, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        if status == HTTPStatus.OK:
            return
        if "No adapter found" not in text:
            raise PollingFailed(f"load refused: {text[:200]}", engine=url, version=name)
        await asyncio.sleep(max(0.0, every_s - (time.monotonic() - began)))


async def _all(
    session: aiohttp.ClientSession, engines: Sequence[str], path: str, body: dict[str, str] | None = None
) -> None:
    for url, (status, text) in zip(
        engines, await asyncio.gather(*(_post(session, url, path, body) for url in engines)), strict=True
    ):
        if status != HTTPStatus.OK:
            raise PollingFailed(f"{path} refused: {text[:200]}", engine=url)


async def _post(session: aiohttp.ClientSession, url: str, path: str, body: dict[str, str] | None) -> tuple[int, str]:
    try:
        async with session.post(url + path, json=body) as answer:
            return answer.status, await answer.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise PollingFailed(f"{path} was not answered: {error}", engine=url) from error
