"""A trainer whose every duration is decided by the test: real rollouts and publications, and steps that only sleep.

Rollouts go on beside training, as in TRL: so many at a time, into a queue of so many samples. What it says of itself
with each version goes through the same code as TRL's figures.
"""

from __future__ import annotations

import asyncio
import time
from statistics import fmean

from adaptersync.trainer import AdapterPublisher
from adaptersync.trainer.figures import Figures
from support.whole_fleet import SLOW_S, WholeFleet


class ScriptedTrainer:
    """`inflight` rollouts of `tokens` each at a time; a step takes `samples` of them, and `train_s`.

    `waits`: it does not go on before its version was promoted. `strict`: rollouts ask for the version last published,
    and those that were sampled from an older one are thrown away.
    """

    def __init__(
        self,
        fleet: WholeFleet,
        publisher: AdapterPublisher,
        *,
        inflight: int,
        samples: int,
        train_s: float,
        tokens: int = 8,
        queue: int = 64,
        waits: bool = False,
        strict: bool = False,
    ) -> None:
        self._fleet = fleet
        self._publisher = publisher
        self._inflight_max = inflight
        self._samples = samples
        self._train_s = train_s
        self._tokens = tokens
        self._queue: asyncio.Queue[int] = asyncio.Queue(queue)
        self._waits = waits
        self._strict = strict
        self._figures = Figures(inflight_max=inflight, queued_max=queue)
        self._inflight = 0
        self._seq = 0
        self._failed: list[int] = []

    async def train(self, steps: int) -> None:
        await self._sync(0)
        rollouts = [asyncio.create_task(self._roll(number)) for number in range(self._inflight_max)]
        try:
            for step in range(1, steps + 1):
                began = time.monotonic()
                looks = [await self._sample() for _ in range(self._samples)]
                waited_s = time.monotonic() - began
                await asyncio.sleep(self._train_s)
                told = {"perf/rollout_wait_s": waited_s}
                for place, name in enumerate(("rollout/inflight", "sample/rollout_queue_size")):
                    told[name] = fmean(look[place] for look in looks)
                self._figures.logged(told)
                await self._sync(step)
        finally:
            for task in rollouts:
                task.cancel()
            await asyncio.gather(*rollouts, return_exceptions=True)

    async def _sample(self) -> tuple[int, int]:
        """One that is fresh enough; what was in flight and waited then."""
        while True:
            seq = await self._queue.get()
            if not self._strict or seq == self._seq:
                return self._inflight, self._queue.qsize()

    async def _sync(self, step: int) -> None:
        with self._figures.sync():
            publication = await asyncio.to_thread(
                self._publisher.publish,
                self._fleet.adapter(),
                step=step,
                timings=self._figures.timings(step),
                load=self._figures.load(),
            )
            self._seq = publication.seq
            if self._waits or step == 0:
                assert (await self._fleet.outcome(publication, SLOW_S)).state == "current"

    async def _roll(self, number: int) -> None:
        run = self._publisher.run
        while True:
            seq = self._seq
            self._inflight += 1
            try:
                model = f"{run}@v{seq}" if self._strict else run
                answer = await self._fleet.complete(model, [number] * 20, max_tokens=self._tokens)
            finally:
                self._inflight -= 1
            if answer.status == 200:
                await self._queue.put(seq)
            else:
                await asyncio.sleep(0.02)
