"""The coordinator's loop: lead, read, decide, write, until there is nothing left to decide; then wait to be woken."""

from __future__ import annotations

import asyncio
import logging
import secrets
from pathlib import Path

from msgspec.structs import replace

from adaptersync.coordinator.journal import Journal, Recollection, recollected_table
from adaptersync.coordinator.protocol import decide
from adaptersync.coordinator.recovery import highest_numbers, lost, stored_manifests
from adaptersync_core.bus import Bell, ring_on_events
from adaptersync_core.config import Config
from adaptersync_core.errors import AdapterSyncError, Conflict, Fenced
from adaptersync_core.events import VersionPromoted
from adaptersync_core.keys import Keys
from adaptersync_core.lifecycle import run_until_stopped
from adaptersync_core.queue import enqueue_verification
from adaptersync_core.records import Decision, Leadership
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from adaptersync_core.store import ArtifactStore
from adaptersync_core.telemetry import configure_logging

ROUNDS = 1000  # decisions in one wake; more than any fleet needs, so that a mistake in a rule cannot spin for ever

log = logging.getLogger(__name__)


def run_coordinator(config: Config) -> None:
    """Coordinate until SIGTERM. Several may run; one leads, the others take over when its lease runs out."""
    configure_logging("coordinator", config.coordinator.name)
    run_until_stopped(_coordinate(config))


async def _coordinate(config: Config) -> None:
    keys = Keys(config.group.name)
    client = RedisClient(config.redis.control_url, name=config.coordinator.name)
    coordinator = Coordinator(config, Registry(client, keys))
    bell = Bell()
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ring_on_events(bell, config.redis.control_url, keys.events, name=config.coordinator.name))
            while True:
                try:
                    await coordinator.work()
                except AdapterSyncError as error:
                    if not error.retryable and not isinstance(error, Fenced):
                        raise
                    log.warning("will try again: %s", error)
                await bell.wait(config.coordinator.tick_s)
    finally:
        await client.close()


class Coordinator:
    """One candidate for leadership."""

    def __init__(self, config: Config, registry: Registry) -> None:
        self._config = config
        self._registry = registry
        self._journal = Journal(Path(config.store.path), config.group.name)
        self._store = ArtifactStore(Path(config.store.path))
        self._known: Recollection | None = None
        self._led = False

    async def work(self) -> None:
        """One wake: lead if possible, then decide until nothing is left to decide."""
        settings = self._config.coordinator
        for _ in range(ROUNDS):
            lease = await self._registry.lead(settings.name, lease_s=settings.lease_s)
            if self._led != bool(lease.token):
                self._led = bool(lease.token)
                log.info("leads with token %d" if self._led else "%s leads", lease.token or lease.leader)
            if not lease.token:
                self._known = None  # who leads now writes on
                return
            if not await self._decide_once(lease):
                return
        log.error("still deciding after %d rounds", ROUNDS)

    async def _decide_once(self, lease: Leadership) -> bool:
        if self._known is None:
            self._known = await asyncio.to_thread(self._journal.recall)
        if lost(lease, self._known.table):
            await self._restore(lease, self._known)
            return True
        fleet = await self._registry.fleet()
        if fleet.table.generation != lease.generation:
            return True  # a decision came in between
        decision = decide(fleet, self._config)
        if decision is None:
            return False
        decision = replace(decision, table=replace(decision.table, incarnation=lease.incarnation))
        await asyncio.to_thread(self._journal.before, decision)
        try:
            await self._registry.decide(decision, lease, alive_s=self._config.coordinator.alive_s)
        except Conflict as error:
            log.info("decides again: %s", error)
            return False  # what it rested on has changed: wait for it to be reported
        self._known = replace(self._known, table=decision.table)
        await asyncio.to_thread(self._journal.after, decision, fleet.runs)
        for event in decision.events:
            log.info("%s", event)
        await self._follow_up(decision)
        return True

    async def _restore(self, lease: Leadership, known: Recollection) -> None:
        """Rebuild what Redis lost from the journal and the store; numbers that were given out are not given again."""
        generation = known.table.generation + 1
        log.warning("control state was lost, or is older than the journal: restoring it as generation %d", generation)
        manifests = await asyncio.to_thread(stored_manifests, self._store)
        table = replace(recollected_table(known), incarnation=secrets.token_hex(8), generation=generation)
        await self._registry.announce_again(manifests)
        await self._registry.restore(lease, table, highest_numbers(known.runs, manifests), known.fates)
        self._known = replace(known, table=table)

    async def _follow_up(self, decision: Decision) -> None:
        if not self._config.jobs.verify:
            return
        for event in decision.events:
            if isinstance(event, VersionPromoted):
                try:
                    await asyncio.to_thread(enqueue_verification, self._config, event.version)
                except AdapterSyncError as error:
                    log.warning("verification not asked for: %s", error)
