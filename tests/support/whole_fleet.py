"""A whole fleet in one event loop: simulated engines, their agents, coordinators and routers, on real Redis servers.

For tests of what the parts come to together. Everything runs the code it runs in production; only the engines are
simulated, and each part can be stopped, started again or delayed by itself. Trainers are `AdapterPublisher`s.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web
from msgspec.structs import replace

from adaptersync.agent import app as agent_app
from adaptersync.coordinator.app import _coordinate
from adaptersync.router.app import serving as serving_router
from adaptersync.trainer import AdapterPublisher
from adaptersync.trainer.publication import Outcome, Publication
from adaptersync.trainer.relay import relay_runner
from adaptersync_core.config import (
    AgentSection,
    Config,
    CoordinatorSection,
    GroupSection,
    JobsSection,
    RedisSection,
    RouterSection,
    StoreSection,
    TrainerSection,
)
from adaptersync_core.errors import ControlError
from adaptersync_core.events import from_fields
from adaptersync_core.keys import Keys
from adaptersync_core.lane import FastLane
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from adaptersync_core.store import ArtifactStore, Reader
from adaptersync_core.table import Table
from adaptersync_core.vllm import WORKER_EXTENSION
from adaptersync_tools.simulator.adapter_files import BaseModel
from adaptersync_tools.simulator.engine import EngineConfig
from adaptersync_tools.simulator.http import Simulator, SimulatorConfig, serving
from adaptersync_tools.simulator.publisher import PublisherConfig
from adaptersync_tools.simulator.scheduler import Latency
from support.adapters import make_adapter, write_safetensors
from support.artifacts import small_adapter
from support.engines import Engine
from support.ledger_rows import as_text
from support.router_fleet import Answer
from support.wait import wait_until

PROMPT = list(range(64, 100))
HIDDEN = 8  # as `small_adapter` has it
SLOW_S = 30.0  # how long anything may take on a busy machine before a test gives up


class Replica:
    """One simulated engine and its agent. The engine keeps its port over its lives."""

    def __init__(self, fleet: WholeFleet, name: str) -> None:
        self.fleet = fleet
        self.name = name
        self.port = 0
        self.ranks = 1
        self.simulator: Simulator | None = None
        self.engine_config = fleet.engine
        self.config = fleet.config  # of the agent; its engine's address is known once it was started
        self.mount = fleet.directory / "mounts" / name
        self.token_file = fleet.directory / f"token-{name}"
        self._engine = contextlib.AsyncExitStack()
        self._agent: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def sim(self) -> Simulator:
        assert self.simulator is not None, f"the engine of {self.name} is down"
        return self.simulator

    async def start(self) -> None:
        await self.start_engine()
        self.start_agent()

    async def start_engine(self) -> None:
        """A new life: nothing of the last one is left."""
        config = SimulatorConfig(engine=self.engine_config, latency=self.fleet.latency, ranks=self.ranks)
        if self.fleet.guarded:
            self.token_file.touch()
            config = replace(config, token_file=self.token_file, worker_extension_cls=WORKER_EXTENSION)
        if self.fleet.kv_events:
            ends = {name: f"ipc://{self.fleet.directory}/{name}-{self.name}" for name in ("kv", "replay")}
            ends = ends if self.ranks == 1 else dict.fromkeys(ends, "tcp://*:0")
            config = replace(config, kv_events=PublisherConfig(endpoint=ends["kv"], replay_endpoint=ends["replay"]))
        self.simulator = Simulator(config)
        for change in self.fleet.on_engine:
            change(self)
        address = await self._engine.enter_async_context(serving(self.simulator, port=self.port))
        self.port = address.port

    async def stop_engine(self) -> None:
        self.simulator = None
        await self._engine.aclose()

    async def restart_engine(self) -> None:
        await self.stop_engine()
        await self.start_engine()

    def start_agent(self, **settings: Any) -> None:
        section = replace(
            self.config.agent,
            name=self.name,
            engine_url=self.url,
            token_file=str(self.token_file) if self.fleet.guarded else "",
            stage_path=str(self.fleet.directory / "staged" / self.name),
            **settings,
        )
        config = replace(self.config, agent=section, store=StoreSection(path=str(self.mount)))
        self._agent = asyncio.create_task(
            agent_app._stand_beside(config, self.fleet.readers.get(self.mount)), name=f"agent of {self.name}"
        )

    async def stop_agent(self) -> None:
        if self._agent is not None:
            self._agent.cancel()
            await asyncio.gather(self._agent, return_exceptions=True)
            self._agent = None

    async def agent_ended(self, *, timeout_s: float) -> None:
        """Wait until it ended by itself, cleaning up included; or for as long as that."""
        if self._agent is not None:
            await asyncio.wait((self._agent,), timeout=timeout_s)

    async def stop(self) -> None:
        await self.stop_agent()
        await self.stop_engine()

    def faults(self, **change: Any) -> None:
        self.sim.set_faults(change)

    @property
    def up(self) -> bool:
        return self.simulator is not None

    def listed(self) -> set[str]:
        """Adapter ids its API server knows; the canary of a proof is none."""
        return {lora.name for lora in self.sim.engine.registry.listed() if not lora.name.startswith("canary")}

    def staged(self) -> set[str]:
        root = self.fleet.directory / "staged" / self.name
        return (
            {path.name for path in root.iterdir() if not path.name.startswith((".", "canary"))}
            if root.is_dir()
            else set()
        )


class RealReplica(Replica):
    """A server that runs already, and goes on running."""

    def __init__(self, fleet: WholeFleet, name: str, engine: Engine) -> None:
        super().__init__(fleet, name)
        self.engine = engine
        self.port = engine.port
        self.token_file = engine.token_file or self.token_file

    @property
    def up(self) -> bool:
        return True

    async def start_engine(self) -> None: ...

    async def stop_engine(self) -> None: ...

    def listed(self) -> set[str]:
        return {name for name in self.engine.listed() if not name.startswith("canary")}


class WholeFleet:
    """See the module. `on_engine` are changes made to each engine before it is started."""

    def __init__(
        self, config: Config, directory: Path, *, replicas: int, engine: EngineConfig, latency: Latency
    ) -> None:
        self.config = config
        self.directory = directory
        self.engine = engine
        self.latency = latency
        self.keys = Keys(config.group.name)
        self.control = RedisClient(config.redis.control_url, name="test")
        self.registry = Registry(self.control, self.keys)
        self.store = ArtifactStore(Path(config.store.path))
        self.on_engine: list[Callable[[Replica], None]] = []
        self.replicas = {f"replica-{number}": Replica(self, f"replica-{number}") for number in range(replicas)}
        self.readers: dict[Path, Reader] = {}
        self.make: Callable[..., Path] = small_adapter
        self.guarded = True  # our door before every engine, our auditor in its worker
        self.kv_events = False  # engines say what they cache
        self.url = ""
        self._coordinators: dict[str, asyncio.Task[None]] = {}
        self._routers: dict[str, contextlib.AsyncExitStack] = {}
        self._publishers: list[AdapterPublisher] = []
        self._made = 0

    def __getitem__(self, number: int) -> Replica:
        return self.replicas[f"replica-{number}"]

    # parts

    async def start(self) -> None:
        self.start_coordinator()
        for replica in self.replicas.values():
            await replica.start()
        await self.ready()
        await self.start_router()

    def start_coordinator(self, name: str = "coordinator-0", **settings: Any) -> asyncio.Task[None]:
        section = replace(self.config.coordinator, name=name, **settings)
        task = asyncio.create_task(_coordinate(replace(self.config, coordinator=section)), name=name)
        self._coordinators[name] = task
        return task

    async def stop_coordinator(self, name: str = "coordinator-0") -> None:
        task = self._coordinators.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def start_router(self, name: str = "router-0", **settings: Any) -> str:
        """Its address; the first one's is also the fleet's."""
        stack = contextlib.AsyncExitStack()
        section = replace(self.config.router, name=name, **settings)
        router = await stack.enter_async_context(serving_router(replace(self.config, router=section), drain_s=0.5))
        self._routers[name] = stack
        self.url = self.url or router.url
        return router.url

    async def stop_router(self, name: str = "router-0") -> None:
        await self._routers.pop(name).aclose()
        self.url = ""

    async def stop(self) -> None:
        for publisher in self._publishers:
            await asyncio.to_thread(publisher.close)
        for name in list(self._routers):
            await self.stop_router(name)
        for name in list(self._coordinators):
            await self.stop_coordinator(name)
        for replica in self.replicas.values():
            await replica.stop()
        await self.control.close()

    @contextlib.asynccontextmanager
    async def relay(self, run: str = "run", **settings: Any) -> AsyncIterator[str]:
        """The address an unmodified TRL takes for its server."""
        section = replace(self.config.relay, router_url=self.url, allowed_root=str(self.directory), **settings)
        trainer = replace(self.config.trainer, run=run)
        runner = relay_runner(replace(self.config, relay=section, trainer=trainer))
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    # trainers

    async def trainer(self, run: str = "run", **more: Any) -> AdapterPublisher:
        publisher = await asyncio.to_thread(AdapterPublisher, self.config, run, **more)
        self._publishers.append(publisher)
        return publisher

    def close_lane(self) -> None:
        """From now on bytes come through the mounted store alone."""
        for publisher in self._publishers:
            publisher._lane = FastLane(publisher._cache, self.keys, limit_bytes=0)

    def adapter(self, **more: Any) -> Path:
        """A directory with an adapter nobody else has; `more` is for `make`."""
        self._made += 1
        return self.make(self.directory / f"adapter-{self._made}", **({"seed": self._made} | more))

    async def publish(self, publisher: AdapterPublisher, source: Any = None, **adapter: Any) -> Publication:
        return await asyncio.to_thread(publisher.publish, source or self.adapter(**adapter))

    async def outcome(self, publication: Publication, timeout_s: float = SLOW_S) -> Outcome:
        return await asyncio.to_thread(publication.wait, timeout_s)

    async def promoted(self, publisher: AdapterPublisher, source: Any = None, **adapter: Any) -> str:
        """Publish, and wait until it is current; returns the adapter id."""
        publication = await self.publish(publisher, source, **adapter)
        outcome = await self.outcome(publication)
        assert outcome.state == "current", outcome
        return publication.adapter_id

    # what is there

    async def table(self) -> Table:
        return await self.registry.table()

    async def current(self, run: str = "run") -> str | None:
        entry = (await self.table()).runs.get(run)
        return entry.current if entry else None

    async def ready(self, count: int | None = None, timeout_s: float = SLOW_S) -> None:
        """Wait until so many replicas (all, if not said) are ready."""
        wanted = len(self.replicas) if count is None else count

        async def enough() -> bool:
            return len((await self.table()).ready()) == wanted

        await wait_until(enough, timeout_s=timeout_s, what=f"{wanted} replicas are ready")

    async def state(self, replica: str, state: str, reason: str = "", timeout_s: float = SLOW_S) -> None:
        async def is_so() -> bool:
            member = (await self.table()).members.get(replica)
            return member is not None and member.state == state and reason in member.reason

        await wait_until(is_so, timeout_s=timeout_s, what=f"{replica} is {state} ({reason})")

    async def settled(self, timeout_s: float = SLOW_S) -> Table:
        """Wait until nothing is on its way in or out, and every ready replica lists what is served and nothing else."""

        async def is_so() -> bool:
            table = await self.table()
            names = {name for name in table.versions if table.routable(name)}
            return set(table.versions) == names and all(
                self.replicas[name].up and self.replicas[name].listed() == names for name in table.ready()
            )

        await wait_until(is_so, timeout_s=timeout_s, what="the fleet is at rest")
        return await self.table()

    async def events(self, kind: str = "", version: str = "") -> list[Any]:
        return [event for _, event in await self.timed_events(kind, version)]

    async def timed_events(self, kind: str = "", version: str = "") -> list[tuple[int, Any]]:
        """With the server's clock in milliseconds."""
        found: list[tuple[int, Any]] = []
        for entry_id, fields in await self.control.read_stream(self.keys.events, "0", count=100_000):
            if fields["type"].startswith(kind) and version in ("", fields.get("version")):
                found.append((int(entry_id.partition("-")[0]), from_fields(fields)))
        return found

    async def rows(self) -> list[dict[str, str]]:
        return [as_text(fields) for _, fields in await self.control.read_stream(self.keys.rollouts, "0", count=100_000)]

    # rollouts

    async def complete(self, model: str | None, prompt: object = None, **fields: Any) -> Answer:
        body = {"prompt": prompt or PROMPT, "max_tokens": 2} | fields | ({} if model is None else {"model": model})
        return await self.post("/v1/completions", body)

    async def post(self, path: str, body: object, url: str = "") -> Answer:
        timeout = aiohttp.ClientTimeout(total=SLOW_S)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post((url or self.url) + path, json=body) as answer,
        ):
            return Answer(answer.status, answer.headers, await answer.read())

    async def get(self, path: str, url: str = "") -> Answer:
        async with aiohttp.ClientSession() as session, session.get((url or self.url) + path) as answer:
            return Answer(answer.status, answer.headers, await answer.read())

    @contextlib.asynccontextmanager
    async def traffic(self, *models: str, clients: int = 2, **fields: Any) -> AsyncIterator[list[Served]]:
        """Rollouts one after another from each of some clients until the block ends; yields what they got."""
        served: list[Served] = []
        stop = asyncio.Event()

        async def client(number: int) -> None:
            while not stop.is_set():
                sent_at = time.time()
                model = models[number % len(models)]
                answer = await self.complete(model, [number, *PROMPT], **fields)
                served.append(Served(model, answer, sent_at, time.time()))
                await asyncio.sleep(0.005)

        tasks = [asyncio.create_task(client(number)) for number in range(clients)]
        try:
            yield served
        finally:
            stop.set()
            await asyncio.gather(*tasks)


