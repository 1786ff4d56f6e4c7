"""The day itself, step by step. Each step says what it found; clients ask throughout, and none may see an error.

A step that fails ends the day: what comes after would be judged on a fleet that is not as it should be.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
from msgspec import Struct

from adaptersync_core.errors import AdapterSyncError
from adaptersync_tools.day import site
from adaptersync_tools.day.fleet import CONTROL, FIRST, FRONT, HOSTS, RUN, SECOND, DayFailed, Fleet
from adaptersync_tools.day.release import next_release
from adaptersync_tools.day.site import Site
from adaptersync_tools.demo.synthetic import write_adapter
from adaptersync_tools.servers import Role
from adaptersync_tools.supervisor import Service
from adaptersync_tools.up import Progress

MORE = 20  # answers that clients must have got within a step, so that it was under traffic
TRAFFIC_S = 30.0
AUDIT_S = 60.0
WORKER = "adaptersync-worker.service"


class Step(Struct, kw_only=True):
    """`answered` and `failed` are of the clients, within the step; the first failed step ends the day."""

    name: str
    ok: bool = False
    seconds: float = 0.0
    detail: str = ""
    answered: int = 0
    failed: int = 0


class Report(Struct, kw_only=True):
    hosts: list[str]
    network: str
    steps: list[Step]
    errors: list[str]
    seconds: float = 0.0
    slowest_answer_s: float = 0.0
    versions: dict[str, int] = {}
    replicas: dict[str, int] = {}
    restarts: dict[str, int] = {}
    """Of services that ended by themselves: none should, but for a worker without Redis, which is told there."""

    @property
    def ok(self) -> bool:
        return bool(self.steps) and all(step.ok for step in self.steps) and not self.errors and not self.restarts


class Day:
    def __init__(self, directory: Path, *, loopback: bool, short: bool, clients: int, progress: Progress) -> None:
        why = site.objection()
        self._loopback = loopback or bool(why)
        self._short = short
        self._clients = clients
        self._progress = progress
        self._directory = directory
        self._told = directory / "clients.json"
        self._versions: list[str] = []
        self._pardoned = 0
        alone = f"the loopback, as one host: {'asked for' if loopback else why}"
        network = alone if self._loopback else "network namespaces on a bridge of their own"
        self.report = Report(
            hosts=["localhost"] if self._loopback else list(HOSTS), network=network, steps=[], errors=[]
        )

    def run(self) -> Report:
        """From nothing to nothing; the report is made whatever happens."""
        began = time.monotonic()
        place = Site(HOSTS, loopback=self._loopback)
        try:
            with place, Fleet(place, self._directory) as fleet:
                try:
                    self._steps(fleet)
                finally:
                    self._account(fleet)
        except DayFailed:
            pass  # its step says so
        finally:
            shutil.rmtree(place.run, ignore_errors=True)
        self.report.seconds = time.monotonic() - began
        return self.report

    def _steps(self, fleet: Fleet) -> None:
        self._step("install", lambda: self._install(fleet))
        self._step("start, and scale to 2", lambda: self._begin(fleet))
        self._step("publish", lambda: self._publish(fleet))
        clients = self._ask(fleet)
        for count in (4, 1, 2):
            self._step(f"scale to {count}", lambda count=count: self._scale(fleet, count), traffic=True)  # type: ignore[misc]
        self._step("restart Redis", lambda: self._restart_redis(fleet), traffic=True)
        self._step("replace Redis", lambda: self._replace_redis(fleet), traffic=True)
        self._step("upgrade one by one", lambda: self._upgrade(fleet), traffic=True)
        self._step("publish the next version", lambda: self._publish(fleet), traffic=True)
        self._step("roll back", lambda: self._roll_back(fleet), traffic=True)
        self._step("end of traffic", lambda: self._end(fleet, clients))
        self._step("audit verify", lambda: self._audit(fleet))

    def _install(self, fleet: Fleet) -> str:
        return f"{fleet.install()} files for {len(fleet.units)} hosts, rendered from settings"

    def _begin(self, fleet: Fleet) -> str:
        fleet.start()
        self._spread(fleet, 2)
        ready_s = fleet.wait("2 replicas are ready", lambda status: _ready(status) == 2 and status["healthy"])
        return f"every service READY; healthy {ready_s:.1f} s later"

    def _publish(self, fleet: Fleet) -> str:
        seed = len(self._versions)
        adapter = write_adapter(self._directory / f"adapter-{seed}", base="base", seed=seed)
        told = fleet.json("publish", str(adapter), "--run", RUN, "--step", str(seed))
        if told["state"] != "current":
            raise DayFailed(f"version is {told['state']}", version=told["version"])
        self._versions.append(told["version"])
        return f"{told['version']} is current"

    def _scale(self, fleet: Fleet, count: int) -> str:
        commands = self._spread(fleet, count)

        def as_asked(status: dict[str, Any]) -> bool:
            hosts = {host["host"]: host for host in status["hosts"] if host["desired"] is not None}
            there = all(host["ready"] == host["desired"] and not host["draining"] for host in hosts.values())
            return there and _ready(status) == count and bool(status["healthy"])

        fleet.wait(f"{count} replicas are ready, and none is draining", as_asked)
        return f"{len(commands)} commands on the hosts"

    def _spread(self, fleet: Fleet, count: int) -> list[list[str]]:
        """So many in all: on both hosts alike, where there are two; the first host keeps the last."""
        if self._loopback:
            return fleet.scale(FIRST, count)
        first, second = -(-count // 2), count // 2
        return [*fleet.scale(FIRST, first), *fleet.scale(SECOND, second)]

    def _restart_redis(self, fleet: Fleet) -> str:
        for role in Role:
            fleet.restart_server(role)
        return f"both servers; {self._recovered(fleet)}"

    def _replace_redis(self, fleet: Fleet) -> str:
        fleet.replace_server(Role.CONTROL)
        return f"its replica has the address; {self._recovered(fleet)}"

    def _recovered(self, fleet: Fleet) -> str:
        seconds = fleet.wait("healthy again", lambda status: bool(status["healthy"]))
        again = self._ended(fleet).pop(WORKER, 0) - self._pardoned
        self._pardoned += again
        more = "; the worker ended without it, as rq's do, and was started again" if again else ""
        return f"healthy {seconds:.1f} s later{more}"

    def _upgrade(self, fleet: Fleet) -> str:
        """To a release that stores more: those of both read each other's tables, reports and rows meanwhile."""
        release = next_release(self._directory / "next")
        done = []
        last = "1" if self._loopback else "0"
        plan = [(CONTROL, "coordinator"), (CONTROL, "worker"), (FIRST, "agent@0"), (FIRST, "replica@0")]
        plan += [(SECOND, f"agent@{last}"), (SECOND, f"replica@{last}"), (FRONT, "router"), (FRONT, "router@1")]
        if self._short:  # one of each kind
            plan = [plan[0], plan[1], plan[2], plan[5], plan[7]]
        for host, name in plan:
            seconds = fleet.at(host).upgrade(f"adaptersync-{name}.service", release)
            fleet.wait(
                f"healthy after {name} of {host} was upgraded",
                lambda status: bool(status["healthy"]) and _ready(status) == 2,
            )
            done.append(f"{name} {seconds:.1f} s")
        return ", ".join(done)

    def _roll_back(self, fleet: Fleet) -> str:
        good, bad = self._versions[-2:]
        before = self._counts()["versions"].get(good, 0)
        fleet.adaptersync("rollback", RUN, "--reason", "rehearsed by an operator")
        self._until("clients are answered by the version before", lambda told: told["versions"].get(good, 0) > before)
        return f"{bad} is voided, {good} serves"

    def _end(self, fleet: Fleet, clients: Service) -> str:
        fleet.supervisor.retire("clients", patience_s=TRAFFIC_S)
        told = self._counts()
        if clients.returncode:
            raise DayFailed(f"clients ended with {clients.returncode}: {clients.last_words()[:300]}")
        return f"{told['answered']} answers, {told['failed']} errors"

    def _audit(self, fleet: Fleet) -> str:
        """Once every answer has its row in the archive."""
        answered = self._counts()["answered"]
        deadline = time.monotonic() + AUDIT_S
        while True:
            fleet.adaptersync("audit", "drain", on=CONTROL)
            done = fleet.adaptersync("audit", "verify", RUN, "--json", on=CONTROL, check=False)
            silent: dict[str, Any] = {"lines": [done.stderr[:300]], "rollouts": 0}
            found = orjson.loads(done.stdout) if done.stdout else silent
            if done.returncode == 0 and found["rollouts"] >= answered:
                return f"{found['rollouts']} rollouts, {found['contradictions']} contradictions"
            if time.monotonic() > deadline:
                raise DayFailed(f"{found['rollouts']} rollouts of {answered}; {'; '.join(found['lines'][:3])}")
            time.sleep(1.0)

    def _ask(self, fleet: Fleet) -> Service:
        clients = fleet.ask(self._told, self._clients)
        fleet.supervisor.wait_for("clients are answered", self._told.exists, limit_s=TRAFFIC_S)
        self._until("clients are answered", lambda told: told["answered"] > 0)
        return clients

    def _counts(self) -> dict[str, Any]:
        if not self._told.exists():
            return {"answered": 0, "failed": 0, "errors": [], "versions": {}, "replicas": {}, "slowest_s": 0.0}
        counts: dict[str, Any] = orjson.loads(self._told.read_bytes())
        return counts

    def _until(self, what: str, true: Callable[[dict[str, Any]], bool]) -> None:
        deadline = time.monotonic() + TRAFFIC_S
        while not true(told := self._counts()):
            if time.monotonic() > deadline:
                raise DayFailed(f"not in time: {what}; {'; '.join(told['errors'][:2])}", limit_s=TRAFFIC_S)
            time.sleep(0.1)

    def _step(self, name: str, act: Callable[[], str], *, traffic: bool = False) -> None:
        step = Step(name=name)
        self.report.steps.append(step)
        self._progress.waiting(name)
        before, began = self._counts(), time.monotonic()
        with self._judged(step):
            step.detail = act()
            if traffic:
                self._until("clients go on being answered", lambda told: told["answered"] >= before["answered"] + MORE)
        told = self._counts()
        step.seconds = time.monotonic() - began
        step.answered, step.failed = told["answered"] - before["answered"], told["failed"] - before["failed"]
        step.ok = step.ok and not step.failed
        if not step.ok:
            raise DayFailed(step.detail)
        self._progress.done(f"{name}: {step.detail}", step.seconds)

    @contextlib.contextmanager
    def _judged(self, step: Step) -> Iterator[None]:
        try:
            yield
            step.ok = True
        except (AdapterSyncError, OSError, subprocess.SubprocessError, ValueError) as error:
            step.detail = f"{type(error).__name__}: {error}"

    def _account(self, fleet: Fleet) -> None:
        told = self._counts()
        self.report.errors, self.report.slowest_answer_s = told["errors"], told["slowest_s"]
        self.report.versions, self.report.replicas = told["versions"], told["replicas"]
        ended = self._ended(fleet)
        ended[WORKER] -= self._pardoned
        self.report.restarts = dict(+ended)

    @staticmethod
    def _ended(fleet: Fleet) -> Counter[str]:
        return Counter({name: count for units in fleet.units.values() for name, count in units.restarts.items()})


def _ready(status: dict[str, Any]) -> int:
    return sum(replica["state"] == "ready" for replica in status.get("replicas", []))
