"""Every file of ours below /etc for systemd, made from the settings. Pure: nothing is read, nothing is asked.

The coordinator is one a host, and so are the router and the worker unless more are asked for by number; agents and
engines are one an instance number, which is that of their GPU. Settings reach services as a credential, so that their
file may be root's alone; an engine gets what it needs of them in its unit, and no secret. Files of secrets belong to
the user of the role that reads them: some are read again whenever they change, which no credential is.
`adaptersync.target` starts and stops all.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from adaptersync_core.config import Config, CoordinatorSection, RouterSection, as_text, variable
from adaptersync_core.config_check import is_loopback
from adaptersync_core.errors import ConfigError
from adaptersync_core.queue import EXPORT_TIMEOUT_S, JOB_TIMEOUT_S
from adaptersync_core.store import ARCHIVE, JOURNAL
from adaptersync_tools.systemd import sandbox
from adaptersync_tools.systemd.form import Lines, mebibytes, own, path, seconds, unit, word
from adaptersync_tools.systemd.sandbox import ENGINE_USER, GROUP, ROLES, user

MARK = "# Written by adaptersync install --systemd; a change belongs in a drop-in: systemctl edit"
UNITS, USERS, FILES = "etc/systemd/system", "etc/sysusers.d", "etc/tmpfiles.d"
SETTINGS = "adaptersync.toml"  # the credential's name
STEPS_SINCE = 254  # the systemd that can make pauses between starts longer and longer
START_S = 60.0  # until the first sign of life; each of them gives as much again
STOP_S = 20.0
DRAIN_S = 75.0  # what a router takes at most to let requests end and write its rows
ENGINE_GRACE_S = 20.0  # beyond engine.drain_s
ENGINE_START_S = 120.0
NEVER_MENDED = "64 65 77 78"  # usage, data, fenced and settings: another start says the same
KEPT = {"coordinator": JOURNAL, "worker": ARCHIVE}  # in the store, by whom alone
WRITERS = tuple(KEPT)
HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")  # noqa: S108 - what units do not see
REDIS = "redis-server.service redis.service valkey-server.service valkey.service"
GIB = 1 << 30


class Host(Struct, frozen=True, kw_only=True):
    """What units must know beside the settings. `version` is systemd's.

    `real_python` is where the interpreter lies that `python` leads to, as that of a virtual environment does.
    """

    python: str
    real_python: str = ""
    settings: str = "/etc/adaptersync/adaptersync.toml"
    version: int = 252


def render(config: Config, host: Host) -> dict[str, str]:
    """Files by their place below the root."""
    made = _Units(config, host)
    files = {f"{UNITS}/{name}": text for name, text in made.units()}
    return files | {f"{USERS}/adaptersync.conf": made.users(), f"{FILES}/adaptersync.conf": made.directories()}


def worker_stop_s(config: Config) -> float:
    """The job in hand is finished first."""
    jobs, gate = config.jobs, config.coordinator
    longest_s = max(
        JOB_TIMEOUT_S,
        EXPORT_TIMEOUT_S if jobs.export_path or jobs.hub_namespace else 0.0,
        gate.gate_timeout_s if gate.gate_function else 0.0,
    )
    return longest_s + STOP_S


def engine_stop_s(config: Config) -> float:
    return config.engine.drain_s + ENGINE_GRACE_S


def longest_stop_s(config: Config) -> float:
    """What stopping one instance may take: an agent stops before its engine does."""
    return max(DRAIN_S, worker_stop_s(config), STOP_S + engine_stop_s(config))


def check_visible(config: Config, host: Host) -> None:
    """ConfigError when something that units need lies where they see nothing."""
    needed = {"--python": host.python, "store.path": config.store.path, "agent.stage_path": config.agent.stage_path}
    needed |= {"router.spool_path": config.router.spool_path, "engine.model": config.engine.model}
    needed |= {"jobs.export_path": config.jobs.export_path} if config.jobs.export_path else {}
    needed |= {"the interpreter itself": host.real_python}
    for key, place in needed.items():
        if any(Path(place).is_relative_to(hidden) for hidden in HIDDEN):
            raise ConfigError(
                "units of ours do not see homes and temporary directories",
                next_step="install it elsewhere, as /opt/adaptersync or /var/lib/adaptersync",
                key=key,
                path=place,
            )


class _Units:
    def __init__(self, config: Config, host: Host) -> None:
        self._config = config
        self._host = host
        self._python = path(host.python, "--python")
        self._settings = path(host.settings, "--settings")
        self._store = own(config.store.path, "store.path")
        self._stage = own(config.agent.stage_path, "agent.stage_path")
        self._spool = own(config.router.spool_path, "router.spool_path")
        self._run = path(config.engine.run_path, "engine.run_path")

    def units(self) -> Iterator[tuple[str, str]]:
        yield "adaptersync.target", self._target()
        yield "adaptersync-coordinator.service", self._coordinator()
        yield "adaptersync-router.service", self._router()
        yield "adaptersync-router@.service", self._router(" --number %i", "%i")
        yield "adaptersync-worker.service", self._worker()
        yield "adaptersync-worker@.service", self._worker(" --number %i", "%i")
        yield "adaptersync-agent@.service", self._agent()
        if self._config.engine.model:
            yield "adaptersync-replica@.service", self._replica()

    def users(self) -> str:
        """The services of a role are a user, who can read no other's files of secrets."""
        lines = (
            f"g {GROUP} -",
            *(f'u {user(role)} - "adaptersync {role}" /var/lib/adaptersync' for role in ROLES),
            f'u {ENGINE_USER} - "adaptersync engine" /var/cache/adaptersync',
            *(f"m {user(role)} {GROUP}" for role in WRITERS),
            f"m {ENGINE_USER} {user('agent')}",
        )
        return "\n".join((MARK, *lines)) + "\n"

    def directories(self) -> str:
        """The store takes files of trainers, who are in its group; engines, who read staged files, are in agents'.

        It is sticky: the journal and the ledger's archive are in it, and not for trainers to put others in their place.
        Nor to be there first: both are made here, each for the one who writes it.
        """
        agent, router = user("agent"), user("router")
        places = {
            "/var/lib/adaptersync": "0755 root root",
            self._store: f"3775 root {GROUP}",
            **{f"{self._store}/{name}": f"0755 {user(role)} {GROUP}" for role, name in KEPT.items()},
            self._stage: f"0750 {agent} {agent}",
            self._spool: f"0700 {router} {router}",
        }
        return "\n".join((MARK, *(f"d {place} {whose} -" for place, whose in places.items()))) + "\n"

    def _target(self) -> str:
        about = (("Description", "adaptersync: all services of this host"),)
        return unit(MARK, {"Unit": about, "Install": (("WantedBy", "multi-user.target"),)})

    def _coordinator(self) -> str:
        named = self._config.coordinator.name != CoordinatorSection().name
        figures, page = self._config.telemetry.metrics_host, self._config.page
        more = "" if named else " --name coordinator-%l"
        service = [
            *self._run_as("coordinator", more, watchdog_s=60.0 + 2 * self._config.coordinator.lease_s, stop_s=STOP_S),
            *self._of_redis((figures, self._config.coordinator.metrics_port), (page.host, page.port)),
            ("ReadWritePaths", self._store),
            ("UMask", "0027"),
            *_bounds(GIB, files=4096, tasks=64),
        ]
        return self._service("coordinator", service, needs=(self._store,))

    def _router(self, more: str = "", of: str = "") -> str:
        settings = self._config.router
        named = settings.name != RouterSection().name
        name = "" if named else " --name router-%l"
        memory = settings.workers * (settings.inflight_bytes + settings.arriving_bytes + GIB)
        service = [
            *self._run_as("router", name + more, watchdog_s=30.0, stop_s=DRAIN_S),
            ("ReadWritePaths", self._spool),
            ("InaccessiblePaths", f"-{self._store}"),
            ("UMask", "0077"),
            *_bounds(memory, files=max(65536, 2 * settings.connections + 1024), tasks=64 + 32 * settings.workers),
        ]
        after = "adaptersync-coordinator.service"
        return self._service("router", service, needs=(self._spool,), after=after, of=of)

    def _worker(self, more: str = "", of: str = "") -> str:
        jobs = self._config.jobs
        exports = (path(jobs.export_path, "jobs.export_path"),) if jobs.export_path else ()
        service = [
            *self._run_as("worker", more, watchdog_s=180.0, stop_s=worker_stop_s(self._config)),
            *(("ReadWritePaths", place) for place in (self._store, *exports)),
            ("UMask", "0027"),
            *_bounds(4 * GIB, files=4096, tasks=64),
        ]
        after = "adaptersync-coordinator.service"
        return self._service("worker", service, needs=(self._store, *exports), after=after, of=of)

    def _agent(self) -> str:
        settings = self._config.agent
        ours = bool(self._config.engine.model)
        directory = Path(self._run)
        if not directory.is_relative_to("/run") or directory == Path("/run"):
            raise ConfigError("setting must be a directory below /run", key="engine.run_path", value=self._run)
        service = [
            *self._run_as(
                "agent",
                " --number %i",
                watchdog_s=120.0 + 2 * settings.heartbeat_s + settings.probe_timeout_s,
                stop_s=STOP_S,
                zmq=True,
            ),
            *self._of_redis((self._config.telemetry.metrics_host, settings.metrics_port)),
            ("RuntimeDirectory", f"{directory.relative_to('/run')}/%i"),
            ("RuntimeDirectoryMode", "0750"),
            ("ReadOnlyPaths", self._store),
            ("ReadWritePaths", self._stage),
            ("UMask", "0027"),
            *_bounds(2 * GIB + 4 * self._config.redis.lane_bytes, files=4096, tasks=128),
        ]
        after = "adaptersync-coordinator.service"
        beside: list[tuple[str, str]] = []
        if ours:  # stopped with its engine, and before it
            beside = [("Requires", "adaptersync-replica@%i.service")]
            after = f"adaptersync-replica@%i.service {after}"
        return self._service(
            "agent", service, needs=(self._store, self._stage), after=after, more=beside, of="replica %i"
        )

    def _replica(self) -> str:
        engine = self._config.engine
        service = [
            *_lasting(ENGINE_START_S, engine_stop_s(self._config), watchdog_s=120.0),
            ("ExecStart", f"{self._python} -I -m adaptersync_tools.cli replica %i"),
            ("KillMode", "mixed"),  # the keeper lets requests end; whatever the engine started is ended after it
            *self._restart(first_s=5, most_s=120),
            *self._engine_environment(),
            *sandbox.engine(),
            *sandbox.network(*engine.peers),
            ("InaccessiblePaths", f"-{self._store}"),
            ("InaccessiblePaths", " ".join(f"-{place}" for place in self._secrets())),
            ("CacheDirectory", "adaptersync/%i"),
            ("UMask", "0077"),
            *_bounds("80%", files=65536, tasks=4096),
        ]
        # each start takes minutes of a GPU: what has failed so often wants somebody
        return self._service("replica", service, needs=(engine.model, self._stage), of="%i", starts=(5, 1800))

    def _engine_environment(self) -> Iterator[tuple[str, str]]:
        """What it needs of the settings, since it may not read their file: that has passwords."""
        values = msgspec.to_builtins(self._config.engine)
        defaults = msgspec.to_builtins(type(self._config.engine)())
        wanted = {f"engine.{key}": value for key, value in values.items() if value != defaults[key]}
        wanted |= {"group.base_model": self._config.group.base_model, "agent.stage_path": self._stage}
        for name, value in wanted.items():
            text = as_text(tuple(value) if isinstance(value, list) else value)
            yield "Environment", word(f"{variable(name)}={text}")
        yield "Environment", "CUDA_VISIBLE_DEVICES=%i"
        yield "Environment", "HOME=%C/adaptersync/%i XDG_CACHE_HOME=%C/adaptersync/%i"
        yield "EnvironmentFile", f"-{self._beside_settings}"

    def _secrets(self) -> Iterator[str]:
        """Where settings, and the files of secrets that they name, lie; what lies elsewhere is named by itself."""
        beside = str(Path(self._settings).parent)
        yield beside if beside != "/" else self._settings
        for section, values in msgspec.to_builtins(self._config).items():
            for key, value in values.items():
                secret = (key.endswith("_file") and key != "token_file") or key == "replica_keys_path"
                if secret and value and not Path(value).is_relative_to(beside):
                    yield path(value, f"{section}.{key}")

    @property
    def _beside_settings(self) -> str:
        return f"{Path(self._settings).parent}/%N.env"

    def _command(self, command: str) -> Iterator[tuple[str, str]]:
        yield "LoadCredential", f"{SETTINGS}:{self._settings}"
        yield "EnvironmentFile", f"-{self._beside_settings}"
        settings = f"--config ${{CREDENTIALS_DIRECTORY}}/{SETTINGS}"
        yield "ExecStart", f"{self._python} -I -m adaptersync_tools.cli {command} {settings}"

    def _run_as(
        self, role: str, more: str, *, watchdog_s: float, stop_s: float, zmq: bool = False
    ) -> Iterator[tuple[str, str]]:
        yield from _lasting(START_S, stop_s, watchdog_s=watchdog_s)
        yield from self._command(role + more)
        yield from self._restart(first_s=1, most_s=30)
        yield from sandbox.service(role, zmq=zmq, groups=(GROUP,) if role in WRITERS else ())

    def _restart(self, *, first_s: int, most_s: int) -> Iterator[tuple[str, str]]:
        """Again and again, slower and slower, but for what no start mends: Redis may be away for a night."""
        yield "Restart", "always"
        yield "RestartPreventExitStatus", NEVER_MENDED
        if self._host.version >= STEPS_SINCE:
            yield "RestartSec", seconds(first_s)
            yield "RestartSteps", "6"
            yield "RestartMaxDelaySec", seconds(most_s)
        else:
            yield "RestartSec", seconds(max(first_s, most_s // 3))

    def _of_redis(self, *listens: tuple[str, int]) -> Iterator[tuple[str, str]]:
        """Nobody but the loopback, Redis and the collector of traces, where those are known by address.

        Not where it `listens`, at (host, port), for others.
        """
        if any(port and not is_loopback(host) for host, port in listens):
            return
        redis, traces = self._config.redis, self._config.telemetry.traces_url
        hosts = sandbox.literal_hosts([url for url in (redis.control_url, redis.cache_url, traces) if url])
        if hosts is not None:
            yield from sandbox.network(*hosts)

    def _service(
        self,
        name: str,
        service: Lines,
        *,
        needs: tuple[str, ...],
        after: str = "",
        more: Lines = (),
        of: str = "",
        starts: tuple[int, int] = (10, 60),
    ) -> str:
        about = [
            ("Description", f"adaptersync {name} {of}".rstrip()),
            *_network_up(),
            *((("After", after),) if after else ()),
            *more,
            ("PartOf", "adaptersync.target"),
            ("RequiresMountsFor", " ".join(dict.fromkeys(needs))),
            ("StartLimitBurst", str(starts[0])),
            ("StartLimitIntervalSec", seconds(starts[1])),
        ]
        return unit(MARK, {"Unit": about, "Service": service, "Install": (("WantedBy", "adaptersync.target"),)})


def _network_up() -> Iterator[tuple[str, str]]:
    yield "Wants", "network-online.target"
    yield "After", f"network-online.target {REDIS}"


def _lasting(start_s: float, stop_s: float, *, watchdog_s: float) -> Iterator[tuple[str, str]]:
    yield "Type", "notify"
    yield "NotifyAccess", "main"
    yield "TimeoutStartSec", seconds(start_s)
    yield "TimeoutStopSec", seconds(stop_s)
    yield "WatchdogSec", seconds(watchdog_s)


def _bounds(memory: int | str, *, files: int, tasks: int) -> Iterator[tuple[str, str]]:
    yield "MemoryMax", memory if isinstance(memory, str) else mebibytes(memory)
    yield "LimitNOFILE", str(files)
    yield "TasksMax", str(tasks)