class Served:
    """One answer that `traffic` got; times are this host's wall clock."""

    def __init__(self, asked: str, answer: Answer, sent_at: float, at: float) -> None:
        self.asked = asked
        self.answer = answer
        self.sent_at = sent_at
        self.at = at

    @property
    def version(self) -> str:
        return self.answer.headers.get("x-adaptersync-version", "")


def fleet_config(control_url: str, cache_url: str, directory: Path, **changes: Mapping[str, Any]) -> Config:
    """Settings in a hurry; `changes` are fields by section."""
    config = Config(
        group=GroupSection(name="group"),
        redis=RedisSection(control_url=control_url, cache_url=cache_url),
        store=StoreSection(path=str(directory / "store")),
        coordinator=CoordinatorSection(
            min_ready=1, tick_s=0.05, lease_s=1.0, alive_s=3.0, deadline_s=20.0, eject_s=0.5
        ),
        agent=AgentSection(
            heartbeat_s=0.1, probe_timeout_s=1.0, load_timeout_s=10.0, visible_timeout_s=5.0, keep_s=0.1
        ),
        router=RouterSection(
            port=0,
            hold_s=20.0,
            connect_timeout_s=1.0,
            request_timeout_s=20.0,
            spool_path=str(directory / "spool"),
            spool_bytes=1 << 20,
        ),
        trainer=TrainerSection(max_staleness=1),
        jobs=JobsSection(verify=False),
    )
    return replace(config, **{name: replace(getattr(config, name), **fields) for name, fields in changes.items()})


