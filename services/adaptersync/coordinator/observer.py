"""Looks at the fleet for those who show it: a command once, a page or a screen again and again.

Reads only. What it learns from the events stream and from routers' reports it keeps in `Recent`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable

from msgspec.structs import replace

from adaptersync.coordinator import gate, views
from adaptersync.coordinator.overview import Overview, overview
from adaptersync.coordinator.recent import STEP_S, Happened, Recent, order
from adaptersync.coordinator.waits import waits
from adaptersync_core import scaling
from adaptersync_core.bus import follow
from adaptersync_core.config import Config
from adaptersync_core.errors import ControlError
from adaptersync_core.job_records import job_failures, unasked
from adaptersync_core.queue import worker_host, workers_key
from adaptersync_core.records import Fleet
from adaptersync_core.redis import Entry, RedisClient, unless_refused
from adaptersync_core.registry import Registry
from adaptersync_core.sightings import Sightings
from adaptersync_core.streams import ahead
from adaptersync_core.unarchived import late_s, unarchived_s

CACHE_ANSWER_S = 1.0
HISTORY = 2000  # events read at the beginning: the ways of the latest versions
LOOKED_UP = 8  # manifests in one go


async def look(
    registry: Registry, config: Config, sightings: Sightings | None = None
) -> tuple[Fleet, views.StatusView]:
    """The fleet as it is and what `status` says of it; without what this user may not see."""
    client, keys, group = registry.client, registry.keys, config.group.name
    fleet = await registry.fleet(sightings)
    fleet = replace(fleet, unasked=await unasked(client, group, gate.awaited(fleet.table, config)))
    served = [name for name in fleet.table.versions if fleet.table.routable(name)]
    fields = [record for _, record in await registry.records(served)]
    leader, left_s = await registry.leader()
    view = views.status(
        fleet,
        group=group,
        leader=leader,
        lease_left_s=left_s,
        alive_s=config.coordinator.alive_s,
        waits=waits(fleet, config),
        corrupt=views.corrupt(dict(zip(served, fields, strict=True))),
        cache_problem=await cache_problem(config.redis.cache_url),
        scales=await scaling.asked(client, keys),
        workers=await workers(registry),
        failed_jobs=await unless_refused(job_failures(client, group), []),
        unarchived_s=await unless_refused(unarchived_s(client, keys, config), None),
        late_s=late_s(config),
        ahead=await ahead(client, keys),
    )
    return fleet, view


async def workers(registry: Registry) -> dict[str, int] | None:
    """How many take jobs, by host; None for who may not read the queue. Of those that died rq keeps the names."""
    return await unless_refused(_workers(registry), None)


async def _workers(registry: Registry) -> dict[str, int] | None:
    names = await registry.client.command("SMEMBERS", workers_key(registry.keys.group))
    alive = await registry.client.pipeline([("HGET", name, "last_heartbeat") for name in names])
    return dict(Counter(worker_host(name) for name, at in zip(names, alive, strict=True) if at))


async def cache_problem(url: str) -> str:
    """Why the cache server does not answer; nothing when it does, or is none of its own."""
    if not url:
        return ""
    client = RedisClient(url, name="look", timeout_s=CACHE_ANSWER_S)
    try:
        await client.command("PING")
    except ControlError as error:
        return str(error)
    finally:
        await client.close()
    return ""


class Observer:
    """One that goes on looking. Its looks are as old as `max_age_s` at most, however many ask."""

    def __init__(
        self,
        registry: Registry,
        config: Config,
        *,
        told_by: str = "",
        max_age_s: float = 1.0,
        step_s: float = STEP_S,
    ) -> None:
        self.recent = Recent(step_s=step_s)
        self._registry = registry
        self._config = config
        self._told_by = told_by
        self._max_age_s = max_age_s
        self._sightings = Sightings()
        self._one_at_a_time = asyncio.Lock()
        self._last: tuple[float, Overview] | None = None

    async def overview(self, *, since: float = 0.0) -> Overview:
        """The fleet now; ControlError when the control server does not answer."""
        async with self._one_at_a_time:
            now = asyncio.get_running_loop().time()
            if self._last is None or now - self._last[0] > self._max_age_s:
                fleet, status = await look(self._registry, self._config, self._sightings)
                self.recent.seen(fleet)
                await self._look_up()
                # made once for all who ask: of a large fleet it takes as long as a decision
                self._last = (now, overview(status, fleet, self.recent, told_by=self._told_by))
            _, seen = self._last
        return replace(seen, series=self.recent.series(since))

    async def begin(self) -> None:
        """Learn what the events stream still tells."""
        stream = self._registry.keys.events
        newest: list[Entry] = await self._registry.client.command("XREVRANGE", stream, "+", "-", "COUNT", HISTORY)
        self.recent.happened([(entry_id, fields) for entry_id, fields in reversed(newest)])

    async def watch(self) -> None:
        """A point of the series every `STEP_S`, looked at or not; runs until cancelled."""
        while True:
            with contextlib.suppress(ControlError):  # whoever asks is told
                await self.overview()
            await asyncio.sleep(STEP_S)

    async def follow(self, tell: Callable[[list[Happened]], None]) -> None:
        """Tell of every event as it comes; runs until cancelled."""
        config, keys = self._config, self._registry.keys
        batches: AsyncIterator[list[Entry]] = follow(
            config.redis.control_url, keys.events, name=f"{self._told_by or 'top'}-events"
        )
        async for entries in batches:
            if not entries:  # the place was lost, or this is the beginning
                with contextlib.suppress(ControlError):
                    await self._again(tell)
                continue
            if news := self.recent.happened(entries):
                tell(news)

    async def _again(self, tell: Callable[[list[Happened]], None]) -> None:
        before = self.recent.events[-1].id if self.recent.events else "0"
        stream = self._registry.keys.events
        newest = await self._registry.client.command("XREVRANGE", stream, "+", "-", "COUNT", 1)
        if not newest or order(newest[0][0]) < order(before):
            self.recent.clear()  # Redis was emptied, or set back: what is kept is of another life
        known = {event.id for event in self.recent.events}
        await self.begin()
        if news := [event for event in self.recent.events if event.id not in known]:
            tell(news)

    async def _look_up(self) -> None:
        names = self.recent.unknown()[-LOOKED_UP:]
        manifests = [manifest for manifest, _ in await self._registry.records(names)]
        self.recent.known(dict(zip(names, manifests, strict=True)))
