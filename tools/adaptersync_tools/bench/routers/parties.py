"""Who is measured: our router with a fleet behind it, others as their makers ship them, and nobody at all.

Starts them, on free ports of this host, and says where they listen and which processes they are; knows no load and no
figure. What others are told beyond their defaults is in this module.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import aiohttp
import msgspec
from msgspec import Struct

from adaptersync.trainer import AdapterPublisher
from adaptersync_core.errors import AdapterSyncError
from adaptersync_core.table import Table
from adaptersync_tools.bench.light import LightFleet
from adaptersync_tools.bench.routers.replica import HOST, Counts
from adaptersync_tools.demo.synthetic import write_adapter, write_base_model
from adaptersync_tools.supervisor import Spec, Supervisor, python
from adaptersync_tools.up import Stack, StackSettings, answers, free_ports

RUN = "bench"
MODEL = "bench-v1"  # where nobody publishes: any name will do
UP_S = 60.0
LOOK_S = 0.05
CHECK_S = 1  # how often others look after replicas where one dies: by default each minute, longer than a run

Kind = Literal["ours", "agents", "peer", "rule", "direct"]


class BenchFailed(AdapterSyncError):
    code = "bench-failed"


class Party(Struct, frozen=True, kw_only=True):
    """`session`: its requests name their prompt in a header, because its policy asks for that. `workers`: processes
    that share a port."""

    name: str
    kind: Kind
    workers: int = 1
    program: str = ""
    version: str = ""
    """The release that is meant to be compared with."""
    policy: str = ""
    api: Literal["completions", "generate"] = "completions"
    session: bool = False

    @property
    def choice(self) -> str:
        """By what it is chosen; nothing for no router, which is measured where others are."""
        return {"ours": "adaptersync", "agents": "adaptersync", "rule": "hf-rule"}.get(self.kind, self.program)

    @property
    def install(self) -> str:
        return (
            f"python3 -m venv peers/{self.program} && peers/{self.program}/bin/pip install "
            f"{self.program}=={self.version}, then --{self.program} peers/{self.program}/bin/{self.program}"
        )


OURS = Party(name="adaptersync", kind="ours")
OURS_TWO = Party(name="adaptersync, 2 workers", kind="ours", workers=2)
OURS_AGENTS = Party(name="adaptersync, with agents", kind="agents")
VLLM = Party(name="vllm-router cache_aware", kind="peer", program="vllm-router", version="0.1.17", policy="cache_aware")
VLLM_STICKY = Party(
    name="vllm-router sticky, session header",
    kind="peer",
    program="vllm-router",
    version="0.1.17",
    policy="sticky_least_loaded",
    session=True,
)
# refuses token ids at /v1/completions
SGLANG = Party(
    name="sglang-router cache_aware",
    kind="peer",
    program="sglang-router",
    version="0.3.2",
    policy="cache_aware",
    api="generate",
)
RULE = Party(name="Hugging Face rule", kind="rule")
DIRECT = Party(name="no router", kind="direct")
ALL = (OURS, OURS_TWO, OURS_AGENTS, VLLM, VLLM_STICKY, SGLANG, RULE, DIRECT)


class Serving(Struct, frozen=True, kw_only=True):
    """A party at work. `leaders` are the sessions of its processes, by what they are. `away` ends the replica `last`
    at once, and starts it again, without adapters, when its context ends."""

    urls: Sequence[str]
    model: str
    leaders: Mapping[int, str]
    last: str
    away: Callable[[], contextlib.AbstractContextManager[None]]


class Replicas:
    """Light replicas, each a process. A context manager; whoever ends them by force starts them again with `away`."""

    def __init__(self, logs: Path, count: int, *, delay_s: float = 0.0, jitter: float = 0.0) -> None:
        self.supervisor = Supervisor(logs)
        self.names = [f"replica-{number}" for number in range(count)]
        ports = free_ports(count)
        self.urls = [f"http://{HOST}:{port}" for port in ports]
        shared = ("--strict", "--delay-s", str(delay_s), "--jitter", str(jitter))
        module = "adaptersync_tools.bench.routers.replica"
        self._specs = [
            Spec(
                name=name,
                command=python(module, "--name", name, "--port", str(port), *shared),
                tier=1,
                restart=False,
                grace_s=1.0,
            )
            for name, port in zip(self.names, ports, strict=True)
        ]

    async def start(self) -> None:
        for spec in self._specs:
            self.supervisor.start(spec)
        for spec, url in zip(self._specs, self.urls, strict=True):
            await until_up(self.supervisor, spec.name, f"{url}/health")

    @property
    def leaders(self) -> dict[int, str]:
        """Sessions of those that run."""
        services = (self.supervisor.services[name] for name in self.names)
        return {service.pid: "replicas" for service in services if service.pid is not None}

    async def post(self, path: str, body: object = None, *, only: int | None = None) -> None:
        urls = self.urls if only is None else [self.urls[only]]
        async with aiohttp.ClientSession() as session:
            for url in urls:
                async with session.post(f"{url}{path}", json=body) as answer:
                    answer.raise_for_status()

    async def counts(self) -> list[Counts]:
        """One for each, in order; of those that run."""
        found = []
        async with aiohttp.ClientSession() as session:
            for url in self.urls:
                async with session.get(f"{url}/counts") as answer:
                    found.append(msgspec.json.decode(await answer.read(), type=Counts))
        return found

    async def idle(self) -> None:
        """Until nothing is in flight."""
        async with asyncio.timeout(UP_S):
            while any(each.inflight for each in await self.counts()):  # noqa: ASYNC110 (of another process)
                await asyncio.sleep(LOOK_S)


def find(party: Party, given: Mapping[str, Path]) -> Path | None:
    """The program of a party that needs one: as given, else on PATH."""
    if party.kind != "peer":
        return None
    found = shutil.which(str(given.get(party.program) or party.program))
    return Path(found) if found else None


def version(program: Path, package: str) -> str:
    """What is installed in the program's environment; empty when that cannot be told."""
    interpreter = program.absolute().with_name("python")
    ask = f"from importlib.metadata import version; print(version({package!r}))"
    try:
        told = subprocess.run(  # noqa: S603 (beside the program the caller chose)
            [str(interpreter), "-c", ask], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return told.stdout.strip()


@contextlib.asynccontextmanager
async def serving(
    party: Party, program: Path | None, replicas: Replicas, place: Path, *, routers: int = 1, quick: bool = False
) -> AsyncIterator[Serving]:
    """The party at work before `replicas`, which all have the version. `routers` are independent of each other, but for
    what they share by themselves. `quick`: it looks after its replicas each second, where that can be set."""
    match party.kind:
        case "ours":
            started = _ours(party, replicas, place, routers)
        case "agents":
            started = _agents(place)
        case "direct":
            started = _direct(replicas)
        case "peer" | "rule":
            started = _others(party, program, replicas, routers, quick=quick)
    async with started as at_work:
        yield at_work


@contextlib.asynccontextmanager
async def _ours(party: Party, replicas: Replicas, place: Path, routers: int) -> AsyncIterator[Serving]:
    """Real routers, coordinator and Redis servers; the replicas' agents are light, and say of them what is not so when
    one dies: that it is ready. So the router has to find out by itself."""
    settings = StackSettings(
        model=write_base_model(place / "model"),
        state_dir=place / "fleet",
        replicas=0,
        simulated=True,
        routers=routers,
        overrides={"jobs.verify": False, "coordinator.min_ready": len(replicas.urls), "router.workers": party.workers},
    )
    with Stack(settings) as stack:  # starting holds this loop up, on which nothing else runs yet
        port = stack.router_url.rpartition(":")[2]
        await until(f"{party.workers} workers at one port", lambda: listeners(int(port)) == party.workers)
        async with LightFleet(stack.config, len(replicas.urls), urls=replicas.urls) as fleet:
            fleet.release_acks()
            await _until_table(fleet, lambda table: len(table.ready()) == len(replicas.urls))
            with AdapterPublisher(stack.config, run=RUN) as publisher:
                model = await asyncio.to_thread(_publish, publisher, place)
                await replicas.post("/v1/load_lora_adapter", {"lora_name": model})
                yield Serving(
                    urls=stack.router_urls,
                    model=model,
                    leaders=_leaders(stack),
                    last=replicas.names[-1],
                    away=lambda: replicas.supervisor.away(replicas.names[-1]),
                )


@contextlib.asynccontextmanager
async def _agents(place: Path) -> AsyncIterator[Serving]:
    """Our whole fleet: engines are simulated, and their agents load what a restart has lost."""
    settings = StackSettings(
        model=write_base_model(place / "model"),
        state_dir=place / "fleet",
        replicas=4,
        simulated=True,
        overrides={"jobs.verify": False},
    )
    with Stack(settings) as stack, AdapterPublisher(stack.config, run=RUN) as publisher:
        model = _publish(publisher, place)
        last = len(stack.engine_urls) - 1
        yield Serving(
            urls=stack.router_urls,
            model=model,
            leaders=_leaders(stack),
            last=f"replica-{last}",
            away=lambda: stack.supervisor.away(f"engine-{last}"),
        )


@contextlib.asynccontextmanager
async def _direct(replicas: Replicas) -> AsyncIterator[Serving]:
    await replicas.post("/v1/load_lora_adapter", {"lora_name": MODEL})
    yield Serving(urls=replicas.urls[:1], model=MODEL, leaders={}, last=replicas.names[-1], away=contextlib.nullcontext)


@contextlib.asynccontextmanager
async def _others(
    party: Party, program: Path | None, replicas: Replicas, routers: int, *, quick: bool
) -> AsyncIterator[Serving]:
    await replicas.post("/v1/load_lora_adapter", {"lora_name": MODEL})
    supervisor = replicas.supervisor
    ports = free_ports(2 * routers)
    urls = [f"http://{HOST}:{port}" for port in ports[:routers]]
    leaders = {}
    for number, (port, metrics_port) in enumerate(zip(ports[:routers], ports[routers:], strict=True)):
        command = _command(party, program, replicas.urls, port, metrics_port, quick=quick)
        environment = {"HF_HUB_OFFLINE": "1"}  # they look for the tokenizer of a model that does not exist
        spec = Spec(
            name=f"other-{number}", command=command, tier=2, environment=environment, restart=False, grace_s=1.0
        )
        service = supervisor.start(spec)
        leaders[service.pid or 0] = "router"
    for number, url in enumerate(urls):
        await until_up(supervisor, f"other-{number}", f"{url}/health")
    yield Serving(
        urls=urls,
        model=MODEL,
        leaders=leaders,
        last=replicas.names[-1],
        away=lambda: supervisor.away(replicas.names[-1]),
    )


def _command(
    party: Party, program: Path | None, urls: Sequence[str], port: int, metrics_port: int, *, quick: bool
) -> tuple[str, ...]:
    if party.kind == "rule":
        return python("adaptersync_tools.bench.routers.hf_rule", "--port", str(port), *urls)
    flags = {
        "--host": HOST,
        "--port": port,
        "--policy": party.policy,
        "--prometheus-host": HOST,
        "--prometheus-port": metrics_port,
        "--log-level": "error",
        "--worker-startup-check-interval": 1,
    }
    if quick:
        flags |= {"--health-check-interval-secs": CHECK_S, "--cb-timeout-duration-secs": CHECK_S}
    begin = [str(program), *(["launch"] if party.program == "sglang-router" else [])]
    return (*begin, "--worker-urls", *urls, *(str(part) for flag in flags.items() for part in flag))


def _publish(publisher: AdapterPublisher, place: Path) -> str:
    """The id of a version that has become current."""
    publication = publisher.publish(write_adapter(place / "adapter", base="base", seed=1))
    outcome = publication.wait(UP_S)
    if outcome.state != "current":
        raise BenchFailed(f"version is {outcome.state}: {outcome.reason}", version=publication.adapter_id)
    return publication.adapter_id


def _leaders(stack: Stack) -> dict[int, str]:
    """Sessions of a fleet's services, by what they are."""
    kinds = ("router", "redis", "engine", "agent")
    return {
        service.pid: next((kind for kind in kinds if name.startswith(kind)), "control")
        for name, service in stack.supervisor.services.items()
        if service.pid is not None
    }


async def until(what: str, ready: Callable[[], bool]) -> None:
    """Ask `ready`, which may block for a moment, until it says yes; BenchFailed when it does not in time."""
    deadline = time.monotonic() + UP_S
    while not await asyncio.to_thread(ready):
        if time.monotonic() > deadline:
            raise BenchFailed(f"waited {UP_S:g} s for {what}")
        await asyncio.sleep(LOOK_S)


async def until_up(supervisor: Supervisor, name: str, url: str) -> None:
    service = supervisor.services[name]

    def up() -> bool:
        if service.returncode is not None:
            raise BenchFailed(f"{' '.join(service.spec.command[:3])} ended: {service.last_words()}")
        return answers(url)

    await until(name, up)


async def _until_table(fleet: LightFleet, enough: Callable[[Table], bool]) -> None:
    async with asyncio.timeout(UP_S):
        while not enough(await fleet.registry.table()):  # noqa: ASYNC110 (of another process)
            await asyncio.sleep(LOOK_S)


def listeners(port: int) -> int:
    """Sockets of this host that listen on a port of the loopback; Linux only, as the figures of CPU time are."""
    local = f"0100007F:{port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1] == local and row[3] == "0A" for row in rows)