@contextlib.asynccontextmanager
async def whole_fleet(
    config: Config,
    directory: Path,
    *,
    replicas: int = 2,
    latency: Latency | None = None,
    start: bool = True,
    real: Engine | None = None,
    base: Path | None = None,
    **engine: Any,
) -> AsyncIterator[WholeFleet]:
    """A fleet, all of it started and ready unless told otherwise; `engine` are fields of EngineConfig.

    `real` takes the place of the first simulated engine; `base` is a model whose adapters are served.
    """
    (directory / "store").mkdir(exist_ok=True)
    (directory / "mounts").mkdir()
    model = base or write_model(directory / "model")
    fields = {"max_loras": 5, "max_cpu_loras": 8, "max_num_seqs": 64} | engine
    sizes = EngineConfig(root=str(model), base=BaseModel.from_directory(model), **fields)
    fleet = WholeFleet(config, directory, replicas=replicas, engine=sizes, latency=latency or Latency())
    if real is not None:
        fleet.replicas["replica-0"] = RealReplica(fleet, "replica-0", real)
        fleet.make = make_adapter
    for replica in fleet.replicas.values():
        replica.mount.symlink_to(directory / "store")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent_app, "REST_S", 0.5)
        patch.setattr(agent_app, "RETRY_S", 0.1)
        try:
            if start:
                await fleet.start()
            yield fleet
        finally:
            await fleet.stop()


def write_model(directory: Path) -> Path:
    """Sizes for the simulator, and the weights that adapters of these tests train, for agents."""
    directory.mkdir(exist_ok=True)
    sizes = {
        "hidden_size": HIDDEN,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "intermediate_size": 16,
        "vocab_size": 256,
    }
    (directory / "config.json").write_bytes(orjson.dumps(sizes))
    weight = ((HIDDEN, HIDDEN), bytes(4 * HIDDEN * HIDDEN))
    names = [f"model.layers.0.self_attn.{module}.weight" for module in ("q_proj", "o_proj")]
    write_safetensors(directory / "model.safetensors", dict.fromkeys(names, weight))
    return directory


async def control_answers(registry: Registry) -> bool:
    try:
        await registry.table()
    except ControlError:
        return False
    return True
