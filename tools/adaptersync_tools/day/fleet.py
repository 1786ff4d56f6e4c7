"""What a day happens to: two Redis servers, and services installed on hosts from one rendered configuration."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from adaptersync_core.config import load_config
from adaptersync_core.errors import AdapterSyncError
from adaptersync_tools import explain
from adaptersync_tools.day.site import Host, Site
from adaptersync_tools.day.units import CLIENT_TIER, OURS, SERVER_TIER, Units
from adaptersync_tools.demo.synthetic import write_base_model
from adaptersync_tools.servers import Role, find_binary, render_config
from adaptersync_tools.supervisor import Service, Spec, Supervisor, python
from adaptersync_tools.systemd.install import OLDEST, write
from adaptersync_tools.systemd.units import SETTINGS, render
from adaptersync_tools.systemd.units import Host as Target
from adaptersync_tools.up import free_ports

CONTROL, FRONT, FIRST, SECOND, TRAINER = "control", "front", "gpu-a", "gpu-b", "trainer"
HOSTS = (CONTROL, FRONT, FIRST, SECOND, TRAINER)
RUN = "my-run"
CLI = "adaptersync_tools.cli"
COMMAND_S = 120.0
MEMORY_MB = 256
WAIT_S = 60.0
LOOK_S = 0.3

DAY: dict[str, Any] = {
    "engine.kind": "simulated",
    "engine.drain_s": 20.0,
    "engine.arguments": """--latency '{"decode_tokens_per_s": 40}'""",  # something is in flight at any moment
    "coordinator.min_ready": 1,
    "coordinator.lease_s": 2.0,
    "jobs.ledger_s": 2.0,
    "agent.heartbeat_s": 0.5,
}


class DayFailed(AdapterSyncError):
    code = "day-failed"


class Fleet:
    """A context manager: nothing of it is left when it is left."""

    def __init__(self, site: Site, directory: Path) -> None:
        self.site = site
        self.directory = directory.absolute()
        self.supervisor = Supervisor(self.directory / "logs")
        self.units: dict[str, Units] = {}
        self._ports = dict(zip(Role, free_ports(2), strict=True))
        self._engine_port = 8000 if not site.loopback else _block()
        self._router_port = 8080 if not site.loopback else _block()

    def __enter__(self) -> Self:
        self.supervisor.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.supervisor.stop()

    @property
    def routers(self) -> list[str]:
        return [f"http://{self._host(FRONT).address}:{self._router_port + number}" for number in range(2)]

    def install(self) -> int:
        """Render one configuration's units for each host; returns how many files were written."""
        model = write_base_model(self.directory / "model")
        count = 0
        for name in dict.fromkeys(host.name for host in self.site.hosts.values()):
            host = next(host for host in self.site.hosts.values() if host.name == name)
            root = self._root(host)
            file = root / "etc/adaptersync" / SETTINGS
            file.parent.mkdir(parents=True)
            settings = self._settings(host, model)
            file.write_text(explain.to_toml(settings))
            file.chmod(0o600)
            target = Target(python=sys.executable, settings=str(file), version=OLDEST)
            for place in (settings["store.path"], settings["agent.stage_path"], settings["router.spool_path"]):
                Path(place).mkdir(parents=True, exist_ok=True)
            count += len(write(render(load_config(file, environment={}), target), root))
            self.units[name] = Units(host, root, self.site.run / host.name, self.supervisor)
        return count

    def start(self) -> None:
        for role in Role:
            self.start_server(role)
        self.unit(CONTROL, "coordinator", "worker")
        self.unit(FRONT, "router", "router@1")

    def unit(self, host: str, *names: str) -> None:
        self.at(host).start(*(f"adaptersync-{name}.service" for name in names))

    def at(self, host: str) -> Units:
        return self.units[self._host(host).name]

    def start_server(self, role: Role) -> None:
        self._start_server(f"redis-{role}", role, self._ports[role])

    def _start_server(self, name: str, role: Role, port: int) -> None:
        directory = self.directory / name
        directory.mkdir(mode=0o700, exist_ok=True)
        config, host = directory / "server.conf", self._host(CONTROL)
        text = render_config(role, directory=directory, port=port, password=None, maxmemory_mb=MEMORY_MB)
        if not self.site.loopback:  # nobody else is in its network
            text = text.replace("bind 127.0.0.1", f"bind {host.address} 127.0.0.1").replace(
                "protected-mode yes", "protected-mode no"
            )
        config.write_text(text)
        command = tuple(host.command(str(find_binary()), str(config)))
        self.supervisor.start(Spec(name=name, command=command, tier=SERVER_TIER))

    def restart_server(self, role: Role) -> None:
        self.supervisor.retire(f"redis-{role}", patience_s=10.0)
        self.start_server(role)

    def replace_server(self, role: Role) -> None:
        """As deploy/README.md has it: another server with its data takes over the address."""
        old, new = self._ports[role], free_ports(1)[0]
        self._start_server(f"redis-{role}-new", role, new)
        self.supervisor.wait_for("new server", lambda: bool(self._ask_server(new, "PING")), limit_s=WAIT_S)
        self._ask_server(new, "REPLICAOF", self._host(CONTROL).address, str(old))

        def follows() -> bool:
            return (self._ask_server(new, "INFO", "replication") or {}).get("master_link_status") == "up"

        self.supervisor.wait_for("data of the old server", follows, limit_s=WAIT_S)
        self.supervisor.retire(f"redis-{role}", patience_s=10.0)
        for words in (("REPLICAOF", "NO", "ONE"), ("CONFIG", "SET", "port", str(old))):
            if self._ask_server(new, *words) is None:
                raise DayFailed(f"new server refuses {' '.join(words)}", role=role)

    def _ask_server(self, port: int, *words: str) -> Any:
        """What the server at that port replies; None when it does not."""
        host = self._host(CONTROL)
        command = python("adaptersync_tools.day.ask_redis", f"redis://{host.address}:{port}/0", *words)
        done = subprocess.run(  # noqa: S603
            host.command(*command),
            capture_output=True,
            timeout=COMMAND_S,
            check=False,
            env={**os.environ, "PYTHONPATH": OURS},
        )
        return orjson.loads(done.stdout) if done.returncode == 0 else None

    def adaptersync(self, *arguments: str, on: str = TRAINER, check: bool = True) -> subprocess.CompletedProcess[str]:
        """The command line, as an operator of that host uses it; DayFailed when it fails."""
        host = self._host(on)
        file = self._root(host) / "etc/adaptersync" / SETTINGS
        done = subprocess.run(  # noqa: S603
            host.command(*python(CLI, *arguments)),
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
            env=_environment(file),
        )
        if check and done.returncode:
            raise DayFailed(f"adaptersync {' '.join(arguments)}: {(done.stderr or done.stdout).strip()[:500]}")
        return done

    def json(self, *arguments: str, on: str = TRAINER) -> Any:
        return orjson.loads(self.adaptersync(*arguments, "--json", on=on).stdout)

    def status(self) -> dict[str, Any]:
        """Whether or not it is healthy."""
        done = self.adaptersync("status", "--json", check=False)
        found: dict[str, Any] = orjson.loads(done.stdout) if done.stdout else {"healthy": False, "problems": []}
        return found

    def wait(self, what: str, ready: Callable[[dict[str, Any]], bool], *, limit_s: float = WAIT_S) -> float:
        """Until status is as it should be; returns the seconds that took."""
        began = time.monotonic()
        while not ready(status := self.status()):
            self.supervisor.check()
            if time.monotonic() - began > limit_s:
                raise DayFailed(f"not in time: {what}: {'; '.join(status['problems'])}", limit_s=limit_s)
            time.sleep(LOOK_S)
        return time.monotonic() - began

    def scale(self, host: str, count: int) -> list[list[str]]:
        """As an operator does who may run units on that host; returns what was run there."""
        name = self._host(host).name
        others = ("--routers", "2", "--workers", "1") if self.site.loopback else ("--routers", "0", "--workers", "0")
        answer = self.json("scale", str(count), "--host", name, *others, "--ask-only")
        commands: list[list[str]] = answer["commands"]
        for _, act, _, *units in commands:
            if act == "enable":
                self.at(host).start(*units)
            else:
                for unit in units:
                    self.at(host).stop(unit)
        return commands

    def ask(self, told: Path, clients: int) -> Service:
        command = python(
            "adaptersync_tools.day.traffic",
            *("--run", RUN, "--told", str(told), "--clients", str(clients)),
            *self.routers,
        )
        spec = Spec(
            name="clients",
            command=tuple(self._host(TRAINER).command(*command)),
            environment={"PYTHONPATH": OURS},
            tier=CLIENT_TIER,
            restart=False,
        )
        return self.supervisor.start(spec)

    def _settings(self, host: Host, model: Path) -> dict[str, Any]:
        at = self._host(CONTROL).address
        network = {} if self.site.loopback else {"engine.host": host.address, "engine.peers": ["10.0.0.0/8"]}
        return {
            **DAY,
            "engine.model": str(model),
            "engine.port": self._engine_port,
            "engine.events_port": self._engine_port + 100,
            "engine.replay_port": self._engine_port + 200,
            "engine.public_host": host.address,
            "engine.run_path": str(self.site.run / host.name),
            "redis.control_url": f"redis://{at}:{self._ports[Role.CONTROL]}/0",
            "redis.cache_url": f"redis://{at}:{self._ports[Role.CACHE]}/0",
            "store.path": str(self.directory / "store"),
            "agent.stage_path": str(self.directory / "staged" / host.name),
            "router.spool_path": str(self.directory / "spool" / host.name),
            "router.host": host.address,
            "router.port": self._router_port,
            **network,
        }

    def _host(self, name: str) -> Host:
        return self.site.hosts[name]

    def _root(self, host: Host) -> Path:
        return self.directory / "hosts" / host.name


def _environment(file: Path) -> dict[str, str]:
    """Nothing of the caller's own fleet."""
    theirs = {name: value for name, value in os.environ.items() if not name.startswith("ADAPTERSYNC_")}
    return theirs | {"ADAPTERSYNC_CONFIG": str(file), "PYTHONPATH": OURS}


def _block() -> int:
    """A port with some hundreds free behind it, as likely as not: instances count from it."""
    return 20_000 + free_ports(1)[0] % 20_000
