"""Several processes that are one router: one port, each its own connections, its own ledger and its own report.

They are forked before anything runs, so that they share memory in which each leaves its figures; whoever dies is
replaced, and what it had counted is counted on. So is whoever is frozen, to whom the kernel would go on giving its part
of the connections. All that they decide together, they decide in Redis, as routers on other hosts do. With one worker
there is one process. Two routers do not share a port, be they of one group or not: clients would get now this one, now
that one.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import mmap
import os
import signal
import socket
import struct
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import uvloop
from msgspec import Struct

from adaptersync_core.errors import AdapterSyncError, ConfigError
from adaptersync_core.notify import Notifier

SHARE_BYTES = (
    8 << 20
)  # of figures of one worker: a thousand replicas need less than half; what is not touched costs nothing
SLOTS = 2  # of a share, written in turn: who is killed while it writes leaves what it had left before
PUT_S = 1.0  # between two times a worker leaves its figures
AGAIN_S = 0.5  # before one that died is replaced
BEAT_S = 1.0  # between two signs of life of a worker, and between two looks for them
MISSED = 5  # looks in a row that find no new one: it is frozen, or its loop is held up for as long
DEATHS = 5  # within DYING_S end the router: whoever started it shall know
DYING_S = 60.0  # a worker that cannot begin may take ten seconds to find out

GARBAGE = 50_000  # objects more than before, when the collector looks

_HEAD = struct.Struct("=QII")  # which one this is, length, checksum
_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGALRM)

log = logging.getLogger(__name__)


class Shares:
    """What each worker has left for the others, in memory of them all. A share is its writer's alone."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._memory = mmap.mmap(-1, workers * SLOTS * SHARE_BYTES)
        self._beats = memoryview(mmap.mmap(-1, workers * 8)).cast("Q")
        self._serving = memoryview(mmap.mmap(-1, workers))
        self._complained = False

    def put(self, worker: int, data: bytes) -> None:
        """What is too long leaves nothing: old figures would be taken for those of now."""
        if len(data) > SHARE_BYTES - _HEAD.size:
            if not self._complained:
                log.warning("figures of worker %d are too many to be shared: %d bytes", worker, len(data))
            self._complained = True
            data = b""
        number = self._latest(worker)[0] + 1
        start = (worker * SLOTS + number % SLOTS) * SHARE_BYTES
        self._memory[start + _HEAD.size : start + _HEAD.size + len(data)] = data
        self._memory[start : start + _HEAD.size] = _HEAD.pack(number, len(data), _checksum(number, data))

    def get(self, worker: int) -> bytes:
        """The last that was written whole; nothing before the first time."""
        return self._latest(worker)[1]

    def _latest(self, worker: int) -> tuple[int, bytes]:
        found = (0, b"")
        for slot in range(worker * SLOTS, (worker + 1) * SLOTS):
            start = slot * SHARE_BYTES
            number, length, checksum = _HEAD.unpack_from(self._memory, start)
            data = self._memory[start + _HEAD.size : start + _HEAD.size + min(length, SHARE_BYTES - _HEAD.size)]
            if number > found[0] and _checksum(number, data) == checksum:
                found = number, data
        return found

    def beat(self, worker: int) -> None:
        """It is alive."""
        self._beats[worker] += 1

    def beats(self, worker: int) -> int:
        return self._beats[worker]

    def serves(self, worker: int, *, now: bool = True) -> None:
        """It serves; until it is started again in another process."""
        self._serving[worker] = now

    @property
    def all_serve(self) -> bool:
        return all(self._serving)

    def others(self, worker: int) -> list[bytes]:
        found = (self.get(other) for other in range(self.workers) if other != worker)
        return [data for data in found if data]


def _checksum(number: int, data: bytes) -> int:
    return zlib.crc32(data, number & 0xFFFFFFFF)


Work = Callable[[Shares, int], Coroutine[Any, Any, None]]


def run(work: Work, workers: int, parents: Sequence[socket.socket] = (), notifier: Notifier | None = None) -> None:
    """Run `work` in so many processes until SIGTERM or SIGINT, or until too many have died: SystemExit.

    `notifier` is for their parent, who alone may speak for several; the one worker of a router has it to itself.

    `parents` are sockets that several workers do not keep: what they hold is free again when their parent has died.
    """
    shares = Shares(workers)
    # what is there by now stays, so forks share it, and the collector has nothing to find in it; requests make many
    # objects and no circles, and looking for some after each 700 took a tenth of the router's time
    gc.freeze()
    gc.set_threshold(GARBAGE, 50, 100)
    if workers == 1:
        uvloop.run(work(shares, 0))
    else:
        _Workers(work, shares, parents, notifier or Notifier()).run()


class _Running(Struct):
    """One worker's process: how often it had been alive at the last look, and how many looks ago that changed."""

    worker: int
    beats: int
    missed: int = 0


