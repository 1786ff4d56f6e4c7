"""An agent under test with its engine, and a hand that publishes versions and writes the table."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from adaptersync.agent import app
from adaptersync.router.policy import Policy
from adaptersync_core.config import (
    AgentSection,
    Config,
    GroupSection,
    ProofSection,
    RedisSection,
    StoreSection,
)
from adaptersync_core.errors import ControlUnavailable
from adaptersync_core.keys import Keys
from adaptersync_core.manifest import Manifest
from adaptersync_core.records import Ack, Decision
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from adaptersync_core.store import ArtifactStore
from adaptersync_core.table import LiveState, LiveVersion, RunEntry, Table
from support.artifacts import manifest_of, small_adapter
from support.engines import Engine
from support.wait import wait_until


class Bench:
    """`agent` is the task the agent runs in."""

    agent: asyncio.Task[None]

    def __init__(self, config: Config, engine: Engine, registry: Registry, directory: Path) -> None:
        self.config = config
        self.engine = engine
        self.registry = registry
        self.directory = directory
        self.store = ArtifactStore(Path(config.store.path))
        self.staged = Path(config.agent.stage_path)
        self.make: Callable[..., Path] = small_adapter
        self._manifests: dict[str, Manifest] = {}
        self._seq = 0

    def start(self) -> None:
        self.agent = asyncio.create_task(app._stand_beside(self.config))

    async def stop(self) -> None:
        self.agent.cancel()
        await asyncio.gather(self.agent, return_exceptions=True)

    async def publish(self, **adapter: Any) -> str:
        """A new version in the store and in Redis; `adapter` is for `make`."""
        self._seq += 1
        source = self.make(self.directory / f"source-{self._seq}", seed=self._seq, **adapter)
        manifest = manifest_of(source, seq=self._seq)
        self.store.publish(manifest, source)
        await self.registry.begin_run("run", nonce="n", max_staleness=1, trainer="t")
        await self.registry.publish(manifest, published_at=1)
        self._manifests[manifest.adapter_id] = manifest
        return manifest.adapter_id

    async def want(self, *names: str, drained: tuple[str, ...] = ()) -> None:
        """Write the table: the first name is current, the others are on their way in; `drained` ones may go."""
        lease = await self.registry.lead("c", "c", lease_s=30)
        before = await self.registry.table()
        states: dict[str, LiveState] = dict.fromkeys(names[1:], "staging")
        states |= dict.fromkeys(names[:1], "current")
        states |= dict.fromkeys(drained, "retiring")
        table = Table(
            generation=before.generation + 1,
            runs={"run": RunEntry(epoch=1, max_staleness=1)},
            versions={name: self._live(name, state, name in drained) for name, state in states.items()},
        )
        await self.registry.decide(Decision(table=table), lease, alive_s=5)
        await self.registry.client.command("XADD", self.registry.keys.events, "*", "type", "version.staging")

    def _live(self, name: str, state: LiveState, drained: bool) -> LiveVersion:
        manifest = self._manifests[name]
        return LiveVersion(
            run="run",
            seq=manifest.seq,
            epoch=1,
            digest=manifest.digest,
            state=state,
            published_at=1,
            since=time.time(),
            changed_in=1,
            drained=drained,
        )

    async def ack(self, name: str, *, accepted: bool | None = None, timeout_s: float = 10.0) -> Ack:
        """The replica's word on a version, once it has one (of that kind)."""

        async def said() -> bool:
            try:
                ack = (await self.registry.acks("r1")).get(name)
            except ControlUnavailable:
                return False
            return ack is not None and accepted in (None, ack.accepted)

        await wait_until(said, timeout_s=timeout_s, what=f"a word on {name}")
        return (await self.registry.acks("r1"))[name]

    async def reported(self) -> tuple[str, tuple[str, ...]]:
        """Engine epoch and loaded versions of the last report."""
        seen = (await self.registry.fleet()).replicas.get("r1")
        return ("", ()) if seen is None else (seen.report.engine_epoch, seen.report.loaded)

    def listed(self) -> set[str]:
        return set(self.engine.listed())


@asynccontextmanager
async def bench_on(
    redis_url: str,
    engine: Engine,
    directory: Path,
    *,
    proof: ProofSection | None = None,
    keep_s: float = 0.05,
    cache_url: str = "",
    policy: Policy = "promise",
) -> AsyncIterator[Bench]:
    """An agent beside `engine`, with its files below `directory`; it is stopped at the end."""
    (directory / "store").mkdir(exist_ok=True)
    config = Config(
        group=GroupSection(name="group", policy=policy),
        redis=RedisSection(control_url=redis_url, cache_url=cache_url),
        proof=proof or ProofSection(),
        store=StoreSection(path=str(directory / "store")),
        agent=AgentSection(
            name="r1",
            engine_url=engine.url,
            token_file=str(engine.token_file or ""),
            stage_path=str(directory / "staged"),
            heartbeat_s=0.1,
            probe_timeout_s=1.0,
            load_timeout_s=5.0,
            visible_timeout_s=0.3,
            keep_s=keep_s,
        ),
    )
    client = RedisClient(redis_url, name="test")
    bench = Bench(config, engine, Registry(client, Keys("group")), directory)
    bench.start()
    try:
        yield bench
    finally:
        await bench.stop()
        await client.close()
