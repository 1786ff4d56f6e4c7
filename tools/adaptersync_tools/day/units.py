"""Runs the services of a host as its rendered units say, where no systemd does: command, environment, READY, stop.

What a unit forbids its service is systemd's, and is tried elsewhere (`tests/acceptance/test_systemd.py`).
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from adaptersync_core.errors import AdapterSyncError
from adaptersync_tools.day.release import PACKAGES
from adaptersync_tools.day.site import Host
from adaptersync_tools.supervisor import Service, Spec, Supervisor
from adaptersync_tools.systemd.units import UNITS

READY_S = 60.0
STOP_S = 90.0  # a worker's unit gives it ten minutes for the job in hand; here none takes that long
SERVER_TIER, ENGINE_TIER, SERVICE_TIER, FRONT_TIER, CLIENT_TIER = range(5)  # higher stops first
TIERS = {"replica": ENGINE_TIER, "router": FRONT_TIER}
ISOLATED = "-I"  # of an installation; here the packages are wherever we have ours
OURS = os.pathsep.join(dict.fromkeys(str(package.parent) for package in PACKAGES.values()))


class UnitFailed(AdapterSyncError):
    code = "unit-failed"


class Unit:
    """One service of a host, from its unit's file."""

    def __init__(self, name: str, text: str) -> None:
        head, _, rest = name.removesuffix(".service").partition("@")
        self.name = name
        self.kind = head.removeprefix("adaptersync-")
        self._number = rest
        self._text = text

    def values(self, key: str) -> list[str]:
        return re.findall(rf"^{key}=(.*)$", self._text, re.MULTILINE)

    def command(self, host: Host, credentials: Path) -> list[str]:
        (line,) = self.values("ExecStart")
        words = shlex.split(line.replace("${CREDENTIALS_DIRECTORY}", str(credentials)))
        return [self._told(word, host) for word in words if word != ISOLATED]

    def environment(self, host: Host, cache: Path) -> dict[str, str]:
        words = [word for line in self.values("Environment") for word in shlex.split(line.replace("%C", str(cache)))]
        return dict(self._told(word, host).split("=", 1) for word in words)

    def runtime_directories(self) -> list[Path]:
        return [Path("/run") / place.replace("%i", self._number) for place in self.values("RuntimeDirectory")]

    def requires(self) -> list[str]:
        return [name.replace("%i", self._number) for name in self.values("Requires")]

    @property
    def stop_s(self) -> float:
        return min(STOP_S, float(self.values("TimeoutStopSec")[0].removesuffix("s")))

    def _told(self, word: str, host: Host) -> str:
        told = {"%i": self._number, "%l": host.name, "%N": self.name.removesuffix(".service"), "%%": "%"}
        return re.sub("%[ilN%]", lambda match: told[match[0]], word)


class Units:
    """Services of one host, kept by a supervisor as systemd would: what ends by itself is started again."""

    def __init__(self, host: Host, root: Path, run: Path, supervisor: Supervisor) -> None:
        self._host = host
        self._root = root
        self._run = run  # the path of a socket must be short
        self._supervisor = supervisor
        self._started: list[str] = []
        self._releases: dict[str, str] = {}  # where packages are of those that were upgraded
        self._ended: Counter[str] = Counter()  # by themselves, of services that were stopped since

    @property
    def running(self) -> list[str]:
        return list(self._started)

    @property
    def restarts(self) -> dict[str, int]:
        """How often services ended by themselves."""
        return dict(self._ended + Counter({name: self._service(name).restarts for name in self._started}))

    def start(self, *names: str) -> None:
        """Start units and what each requires, at once, until each has said that it is READY. UnitFailed when late.

        A service that is started again by itself says READY to nobody.
        """
        with contextlib.ExitStack() as bells:
            # an agent waits for its engine by itself: what is required needs not be READY before
            for ready in [ready for name in names for ready in self._begin(name, bells)]:
                ready()

    def _begin(self, name: str, bells: contextlib.ExitStack) -> Iterator[Callable[[], None]]:
        if name in self._started:
            return
        unit = self._unit(name)
        for other in unit.requires():
            yield from self._begin(other, bells)
        for directory in unit.runtime_directories():
            directory.mkdir(parents=True, exist_ok=True)
        bell = self._run / f"{name.removesuffix('.service')}.notify"
        bell.parent.mkdir(parents=True, exist_ok=True)
        bell.unlink(missing_ok=True)
        spec = Spec(
            name=self._named(name),
            command=tuple(self._host.command(*unit.command(self._host, self._root / "etc/adaptersync"))),
            tier=TIERS.get(unit.kind, SERVICE_TIER),
            environment=unit.environment(self._host, self._root / "cache")
            | {"NOTIFY_SOCKET": str(bell), "PYTHONPATH": self._releases.get(name, OURS)},
            grace_s=unit.stop_s,
        )
        listener = bells.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        listener.bind(str(bell))
        service = self._supervisor.start(spec)
        self._started.append(name)
        yield partial(self._until_ready, service, listener)

    def stop(self, name: str) -> None:
        """Stop those that require it, then it. UnitFailed when it had to be ended by force."""
        for other in self.running:
            if name in self._unit(other).requires():
                self.stop(other)
        if name not in self._started:
            return
        self._started.remove(name)
        self._ended[name] += self._service(name).restarts
        began, limit_s = time.monotonic(), self._unit(name).stop_s
        self._supervisor.retire(self._named(name), patience_s=limit_s)
        if time.monotonic() - began >= limit_s:
            raise UnitFailed("service did not stop in its time", unit=name, host=self._host.name, limit_s=limit_s)

    def upgrade(self, name: str, release: str) -> float:
        """Restart it from there; what requires it comes back with it, as it was. Returns the seconds it took."""
        began = time.monotonic()
        self._releases[name] = release
        beside = [other for other in self.running if name in self._unit(other).requires()]
        self.stop(name)
        self.start(name, *beside)
        return time.monotonic() - began

    def _service(self, name: str) -> Service:
        return self._supervisor.services[self._named(name)]

    def _named(self, name: str) -> str:
        return f"{self._host.name}-{name.removesuffix('.service')}"

    def _unit(self, name: str) -> Unit:
        template = re.sub("@[^.]*", "@", name)
        return Unit(name, (self._root / UNITS / template).read_text())

    def _until_ready(self, service: Service, listener: socket.socket) -> None:
        deadline = time.monotonic() + READY_S
        listener.settimeout(0.1)
        while time.monotonic() < deadline and not service.given_up:
            with contextlib.suppress(TimeoutError):
                if b"READY=1" in listener.recv(4096).splitlines():
                    return
        raise UnitFailed(f"service is not ready: {service.last_words()[:400]}", service=service.spec.name)