class _Workers:
    """The parent: it does nothing but to start, to look and to wait."""

    def __init__(self, work: Work, shares: Shares, parents: Sequence[socket.socket], notifier: Notifier) -> None:
        self._work = work
        self._shares = shares
        self._parents = parents
        self._notifier = notifier
        self._running: dict[int, _Running] = {}  # by process id
        self._deaths: deque[float] = deque(maxlen=DEATHS)
        self._stopping = False
        self._failed = False

    def run(self) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # whoever started us may ignore it, and then nobody could wait
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        for worker in range(self._shares.workers):
            self._start(worker)
        signal.setitimer(signal.ITIMER_REAL, BEAT_S, BEAT_S)
        while self._running:
            self._wait()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # one that came meanwhile would end us by its name
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        if self._failed:
            raise SystemExit(1)

    def _wait(self) -> None:
        came = signal.sigwait(_SIGNALS)
        if came == signal.SIGALRM:
            self._look()
            return
        if came != signal.SIGCHLD:
            self._stop()
            return
        while self._running:
            process, status = os.waitpid(-1, os.WNOHANG)
            if not process:
                return
            gone = self._running.pop(process, None)
            if gone is not None and not self._stopping:
                self._died(gone.worker, process, os.waitstatus_to_exitcode(status))

    def _look(self) -> None:
        """Looks are counted, not seconds: while all of us are frozen, nobody misses anything."""
        for process, it in self._running.items():
            beats = self._shares.beats(it.worker)
            it.missed = it.missed + 1 if beats == it.beats else 0
            it.beats = beats
            if it.missed >= MISSED:
                log.error("worker %d (process %d) shows no sign of life: it is killed", it.worker, process)
                os.kill(process, signal.SIGKILL)  # nobody has waited for it: it is still that process
                it.missed = 0
        if self._shares.all_serve:
            self._notifier.ready()
        self._notifier.alive()

    def _died(self, worker: int, process: int, code: int) -> None:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        now = time.monotonic()
        self._deaths.append(now)
        if len(self._deaths) == DEATHS and now - self._deaths[0] < DYING_S:
            log.error("worker %d (process %d) ended: %s; that is too often, stopping", worker, process, how)
            self._failed = True
            self._stop()
            return
        log.warning("worker %d (process %d) ended: %s; another takes its place", worker, process, how)
        time.sleep(AGAIN_S)  # signals wait meanwhile
        self._start(worker)

    def _stop(self) -> None:
        self._stopping = True
        self._notifier.stopping()
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM)

    def _start(self, worker: int) -> None:
        self._shares.serves(worker, now=False)
        parent = os.getpid()
        process = os.fork()
        if process:
            self._running[process] = _Running(worker, self._shares.beats(worker))
        else:
            self._become(worker, parent)

    def _become(self, worker: int, parent: int) -> NoReturn:
        """In the child, which never returns into what its parent was doing."""
        code = 1
        try:
            if sys.platform == "linux":
                # whoever loses its parent ends as if it had been asked to
                ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            for held in self._parents:
                held.close()
            if os.getppid() == parent:
                uvloop.run(self._live(worker))
            code = 0
        except AdapterSyncError as error:
            log.error("%s", error)
        except asyncio.CancelledError:
            pass
        except BaseException:
            log.exception("worker %d ended", worker)
        finally:
            logging.shutdown()
            os._exit(code)

    async def _live(self, worker: int) -> None:
        beating = asyncio.create_task(self._beat(worker))
        try:
            await self._work(self._shares, worker)
        finally:
            beating.cancel()

    async def _beat(self, worker: int) -> None:
        while True:
            self._shares.beat(worker)
            await asyncio.sleep(BEAT_S)


class Reserved(NamedTuple):
    """A port that workers can share; it is theirs alone while `held` are open."""

    port: int
    held: tuple[socket.socket, ...]


@contextlib.contextmanager
def reserved(host: str, port: int) -> Iterator[Reserved]:
    """The port given, or, for 0, one that is free. ConfigError when somebody has it, or another router wants it."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        held = socket.socket(family, kind)
    except OSError as error:
        raise ConfigError(f"cannot listen: {error.strerror}", key="router.host", value=host) from error
    with held, socket.socket(socket.AF_UNIX) as claim:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind(address)  # not yet to be shared: whoever listens there refuses it
        except OSError as error:
            raise ConfigError(f"cannot listen: {error.strerror}", key="router.port", value=port) from error
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        where, port = held.getsockname()[:2]
        if sys.platform == "linux":  # a router that has begun may not listen yet; a name without a file ends with it
            try:
                claim.bind(f"\0adaptersync-router {where} {port}")
            except OSError as error:
                raise ConfigError(
                    "cannot listen: another router of this host has the port, or has not ended yet",
                    next_step="give each a port of its own; processes that share one are router.workers",
                    key="router.port",
                    value=port,
                ) from error
        yield Reserved(port, (held, claim))
