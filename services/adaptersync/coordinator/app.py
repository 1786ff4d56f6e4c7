"""The coordinator's loop: lead, read, decide, write, until there is nothing left to decide; then wait to be woken."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from pathlib import Path

from msgspec.structs import replace

from adaptersync.coordinator import gate
from adaptersync.coordinator.journal import Entry, Journal, Recollection, intent, outcome, remember
from adaptersync.coordinator.metrics import OF_THE_FLEET, TABLE, decided, tell
from adaptersync.coordinator.page.server import serve_page
from adaptersync.coordinator.protocol import decide
from adaptersync.coordinator.recovery import (
    exposed,
    highest_numbers,
    lost,
    refused,
    renewed,
    restored,
    restored_records,
    stored_manifests,
)
from adaptersync_core.bus import Bell, ring_on_events
from adaptersync_core.config import Config
from adaptersync_core.errors import AdapterSyncError, Conflict, ControlError, ControlUnavailable, Fenced, StoreGone
from adaptersync_core.events import VersionPromoted, VersionReady, VersionRolledBack, VersionSuperseded
from adaptersync_core.identity import parse_adapter_id
from adaptersync_core.job_records import unasked
from adaptersync_core.keys import Keys
from adaptersync_core.lifecycle import run_until_stopped
from adaptersync_core.metrics import Metrics, served
from adaptersync_core.notify import Notifier
from adaptersync_core.queue import Jobs
from adaptersync_core.records import Decision, Fleet, Leadership
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from adaptersync_core.sightings import Sightings
from adaptersync_core.store import ArtifactStore
from adaptersync_core.store_identity import agree
from adaptersync_core.telemetry import configure_logging
from adaptersync_core.traces import traces
from adaptersync_core.unarchived import unarchived_s

ROUNDS = 1000  # decisions in one wake; more than any fleet needs, so that a mistake in a rule cannot spin for ever

ENDS = (VersionPromoted, VersionRolledBack, VersionSuperseded)  # of a version's way

log = logging.getLogger(__name__)


def run_coordinator(config: Config) -> None:
    """Coordinate until SIGTERM. Several may run; one leads, the others take over when its lease runs out."""
    configure_logging("coordinator", config.coordinator.name)
    run_until_stopped(_coordinate(config, Notifier.take(os.environ)))


async def _coordinate(config: Config, notifier: Notifier | None = None) -> None:
    notifier = notifier or Notifier()
    keys = Keys(config.group.name)
    client = RedisClient(config.redis.control_url, name=config.coordinator.name)
    figures = Metrics("coordinator", TABLE, {"coordinator": config.coordinator.name})
    coordinator = Coordinator(config, Registry(client, keys), figures)
    bell = Bell()
    said = ""
    try:
        with served(figures, host=config.telemetry.metrics_host, port=config.coordinator.metrics_port):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(
                    ring_on_events(bell, config.redis.control_url, keys.events, name=config.coordinator.name)
                )
                if config.page.port:
                    tasks.create_task(serve_page(config))
                while True:
                    try:
                        await coordinator.work()
                        said = ""
                        notifier.ready()
                        notifier.status(coordinator.standing)
                    except AdapterSyncError as error:  # whatever it is, somebody can mend it while this one waits
                        if str(error) != said:  # once, not every tick until a mount is back
                            log.warning("will try again: %s", error)
                        said = str(error)
                        notifier.status(f"will try again: {error}")
                        if not error.retryable and not isinstance(error, Fenced):
                            # who cannot decide does not lead: status says so, and another may be able to
                            await coordinator.give_up()
                            await asyncio.sleep(config.coordinator.lease_s)  # or each try would be told as an election
                    notifier.alive()
                    await bell.wait(config.coordinator.tick_s)
    finally:
        notifier.stopping()
        await coordinator.close()
        await client.close()


class Coordinator:
    """One candidate for leadership. What it knows is good for one term, which ends when it is unsure what it wrote."""

    def __init__(self, config: Config, registry: Registry, figures: Metrics | None = None) -> None:
        self._config = config
        self._registry = registry
        self._traces = traces(config, "coordinator", config.coordinator.name)
        self._figures = figures or Metrics("coordinator", TABLE)
        self._jobs = Jobs(config)
        self._journal = Journal(Path(config.store.path), config.group.name)
        self._store = ArtifactStore(Path(config.store.path))
        self._at_home = False
        self._known: Recollection | None = None
        self._lease: Leadership | None = None
        self._term = secrets.token_hex(8)
        self._sightings = Sightings()
        self._leader = ""
        self._blind_since: float | None = None  # to what is archived, by the monotonic clock

    @property
    def standing(self) -> str:
        """Who leads, in a line."""
        return f"leads with token {self._lease.token}" if self._lease else f"stands by: {self._leader} leads"

    async def work(self) -> None:
        """One wake: lead if possible, then decide until nothing is left to decide.

        Without the group's store it does not lead: another, on a host that has it, can.
        """
        try:
            for _ in range(ROUNDS):
                if not self._at_home:
                    self._journal.store_id = await agree(self._registry, self._store.root, self._journal.store_id)
                    self._at_home = True
                lease = await self._lead()
                if lease is None or not await self._decide_once(lease):
                    self._figures.since("looked_seconds", 0.0)
                    return
        except StoreGone:
            await self.give_up()
            raise
        except AdapterSyncError:
            self._leads(False)  # as far as it knows
            raise
        log.error("still deciding after %d rounds", ROUNDS)

    async def give_up(self) -> None:
        """End the term: another may lead at once, or this one in another term."""
        await self.resign()
        self._lease = None
        self._leads(False)
        self._another_term()

    async def resign(self) -> None:
        """Stop leading, so that another need not wait for the lease to run out."""
        if self._lease is not None:
            with contextlib.suppress(ControlError):
                await self._registry.resign(self._lease)

    async def close(self) -> None:
        await self.resign()
        await asyncio.to_thread(self._jobs.close)
        await asyncio.to_thread(self._traces.close)

    async def _lead(self) -> Leadership | None:
        settings, before = self._config.coordinator, self._lease
        former = before.incarnation if before else ""
        lease = await self._registry.lead(settings.name, self._term, lease_s=settings.lease_s, former=former)
        self._leader = lease.leader
        if bool(lease.token) != (before is not None):
            log.info("leads with token %d" if lease.token else "%s leads", lease.token or lease.leader)
        if not lease.token:
            self._lease = None
            self._leads(False)
            self._another_term()  # who leads now writes on
            return None
        self._lease = lease
        self._leads(True)
        return lease

    def _leads(self, leads: bool) -> None:
        self._figures.set("leading", leads)
        if not leads:
            self._figures.forget(*OF_THE_FLEET)
            self._blind_since = None

    def _another_term(self) -> None:
        self._known = None
        self._at_home = False  # Redis may have lost which store it is
        self._term = secrets.token_hex(8)
        self._sightings = Sightings()

    async def _decide_once(self, lease: Leadership) -> bool:
        fleet = await self._registry.fleet(self._sightings)
        known = self._known if self._known is not None else await asyncio.to_thread(self._journal.recall)
        if fleet.table.generation != lease.generation:  # only somebody who led meanwhile, or a loss, explains that
            again = await self._lead()
            if again is None or again.fence != lease.fence:
                return False
            lease = again
        if lost(lease, fleet.table, known.table):
            await self._restore(lease, fleet, known)
            return True
        if self._known is None:
            known = remember(known, Entry(generation=fleet.table.generation, table=fleet.table, runs=fleet.runs))
            await asyncio.to_thread(self._journal.begin, lease.incarnation, known)
            self._known = known
        first = fleet.table.incarnation != lease.incarnation
        if first:
            fleet = replace(fleet, table=exposed(fleet.table))
        client, group = self._registry.client, self._config.group.name
        asked = gate.awaited(fleet.table, self._config)
        fleet = replace(fleet, fates=known.fates, unasked=await unasked(client, group, asked))
        left = first and bool(refused(fleet.table, known.fates))
        decision = None if left else decide(fleet, self._config)
        if decision is None and first:
            decision = renewed(fleet, known.fates)
        if decision is None:
            tell(self._figures, fleet, self._config, unarchived_s=await self._unarchived_s())
            return False
        decision = replace(decision, table=replace(decision.table, incarnation=lease.incarnation))
        return await self._carry_out(decision, fleet, lease)

    async def _unarchived_s(self) -> float | None:
        """What it may not see is not archived, for all it knows: the alert must come where nobody can tell."""
        try:
            waits_s = await unarchived_s(self._registry.client, self._registry.keys, self._config)
        except ControlUnavailable:
            raise
        except ControlError as error:
            now = time.monotonic()
            if self._blind_since is None:
                self._blind_since = now
                log.warning("cannot see whether the ledger is archived, and tells that it is not: %s", error)
            return now - self._blind_since
        self._blind_since = None
        return waits_s

    async def _carry_out(self, decision: Decision, fleet: Fleet, lease: Leadership) -> bool:
        await asyncio.to_thread(self._journal.check)  # nothing is decided that could not be written down
        await self._note(intent(decision))
        try:
            await self._registry.decide(decision, lease, alive_s=self._config.coordinator.alive_s)
        except Conflict as error:
            log.info("decides again: %s", error)
            self._sightings = Sightings()
            return False  # what it rested on has changed: wait for it to be reported
        except AdapterSyncError:
            self._another_term()  # committed or not, nobody knows: it must not be mistaken for another decision
            raise
        await self._note(outcome(decision, fleet.runs))
        decided(self._figures, decision.events)
        for event in decision.events:
            log.info("%s", event)
        await self._follow_up(decision)
        return True

    async def _note(self, entry: Entry | None) -> None:
        """Write to the journal; when that fails, nothing more is decided before all of it was written again."""
        if entry is None or self._known is None:
            return
        known = remember(self._known, entry)
        self._known = None
        await asyncio.to_thread(self._journal.write, entry, known)
        self._known = known

    async def _restore(self, lease: Leadership, fleet: Fleet, known: Recollection) -> None:
        """Rebuild what Redis lost from the journal and the store; numbers that were given out are not given again."""
        manifests = await asyncio.to_thread(stored_manifests, self._store)
        self._another_term()
        table = restored(known, fleet.table, incarnation=self._term, now=fleet.now)
        log.warning("control state was lost, or is older than the journal: restored as generation %d", table.generation)
        runs = highest_numbers(known.runs, manifests)
        after = replace(known, table=table, runs=runs)
        await asyncio.to_thread(self._journal.begin, self._term, after)
        considered = {run: entry.considered for run, entry in table.runs.items()}
        await self._registry.announce_again(manifests, considered)
        await self._registry.restore(lease, table, runs, restored_records(table, known.fates))
        self._known = after

    async def _trace(self, decision: Decision) -> None:
        for event in decision.events:
            if isinstance(event, ENDS):
                manifest = await self._registry.manifest(event.version)
                if manifest is not None:
                    failed = "" if isinstance(event, VersionPromoted) else event.reason
                    name = type(event).__struct_config__.tag
                    self._traces.span(
                        str(name),
                        manifest.traceparent,
                        manifest.created_at,
                        time.time(),
                        failed=failed,
                        version=event.version,
                        generation=event.generation,
                    )

    async def _follow_up(self, decision: Decision) -> None:
        if self._traces.on:
            with contextlib.suppress(ControlError):  # nobody waits for a trace
                await self._trace(decision)
        told_of = {parse_adapter_id(event.version).run for event in decision.events if isinstance(event, ENDS)}
        for run, entry in decision.table.runs.items():
            if run in told_of:
                with contextlib.suppress(ControlError):  # the next one does it
                    await self._registry.forget_published(run, entry.considered)
        for event in decision.events:
            try:
                if isinstance(event, VersionPromoted) and self._config.jobs.verify:
                    await asyncio.to_thread(self._jobs.verify, event.version)
                elif isinstance(event, VersionReady) and self._config.coordinator.gate_function:
                    await asyncio.to_thread(self._jobs.evaluation, event.version)  # workers look for it, too
            except AdapterSyncError as error:
                log.warning("job not asked for: %s", error)
