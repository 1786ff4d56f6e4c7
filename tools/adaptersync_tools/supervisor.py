"""Processes on this machine, kept running and stopped in order.

Knows commands, logs, restarts and deadlines; knows nothing of what the commands do. Each one runs below a keeper
(`adaptersync_tools.child`) in a session of its own: Ctrl-C in a terminal reaches only us, and if we vanish, the keepers
end what they keep. A service that ends by itself is started again after a pause that doubles, a bounded number of
times; then it is given up, and `Supervisor.check` says so.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from msgspec import Struct

from adaptersync_core.errors import AdapterSyncError

GRACE_S = 10.0  # what a service gets between SIGTERM and SIGKILL
KEEPER_S = 8.0  # what its keeper gets on top to reap what is left
RESTARTS = 5  # in a row; a service that stayed up for CALM_S begins anew
CALM_S = 60.0
FIRST_PAUSE_S = 0.5
WATCH_S = 0.1
_LAST_WORDS = 3

log = logging.getLogger(__name__)


class StackFailed(AdapterSyncError):
    code = "stack-failed"


class Spec(Struct, frozen=True, kw_only=True):
    """One service. Higher tiers stop first, one tier at a time. What has `restart=False` may end, if with status 0.
    `nice` is how far it gives way to the others, as nice(1) counts: a supervisor's matter, elsewhere the unit's."""

    name: str
    command: tuple[str, ...]
    tier: int
    environment: dict[str, str] = {}
    restart: bool = True
    grace_s: float = GRACE_S
    nice: int = 0


class Service:
    """One supervised command; `restarts` counts all of them."""

    def __init__(self, spec: Spec, log_path: Path, inherited: tuple[int, ...] = ()) -> None:
        self.spec = spec
        self.log_path = log_path
        self._inherited = inherited
        self.restarts = 0
        self.given_up = False
        self.held = False  # it is somebody else's to start it again
        self._in_a_row = 0
        self._started_at = 0.0
        self._due_at: float | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The keeper's process id, which is also its session's."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def returncode(self) -> int | None:
        """The command's exit status once it ended, 128 + n for signal n."""
        return self._process.poll() if self._process is not None else None

    def start(self) -> None:
        self._let_go()
        keeper = [sys.executable, "-m", "adaptersync_tools.child", str(self.spec.grace_s), str(self.spec.nice)]
        with self.log_path.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603 (commands are made by us)
                [*keeper, *self.spec.command],
                stdin=subprocess.PIPE,  # the lifeline: it ends with us
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.spec.environment},
                start_new_session=True,
                pass_fds=self._inherited,
            )
        self._started_at = time.monotonic()
        self._due_at = None

    def watch(self, now: float) -> None:
        """Start it again when it ended, in time."""
        if self._process is None or self._process.poll() is None or self.given_up or self.held:
            return
        if self._due_at is None:
            if not self.spec.restart and self.returncode == 0:
                return
            self._in_a_row = 0 if now - self._started_at > CALM_S else self._in_a_row + 1
            if not self.spec.restart or self._in_a_row > RESTARTS:
                self.given_up = True
                log.error("%s ended with %s and is given up; see %s", *self._ended())
                return
            self._due_at = now + FIRST_PAUSE_S * 2 ** max(self._in_a_row - 1, 0)
            log.warning("%s ended with %s and will be started again; see %s", *self._ended())
        elif now >= self._due_at:
            self.restarts += 1
            self.start()

    def terminate(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def signal(self, number: int) -> bool:
        """Send a signal to the command itself, not to its keeper; False when it does not run.

        For those who break things on purpose: an end that was ordered is no reason to give the service up.
        """
        with contextlib.suppress(OSError, ValueError):
            child = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()[:1]
            if child:
                self._in_a_row = 0
                os.kill(int(child[0]), number)
                return True
        return False

    def wait(self, limit_s: float) -> None:
        """Until it is gone; by force after `limit_s`."""
        if self._process is None:
            return
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._let_go()

    def _let_go(self) -> None:
        """Close our end of the lifeline."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def last_words(self) -> str:
        lines = [line for line in self.log_path.read_text(errors="replace").splitlines()[-40:] if line.strip()]
        return " / ".join(line.strip()[:200] for line in lines[-_LAST_WORDS:]) or "it said nothing"

    def _ended(self) -> tuple[str, int | None, Path]:
        return self.spec.name, self.returncode, self.log_path


class Supervisor:
    """Starts services in order, watches them, stops them in reverse order. A context manager.

    `inherited` are descriptors that every keeper holds until it ends: a lock on them says that something still runs.
    """

    def __init__(self, logs: Path, inherited: tuple[int, ...] = ()) -> None:
        self.logs = logs
        self._inherited = inherited
        self.services: dict[str, Service] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="supervisor", daemon=True)

    def __enter__(self) -> Self:
        self.logs.mkdir(parents=True, exist_ok=True)
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, spec: Spec) -> Service:
        service = Service(spec, self.logs / f"{spec.name}.log", self._inherited)
        with self._lock:
            self.services[spec.name] = service
            service.start()
        return service

    @contextlib.contextmanager
    def away(self, name: str, number: int = signal.SIGKILL) -> Iterator[None]:
        """End a service by a signal, at once if not said otherwise, and start it again when the context ends."""
        service = self.services[name]
        with self._lock:
            service.held = True
        try:
            service.signal(number)
            service.wait(service.spec.grace_s + KEEPER_S)
            yield
        finally:
            with self._lock:
                service.held = False
                if not self._stopping.is_set():
                    service.restarts += 1
                    service.start()

    def retire(self, name: str, *, patience_s: float) -> None:
        """Ask a service to end, let it finish what it has in hand, then end it, and forget it."""
        service = self.services[name]
        with self._lock:
            service.held = True
        service.signal(signal.SIGTERM)
        deadline = time.monotonic() + patience_s
        while service.pid is not None and time.monotonic() < deadline:
            time.sleep(WATCH_S)
        service.terminate()
        service.wait(service.spec.grace_s + KEEPER_S)
        with self._lock:
            del self.services[name]

    def check(self) -> None:
        """StackFailed when a service was given up."""
        for service in self.services.values():
            if service.given_up:
                raise StackFailed(
                    f"{service.spec.name} does not stay up: {service.last_words()}",
                    next_step="read its log",
                    log=str(service.log_path),
                )

    def wait_for(self, what: str, ready: Callable[[], bool], *, limit_s: float, interval_s: float = 0.1) -> float:
        """Ask `ready` until it says yes; returns the seconds that took. StackFailed when late or when one fails."""
        began = time.monotonic()
        while not ready():
            waited_s = time.monotonic() - began
            self.check()
            if waited_s > limit_s:
                raise StackFailed(
                    f"{what}: not ready in time",
                    next_step="read the logs",
                    waited_s=round(waited_s),
                    logs=str(self.logs),
                )
            time.sleep(interval_s)
        return time.monotonic() - began

    def stop(self) -> None:
        """Stop everything, last started first. A second interrupt while it runs does not wait for graces."""
        self._stopping.set()
        if self._watcher.is_alive():
            self._watcher.join()
        services = list(self.services.values())
        try:
            for tier in sorted({service.spec.tier for service in services}, reverse=True):
                _stop_together([service for service in services if service.spec.tier == tier])
        except BaseException:
            for service in services:
                service.terminate()
            for service in services:
                service.wait(0)
            raise

    def _watch(self) -> None:
        while not self._stopping.wait(WATCH_S):
            with self._lock:
                for service in self.services.values():
                    service.watch(time.monotonic())


def _stop_together(services: list[Service]) -> None:
    for service in services:
        service.terminate()
    for service in services:
        service.wait(service.spec.grace_s + KEEPER_S)


def python(module: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module, *arguments)
