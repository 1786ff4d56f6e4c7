"""The agent's two loops: say what the engine is and holds, and bring it to hold what the table wants."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from functools import partial
from pathlib import Path

from adaptersync.agent.decode_rates import DecodeRates
from adaptersync.agent.engine import Engine
from adaptersync.agent.kv_follow import Follower
from adaptersync.agent.metrics import TABLE, answered, reported
from adaptersync.agent.prove import Prover
from adaptersync.agent.rate import tell_rate
from adaptersync.agent.reconcile import plan
from adaptersync.agent.request_times import LatestTimes, watch
from adaptersync.agent.staging import Staging
from adaptersync.agent.token import new_token
from adaptersync_core.api_keys import bearer
from adaptersync_core.bus import Bell, ring_on_events
from adaptersync_core.config import Config
from adaptersync_core.errors import AdapterSyncError, EngineError, EngineUnavailable
from adaptersync_core.events import PHASES, REPORTS
from adaptersync_core.keys import Keys
from adaptersync_core.lane import ANSWER_S, FastLane
from adaptersync_core.lifecycle import run_until_stopped
from adaptersync_core.manifest import Manifest
from adaptersync_core.metrics import Metrics, served
from adaptersync_core.notify import Notifier, Pulse
from adaptersync_core.ranks import told_apart
from adaptersync_core.records import Ack, CacheReport, Fault, ReplicaReport
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from adaptersync_core.store import ArtifactStore, Reader
from adaptersync_core.table import Table
from adaptersync_core.telemetry import configure_logging
from adaptersync_core.tls import trusting
from adaptersync_core.traces import traces
from adaptersync_core.vllm import VllmClient

REST_S = 10.0  # before a refused version that is still wanted is tried again
LEAVE_S = 3.0  # how long a stop may take to say so
RETRY_S = 1.0  # before a version is tried again that the engine, or Redis, was not there for

log = logging.getLogger(__name__)


def run_agent(config: Config, mount: Reader | None = None) -> None:
    """Stand beside one engine until SIGTERM. `mount` is how the store is read, if not as it lies there."""
    configure_logging("agent", config.agent.name)
    run_until_stopped(_stand_beside(config, mount, Notifier.take(os.environ)))


async def _stand_beside(config: Config, mount: Reader | None = None, notifier: Notifier | None = None) -> None:
    notifier = notifier or Notifier()
    keys = Keys(config.group.name)
    client = RedisClient(config.redis.control_url, name=config.agent.name)
    cache_url = config.redis.cache_url or config.redis.control_url
    cache = RedisClient(cache_url, name=config.agent.name, timeout_s=ANSWER_S, text=False)
    ownership = RedisClient(cache_url, name=config.agent.name, timeout_s=ANSWER_S)
    engine = config.agent
    tls = trusting(engine.engine_ca_file, key="agent.engine_ca_file")
    shown = bearer(engine.engine_key_file)
    async with VllmClient(engine.engine_url, token=new_token(engine.token_file), headers=shown, tls=tls) as vllm:
        lane = FastLane(cache, keys, limit_bytes=config.redis.lane_bytes)
        follows = config.agent.kv_events == "auto"
        follower = Follower(
            vllm,
            ownership,
            keys,
            replica=config.agent.name,
            depth=config.group.blocks_per_request,
            limit=config.group.blocks_per_version,
        )
        agent = Agent(config, Registry(client, keys), vllm, lane, mount, follower if follows else None, notifier)
        metrics = served(agent.figures, host=config.telemetry.metrics_host, port=config.agent.metrics_port)
        try:
            with metrics:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(
                        ring_on_events(
                            agent.bell, config.redis.control_url, keys.events, name=config.agent.name, unless=REPORTS
                        )
                    )
                    tasks.create_task(agent.observe())
                    tasks.create_task(watch(vllm, agent.request_times, agent.decode_rates))
                    if config.group.policy == "expected":
                        tasks.create_task(tell_rate(vllm, ownership, keys, replica=config.agent.name))
                    if follows:
                        tasks.create_task(follower.run())
                    await agent.reconcile()
        finally:
            notifier.stopping()
            await agent.leave()
            await agent.close()
            await client.close()
            await cache.close()
            await ownership.close()


class Agent:
    """One replica's agent. `loaded` is what the engine listed when it was last looked at."""

    def __init__(
        self,
        config: Config,
        registry: Registry,
        vllm: VllmClient,
        lane: FastLane,
        mount: Reader | None,
        follower: Follower | None,
        notifier: Notifier,
    ) -> None:
        self._config = config
        self._settings = config.agent
        self._registry = registry
        self._store = ArtifactStore(Path(config.store.path), mount)
        self._staging = Staging(Path(config.agent.stage_path), self._store, lane)
        self._engine = Engine(vllm, self._staging.root)
        self._prover = Prover(vllm, self._engine, self._staging.root, timeout_s=config.proof.timeout_s)
        self._follower = follower
        self._busy: dict[str, asyncio.Task[None]] = {}
        self._refused: dict[str, float] = {}
        self._loaded: list[str] = []
        self._left: dict[str, float] = {}  # when a staged version was first seen to have left the table
        self._generation = 0
        self._notifier = notifier
        self._pulse = Pulse(self._notifier, "observe", "reconcile")
        self.bell = Bell()
        self.request_times = LatestTimes()
        self.decode_rates = DecodeRates()
        self._traces = traces(config, "agent", config.agent.name)
        self.figures = Metrics("agent", TABLE, {"replica": config.agent.name})

    async def observe(self) -> None:
        """Heartbeat: no word from the engine, no word to Redis, and the fleet counts this replica as silent."""
        while True:
            began = time.monotonic()
            try:
                await self._report()
                self._notifier.ready()
                self._notifier.status(f"{self._settings.engine_url} holds {len(self._loaded)} versions")
            except AdapterSyncError as error:
                log.warning("not reported: %s", error)
                self._notifier.status(f"not reported: {error}")
            self._pulse.beat("observe")
            await asyncio.sleep(max(0.0, self._settings.heartbeat_s - (time.monotonic() - began)))

    async def leave(self) -> None:
        """Say that this replica drains: it gets no more requests, and nobody waits for its word."""
        try:
            async with asyncio.timeout(LEAVE_S):
                await self._report(draining=True)
        except (AdapterSyncError, TimeoutError) as error:
            log.warning("left without saying so: %s", error)

    async def _report(self, *, draining: bool = False) -> None:
        before = self._engine.epoch
        try:
            self._loaded = await self._engine.observe(timeout_s=self._settings.probe_timeout_s)
        except EngineError:
            self.figures.set("engine_reachable", 0)
            raise
        facts = self._engine.facts
        if facts is None:
            raise EngineUnavailable("engine was not seen yet", engine=self._settings.engine_url)
        report = ReplicaReport(
            url=self._settings.public_url or self._settings.engine_url,
            base_model=facts.base_model,
            engine_epoch=self._engine.epoch,
            max_loras=facts.max_loras,
            max_cpu_loras=facts.max_cpu_loras,
            max_lora_rank=facts.max_lora_rank,
            block_size=facts.block_size,
            loaded=tuple(self._loaded),
            ranks=told_apart(facts.engines),
            draining=draining,
            engine=f"vllm {facts.version}",
            host=socket.gethostname(),
            root=facts.root,
            cache=self._follower.report() if self._follower else CacheReport(why="agent.kv_events is off"),
            request_times=self.request_times.told(),
            decoding=self.decode_rates.told(time.monotonic(), batch_max=facts.max_num_seqs * facts.engines),
        )
        if self._follower:
            self._follower.see(self._engine.epoch, facts.base_model, report.ranks)
        await self._registry.report_replica(self._settings.name, report)
        reported(self.figures, report)
        if before != self._engine.epoch:
            self._refused.clear()  # another life, another chance
            self.bell.ring()

    async def reconcile(self) -> None:
        """Level-triggered: look at the table on every event and at least every heartbeat."""
        while True:
            await self.bell.wait(self._settings.heartbeat_s)
            self._pulse.beat("reconcile")
            if not self._engine.epoch:
                continue
            try:
                await self._step(await self._registry.table())
            except AdapterSyncError as error:
                log.warning("will try again: %s", error)

    async def _step(self, table: Table) -> None:
        if not table.generation or table.generation < self._generation:
            return  # no table, or an older one, no orders: unloading would be the wrong reading of a lost Redis
        self._generation = table.generation
        if self._follower:
            self._follower.serve(table.versions)
        busy = set(self._busy)  # before the acks are read: what ends meanwhile is left for the next look
        self._loaded = await self._engine.loaded()
        now = time.monotonic()
        work = plan(
            wanted=table.wanted(),
            loaded=self._loaded,
            acks=await self._registry.acks(self._settings.name),
            engine_epoch=self._engine.epoch,
            busy=busy,
            resting=[name for name, until in self._refused.items() if until > now],
        )
        if work.retract:
            log.warning("engine has lost %s: brought in anew", " ".join(work.retract))
            await self._registry.forget_acks(self._settings.name, work.retract)
        for name in work.cancel:
            if name in self._busy:
                self._busy[name].cancel()
        # The engine is changed in the order asked: what is to go goes first, lest a full engine evict what is served.
        # Files are staged meanwhile, and what cannot be unloaded holds up no load.
        unloading = [asyncio.create_task(self._unload(name)) for name in work.unload]
        for name in work.bring + work.confirm:
            task = asyncio.create_task(self._hold(name))
            self._busy[name] = task
            task.add_done_callback(partial(self._done, name))
        for failure in await asyncio.gather(*unloading, return_exceptions=True):
            if failure is not None:
                raise failure
        await self._registry.forget_acks(self._settings.name, work.forget)
        if work.unload:
            await self._report()
        await self._discard(table)

    async def _unload(self, name: str) -> None:
        await self._engine.unload(name)
        log.info("unloaded %s", name)

    async def _discard(self, table: Table) -> None:
        """Delete what has left the table long enough ago that no request, of whatever router, may still need it."""
        now = time.monotonic()
        staged = await asyncio.to_thread(self._staging.staged)
        self._left = {name: self._left.get(name, now) for name in staged if name not in table.versions}
        for name, since in self._left.items():
            in_use = name in self._busy or name in self._loaded or name in self._engine.unsettled
            if now - since >= self._settings.keep_s and not in_use:
                await asyncio.to_thread(self._staging.discard, name)

    def _done(self, name: str, task: asyncio.Task[None]) -> None:
        self._busy.pop(name)
        if not task.cancelled() and (error := task.exception()) is not None:
            passing = isinstance(error, AdapterSyncError) and error.retryable
            self._refused[name] = time.monotonic() + (RETRY_S if passing else REST_S)
            log.error("could not deal with %s: %s", name, error, exc_info=None if passing else error)

    async def _hold(self, name: str) -> None:
        """Bring one version into the engine and say so; whatever stands in the way is a refusal with its reason."""
        epoch, began_at = self._engine.epoch, time.time()
        phases: dict[str, float] = {}
        manifest: Manifest | None = None
        try:
            manifest, phases = await self._bring(name)
            began = time.monotonic()
            proof = await self._prover.prove(name, manifest, self._staging.path(name))
            phases["proved_s"] = time.monotonic() - began
            enough = proof.verdict != "refuted" and proof.verdict in self._config.proof.promote_on
            reason = "" if enough else f"{proof.verdict}: {proof.reason}"
            own = proof.commissioned.verdict == "refuted" or proof.verdict == "not probed"  # whatever the version is
            fault: Fault = "replica" if own else "version"
            ack = Ack(accepted=enough, engine_epoch=epoch, proof=proof, reason=reason, phases=phases, fault=fault)
        except AdapterSyncError as error:
            if error.retryable:  # says nothing of the version; a replica that stays like this is judged by its silence
                log.warning("will try %s again: %s", name, error)
                self._refused[name] = time.monotonic() + RETRY_S
                return
            fault = "replica" if error.own_fault else "version"
            ack = Ack(accepted=False, engine_epoch=epoch, reason=str(error), phases=phases, fault=fault)
        await self._registry.ack(self._settings.name, name, ack)
        answered(self.figures, ack)
        if self._traces.on and manifest is not None:
            self._traces.span(
                "bring",
                manifest.traceparent,
                began_at,
                time.time(),
                parts={phase.removesuffix("_s"): phases[phase] for phase in PHASES if phase in phases},
                failed="" if ack.accepted else ack.reason,
                version=name,
                replica=self._settings.name,
                proof=ack.proof.verdict,
            )
        if ack.accepted:
            self._refused.pop(name, None)
            log.info("holds %s: %s", name, " ".join(f"{phase}={spent:.3f}" for phase, spent in phases.items()))
        else:
            self._refused[name] = time.monotonic() + REST_S
            log.warning("refuses %s: %s", name, ack.reason)
            if ack.proof.verdict == "refuted":  # not to be served by mistake, and to be read anew next time
                await self._engine.unload(name)

    async def _bring(self, name: str) -> tuple[Manifest, dict[str, float]]:
        manifest = await self._registry.manifest(name)
        if manifest is None:  # Redis keeps it for a time, the store for as long as the files
            manifest = await asyncio.to_thread(self._store.read_manifest, name)
        phases = await self._staging.bring(manifest, timeout_s=self._settings.visible_timeout_s)
        began = time.monotonic()
        facts = self._engine.facts
        await asyncio.to_thread(
            self._staging.check,
            manifest,
            max_lora_rank=facts.max_lora_rank if facts else 0,
            base=self._engine.base,
        )
        phases["verified_s"] += time.monotonic() - began
        began = time.monotonic()
        await self._engine.load(name, self._staging.path(name), timeout_s=self._settings.load_timeout_s)
        phases["loaded_s"] = time.monotonic() - began
        return manifest, phases

    async def close(self) -> None:
        for task in self._busy.values():
            task.cancel()
        await asyncio.gather(*self._busy.values(), return_exceptions=True)
        await asyncio.to_thread(self._traces.close)
