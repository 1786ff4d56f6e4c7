"""Three trainers, each with a run of its own: ours, which submits; a TRL behind the relay; one whose files are watched.

Of TRL only the calls are here, and of the third only its files: what is measured are the processes that stand between
them and the fleet, the relay and the watch. All three publish evenly; the latter two half as often.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp

from adaptersync_core.headers import SUBSTITUTED, VERSION
from adaptersync_tools.demo.synthetic import write_adapter
from adaptersync_tools.demo.trl_calls import ScriptedTRL, TrainingDied
from adaptersync_tools.engines import HOST
from adaptersync_tools.soak.traffic import GROUP, PROMPT_TOKENS, REST_S, TOKENS, Asked, Traffic
from adaptersync_tools.supervisor import Service, StackFailed
from adaptersync_tools.up import Stack, answers, free_ports

RUN, RELAYED_RUN, WATCHED_RUN = "soak", "soak-relayed", "soak-watched"
RUNS = 3
BY_TRL = "by TRL"  # the kind of its requests
READY_S = 60.0
KEPT = 4  # of what a trainer has written, as TRL does with its staleness window
MARK = "DONE"


def total(versions: int) -> int:
    """How many versions all three publish when ours publishes so many."""
    return versions + (RUNS - 1) * others(versions)


def others(versions: int) -> int:
    return max(versions // 2, 1)


class Trainers:
    """Their processes, and what those that are no processes do. `trouble` is what ended one of them too early."""

    def __init__(
        self, stack: Stack, traffic: Traffic, *, versions: int, every_s: float, directory: Path, seed: int
    ) -> None:
        self._stack = stack
        self._traffic = traffic
        self._versions = versions
        self._every_s = every_s
        self._directory = directory
        self._base = stack.config.group.base_model
        self._rng = random.Random(f"{seed} trainers")  # noqa: S311 - prompts and weights
        self._names: list[str] = []  # TRL's, that it asks by
        self._between: list[Service] = []
        self._over = False
        self.trouble: list[str] = []

    def ours(self) -> Service:
        """Ends once everything is published."""
        options = ("--run", RUN, "--versions", str(self._versions), "--every", str(self._every_s), "--submit")
        return self._stack.run("trainer", "adaptersync_tools.demo.publishing", *options)

    async def run_others(self) -> None:
        """Start relay and watch, and publish through them all there is."""
        loads, writes = self._directory / "trl", self._directory / "watched"
        loads.mkdir(parents=True)
        writes.mkdir(parents=True)
        (port,) = free_ports(1)
        relay = ("relay", "--run", RELAYED_RUN, "--port", str(port), "--allowed-root", str(loads))
        watch = ("watch", str(writes), "--run", WATCHED_RUN, "--pattern", "step_{step}", "--complete", MARK, "--json")
        self._between = [
            self._stack.run(arguments[0], "adaptersync_tools.cli", *arguments) for arguments in (relay, watch)
        ]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._train_by_trl(f"http://{HOST}:{port}", loads))
            tasks.create_task(self._write(writes))

    async def stop(self) -> None:
        """End relay and watch; they are to have lived until now."""
        for service in self._between:
            if (ended := service.returncode) is not None:
                self.trouble.append(f"{service.spec.name} ended with {ended}: {service.last_words()}")
            service.terminate()
        for service in self._between:
            await asyncio.to_thread(service.wait, READY_S)

    async def _train_by_trl(self, url: str, directory: Path) -> None:
        trl = ScriptedTRL(url, max_staleness=self._stack.config.trainer.max_staleness)
        try:
            wait = self._stack.supervisor.wait_for
            await asyncio.to_thread(wait, "relay", lambda: answers(f"{url}/health"), limit_s=READY_S)
            await trl.construct()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._roll_out(trl))
                async for source in self._adapters(directory):
                    self._names.append(await trl.sync(source))
                self._over = True
        except* (TrainingDied, StackFailed, aiohttp.ClientError, TimeoutError, OSError) as died:
            self._over = True
            self.trouble += [f"TRL's training died: {error!r}" for error in _leaves(died)]

    async def _roll_out(self, trl: ScriptedTRL) -> None:
        """Groups by the latest two names, as those that are under way when TRL syncs."""
        while not self._over:
            if self._names:
                name = self._rng.choice(self._names[-2:])
                prompt = [self._rng.randrange(33, 127) for _ in range(PROMPT_TOKENS)]
                await asyncio.gather(*(ask(trl, self._traffic, name, prompt) for _ in range(GROUP)))
            await asyncio.sleep(REST_S)

    async def _write(self, directory: Path) -> None:
        async for source in self._adapters(directory):
            (source / MARK).touch()

    async def _adapters(self, directory: Path) -> AsyncIterator[Path]:
        """One after the other, evenly; what is too old is removed."""
        began, every_s = time.monotonic(), self._every_s * self._versions / others(self._versions)
        for number in range(1, others(self._versions) + 1):
            source = directory / f"step_{number}"
            await asyncio.to_thread(write_adapter, source, base=self._base, seed=self._rng.getrandbits(62))
            yield source
            with contextlib.suppress(FileNotFoundError):
                await asyncio.to_thread(shutil.rmtree, directory / f"step_{number - KEPT}")
            await asyncio.sleep(max(0.0, began + number * every_s - time.monotonic()))


async def ask(trl: ScriptedTRL, traffic: Traffic, name: str, prompt: list[int]) -> None:
    """One of TRL's rollouts; what another version answers has failed, since the fleet has room and time for all."""
    async with Asked(traffic, BY_TRL):
        status, headers, body = await trl.rollout(name, prompt, max_tokens=TOKENS)
        if status != 200:
            raise ValueError(f"{status} {str(body)[:200]}")
        served = headers.get(VERSION, "")
        if SUBSTITUTED in headers or not served.startswith(f"{RELAYED_RUN}-v"):
            raise ValueError(f"{served or 'nobody knows what'} answered for {name}")


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
