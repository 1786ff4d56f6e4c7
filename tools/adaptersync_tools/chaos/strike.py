"""Carries faults out on the running fleet, and knows when each was over."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from adaptersync_core.errors import ControlError
from adaptersync_core.redis import RedisClient
from adaptersync_tools.chaos.plan import CONTROL, Fault
from adaptersync_tools.chaos.watch import Watch, insist
from adaptersync_tools.supervisor import Service
from adaptersync_tools.up import Stack

AWAY_S = 20.0  # how long a server may be away, by another fault, before it can be flushed or set back
DATA = "appendonlydir"


class Struck:
    """A fault as it happened. Times are monotonic; `ended` is None while it lasts, `done` says that it took effect.

    `recovered_s` counts from the end of the last of the faults that struck together.
    """

    def __init__(self, fault: Fault, at: float, reached: str) -> None:
        self.fault = fault
        self.at = at
        self.reached = reached
        self.ended: float | None = None
        self.done = False
        self.recovered_s: float | None = None


class Striker:
    """`ordered` counts the ends of services that were ordered here.

    `void` withdraws a version: what was voided after a copy was taken must not return with it.
    """

    def __init__(
        self, stack: Stack, watch: Watch, control: RedisClient, cache: RedisClient, void: Callable[[], Awaitable[None]]
    ) -> None:
        self._void = void
        self._stack = stack
        self._watch = watch
        self._control = control
        self._cache = cache
        self._lasting: set[asyncio.Task[None]] = set()
        self._setting_back = asyncio.Lock()
        self.ordered: Counter[str] = Counter()

    async def strike(self, struck: Struck) -> None:
        """Begin it; what lasts goes on in the background."""
        task = asyncio.create_task(self._carry_out(struck), name=f"fault {struck.fault.number}")
        if struck.fault.kind in ("freeze", "stall", "rewind"):
            self._lasting.add(task)
            task.add_done_callback(self._lasting.discard)
        else:
            await task

    async def over(self) -> None:
        """Wait for what lasts."""
        while self._lasting:
            await asyncio.gather(*self._lasting)

    async def stop(self) -> None:
        """End what lasts: nothing stays frozen."""
        for task in self._lasting:
            task.cancel()
        await asyncio.gather(*self._lasting, return_exceptions=True)

    async def _carry_out(self, struck: Struck) -> None:
        fault = struck.fault
        match fault.kind:
            case "kill":
                struck.done = self._service(fault).signal(signal.SIGKILL)
                if struck.done:
                    self.ordered[fault.target] += 1
            case "freeze" | "stall":
                struck.done = self._service(fault).signal(signal.SIGSTOP)
                try:
                    await asyncio.sleep(fault.lasts_s)
                finally:
                    self._service(fault).signal(signal.SIGCONT)
            case "flush" if fault.target == CONTROL:
                struck.done = await insist(self._watch.flush_control, AWAY_S)
            case "flush":
                struck.done = await insist(lambda: self._cache.command("FLUSHALL"), AWAY_S)
            case "rewind":
                async with self._setting_back:
                    struck.done = await self._set_back(fault)
        struck.ended = time.monotonic()

    def _service(self, fault: Fault) -> Service:
        return self._stack.supervisor.services[fault.target]

    async def _set_back(self, fault: Fault) -> bool:
        """Copy the server's files while it runs, and put them in place of its own some seconds later."""
        data, copy = self._stack.state_dir / fault.target / DATA, self._stack.state_dir / "copy"
        if not await insist(self._no_rewrite, AWAY_S):
            return False
        await asyncio.to_thread(_replace, copy, data)
        await self._void()
        await asyncio.sleep(fault.lasts_s)
        deadline = time.monotonic() + AWAY_S
        while time.monotonic() < deadline:
            with contextlib.suppress(ControlError):
                async with self._watch.before_it_is_set_back():
                    await asyncio.to_thread(self._exchange, fault.target, data, copy)
                return True
            await asyncio.sleep(0.2)
        return False

    async def _no_rewrite(self) -> None:
        """A copy that is taken while the server begins new files would be of two states."""
        await self._control.command("CONFIG", "SET", "auto-aof-rewrite-percentage", 0)

    def _exchange(self, target: str, data: Path, copy: Path) -> None:
        with self._stack.supervisor.away(target):
            _replace(data, copy)
        self.ordered[target] += 1


def _replace(target: Path, source: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
