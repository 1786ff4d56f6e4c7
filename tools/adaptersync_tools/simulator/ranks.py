"""The engines behind one simulated server, as vLLM has them with `--data-parallel-size`. Knows no HTTP.

Each has a cache, a queue and a publisher of its own. All hold the same adapters; the names that a server lists are
those of the first one's registry. One that dies takes the others along.
"""

import asyncio
from collections.abc import Sequence

from adaptersync_tools.simulator import workers
from adaptersync_tools.simulator.engine import Engine, EngineConfig
from adaptersync_tools.simulator.errors import Refused, bad_request
from adaptersync_tools.simulator.faults import Faults
from adaptersync_tools.simulator.publisher import Publisher, PublisherConfig
from adaptersync_tools.simulator.scheduler import Latency, Scheduler
from adaptersync_tools.simulator.store import Mount


class Ranks:
    def __init__(
        self,
        count: int,
        config: EngineConfig,
        latency: Latency,
        *,
        mount: Mount | None,
        kv_events: PublisherConfig | None,
    ) -> None:
        view = mount.view() if mount else None
        self.engines = [Engine(config, view) for _ in range(count)]
        self.publishers = [Publisher(kv_events, rank) for rank in range(count)] if kv_events else []
        self.schedulers = [
            Scheduler(
                engine,
                latency,
                publish=self.publishers[rank].publish if self.publishers else lambda events: None,
                died=self._die,
            )
            for rank, engine in enumerate(self.engines)
        ]
        self._turn = 0

    async def close(self) -> None:
        for publisher in self.publishers:
            await publisher.close()

    def asked(self, header: str | None) -> int | None:
        """The rank that a request asks for, if any; what is no number asks for none. Refused where there is no such."""
        try:
            rank = int(header or "")
        except ValueError:
            return None
        if 0 <= rank < len(self.schedulers):
            return rank
        raise bad_request(f"data_parallel_rank {rank} is out of range [0, {len(self.schedulers)}).")

    def chosen(self, asked: int | None) -> Scheduler:
        """The rank that was asked for, or who has least to do; of equal ones each in its turn."""
        if asked is not None:
            return self.schedulers[asked]
        turn, self._turn = self._turn, (self._turn + 1) % len(self.schedulers)
        return min([*self.schedulers[turn:], *self.schedulers[:turn]], key=lambda each: each.unfinished)

    def set_faults(self, faults: Faults, *, drop_kv_batches: bool) -> None:
        for engine, scheduler in zip(self.engines, self.schedulers, strict=True):
            engine.faults = faults
            scheduler.freeze(faults.frozen)
        for publisher in self.publishers if drop_kv_batches else ():
            publisher.drop = faults.drop_kv_batches
        if faults.die:
            self._die()

    async def load(self, name: str, path: str, *, inplace: bool, delay_s: float, failure: Refused | None) -> None:
        """The first failure is that of all; others may have loaded it nevertheless."""
        await asyncio.gather(
            *(each.load(name, path, inplace=inplace, delay_s=delay_s, failure=failure) for each in self.schedulers)
        )

    def unload(self, name: str) -> None:
        for engine in self.engines:
            engine.registry.unload(name)

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        await asyncio.gather(*(each.pause(mode, clear_cache=clear_cache) for each in self.schedulers))

    async def resume(self) -> None:
        await asyncio.gather(*(each.resume() for each in self.schedulers))

    def abort(self, request_ids: Sequence[str] | None) -> int:
        aborted = [each.abort(request_ids) for each in self.schedulers]
        return sum(aborted) if request_ids is None else aborted[0]

    def reset(self) -> bool:
        return all([engine.cache.reset() for engine in self.engines])

    def call(self, call: workers.Call, *, extension: str) -> list[object]:
        """All workers do it, and those of the first rank are heard."""
        return [workers.answer(engine, call, extension=extension) for engine in self.engines][:1]

    def _die(self) -> None:
        for scheduler in self.schedulers:
            scheduler.die()
