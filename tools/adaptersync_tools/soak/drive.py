"""One run: a fleet, three trainers that publish evenly, traffic, some restarts, and a look every few seconds."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from adaptersync_core.errors import AdapterSyncError
from adaptersync_core.keys import Keys
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from adaptersync_tools.calm import Calm
from adaptersync_tools.demo.synthetic import write_base_model
from adaptersync_tools.soak import trainers, verdicts
from adaptersync_tools.soak.look import Look, Sample
from adaptersync_tools.soak.report import Report
from adaptersync_tools.soak.restarts import Restarter, planned
from adaptersync_tools.soak.traffic import Traffic
from adaptersync_tools.soak.trainers import Trainers
from adaptersync_tools.supervisor import Service
from adaptersync_tools.up import Progress, Stack, StackSettings

REPLICAS, ROUTERS, CLIENTS = 3, 2, 4
SLOTS = 16  # for each run its window, a candidate, and one that is on its way out
KEEP_LAST = 8
LOOKS = 360  # in a run, but no more often than
LOOK_S = 0.5
FIRST_S = 60.0
LATE_S = 60.0  # how much longer than asked for the publications may take
REST_S = 90.0
PAGE = 1000

# what is kept for long is kept for less, so that within a third of a short run as much goes as comes
SETTINGS: dict[str, Any] = {
    "agent.keep_s": 40.0,
    "router.request_timeout_s": 40.0,
    "router.session_s": 60.0,
    "router.spool_bytes": 1 << 20,
    "router.kept_bytes": 1 << 20,
    "store.keep_last": KEEP_LAST,
}
SIMULATOR = (
    "--latency",
    '{"decode_tokens_per_s": 150}',  # so that requests overlap, and can be given up
    "--kv-buffer-steps",
    "1000",
)


def run(*, seed: int, seconds: float, versions: int, directory: Path, progress: Progress | None = None) -> Report:
    """Start, work, watch, stop; leaves no process behind."""
    settings = StackSettings(
        model=write_base_model(directory / "model"),
        state_dir=directory / "fleet",
        replicas=REPLICAS,
        simulated=True,
        simulator=SIMULATOR,
        routers=ROUTERS,
        engine={"max_loras": SLOTS, "max_cpu_loras": SLOTS},
        overrides=SETTINGS,
    )
    with Stack(settings, progress) as stack:
        drive = _Drive(stack, seed=seed, seconds=seconds, versions=versions, directory=directory)
        return asyncio.run(drive.run())


class _Drive:
    def __init__(self, stack: Stack, *, seed: int, seconds: float, versions: int, directory: Path) -> None:
        self._stack = stack
        self._seed = seed
        self._seconds = seconds
        self._versions = versions
        self._published = trainers.total(versions)
        self._directory = directory
        self._keys = Keys(stack.config.group.name)
        self._client = RedisClient(stack.config.redis.control_url, name="soak")
        self._registry = Registry(self._client, self._keys)
        self._after = "0"
        self._events: Counter[str] = Counter()
        self._samples: list[Sample] = []
        self._undone: list[str] = []
        self._began = 0.0

    async def run(self) -> Report:
        traffic = Traffic(self._stack.router_urls, trainers.RUN, seed=self._seed)
        three = Trainers(
            self._stack,
            traffic,
            versions=self._versions,
            every_s=self._seconds / self._versions,
            directory=self._directory,
            seed=self._seed,
        )
        trainer = three.ours()
        restarter = Restarter(self._stack, self._registry)
        look = Look(self._stack)
        try:
            await self._first()
            self._began = time.monotonic()
            async with asyncio.TaskGroup() as tasks:
                clients = tasks.create_task(traffic.run(CLIENTS))
                others = tasks.create_task(three.run_others())
                background = [
                    tasks.create_task(self._look(look)),
                    tasks.create_task(self._restart(restarter)),
                ]
                await self._work(trainer, others)
                seconds = time.monotonic() - self._began
                traffic.stop()
                await clients
                for task in [others, *background]:
                    task.cancel()
            ended = trainer.returncode
            trainer.terminate()
            await three.stop()
            rest = await self._rest()
            await self._read()
            await self._sample(look)
            trouble = [*self._trouble(restarter, rest, ended), *three.trouble]
            return await asyncio.to_thread(self._report, traffic, restarter, trouble, seconds)
        finally:
            await look.close()
            await self._client.close()

    async def _work(self, trainer: Service, others: asyncio.Task[None]) -> None:
        """Until all trainers have published what they were to, or are late, or something does not stay up."""
        deadline, lost = self._began + self._seconds + LATE_S, False
        while time.monotonic() < deadline and not lost:
            if trainer.pid is None and others.done() and self._events["adapter.published"] >= self._published:
                return
            await asyncio.sleep(LOOK_S)
            lost = any(service.given_up for service in self._stack.supervisor.services.values())

    async def _first(self) -> None:
        """Wait for the first version: before it there is nothing to ask for."""
        async with asyncio.timeout(FIRST_S):
            while not self._events["version.promoted"]:
                self._stack.check()
                await asyncio.sleep(LOOK_S)
                await self._read()

    async def _read(self) -> None:
        while entries := await self._client.read_stream(self._keys.events, self._after, count=PAGE):
            self._after = entries[-1][0]
            self._events.update(fields["type"] for _, fields in entries)

    async def _look(self, look: Look) -> None:
        """Until cancelled."""
        pause_s = max(self._seconds / LOOKS, LOOK_S)
        while True:
            began = time.monotonic()
            await self._sample(look)
            await asyncio.sleep(max(0.0, pause_s - (time.monotonic() - began)))

    async def _sample(self, look: Look) -> None:
        at_s = time.monotonic() - self._began
        await self._read()
        self._samples.append(await look.sample(at_s=at_s, published=self._events["adapter.published"]))

    async def _restart(self, restarter: Restarter) -> None:
        for restart in planned(self._seed, seconds=self._seconds, replicas=REPLICAS):
            await asyncio.sleep(max(0.0, self._began + restart.at_s - time.monotonic()))
            try:
                await restarter.carry_out(restart)
            except AdapterSyncError as error:
                self._undone.append(f"{restart.kind}, replica {restart.number}: {error}")

    async def _rest(self) -> str:
        """What is still missing when nothing is published any more, or nothing."""
        calm = Calm(
            self._registry,
            services=self._stack.supervisor.services,
            engines=self._stack.engine_urls,
            routers=self._stack.router_urls,
            runs=(trainers.RUN, trainers.RELAYED_RUN, trainers.WATCHED_RUN),
        )
        return await calm.at_rest(REST_S)

    def _trouble(self, restarter: Restarter, rest: str, ended: int | None) -> Iterator[str]:
        for name, service in self._stack.supervisor.services.items():
            if (count := service.restarts - restarter.ordered[name]) > 0:
                yield f"{name} ended by itself, {count} times: {service.last_words()}"
        if ended != 0:
            yield "the trainer did not publish all in time" if ended is None else f"the trainer ended with {ended}"
        yield from self._undone
        if rest:
            yield f"not at rest within {REST_S:g} s: {rest}"

    def _report(self, traffic: Traffic, restarter: Restarter, trouble: list[str], seconds: float) -> Report:
        bounds = verdicts.Bounds(
            versions=self._published,
            every_s=self._seconds / self._published,
            runs=trainers.RUNS,
            slots=SLOTS,
            keep_last=KEEP_LAST,
            keep_s=SETTINGS["agent.keep_s"],
            session_s=SETTINGS["router.session_s"],
            clients=CLIENTS,
        )
        known = verdicts.lives(self._samples)
        return Report(
            seed=self._seed,
            minutes=round(seconds / 60, 2),
            versions=self._versions,
            replicas=REPLICAS,
            routers=ROUTERS,
            checks=[
                *verdicts.judge(self._samples, known, bounds),
                verdicts.served(traffic.asked.total(), traffic.failed),
                verdicts.promoted(self._events, bounds),
                verdicts.undisturbed(trouble),
            ],
            lives=known,
            asked=dict(traffic.asked),
            failures=traffic.failures,
            restarts=restarter.done,
            first=self._samples[0],
            last=self._samples[-1],
        )
