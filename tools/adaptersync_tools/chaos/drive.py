"""One run: a fleet, traffic, faults from a seed, and observers that share nothing with what they observe."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import orjson

from adaptersync_core.errors import ControlError
from adaptersync_core.events import from_fields
from adaptersync_core.identity import parse_adapter_id
from adaptersync_core.keys import Keys
from adaptersync_core.records import Request
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from adaptersync_core.table import Table
from adaptersync_tools.chaos.history import History, Rollout, Violation
from adaptersync_tools.chaos.plan import Fault, faults
from adaptersync_tools.chaos.probe import Probe
from adaptersync_tools.chaos.report import Report, Struck
from adaptersync_tools.chaos.traffic import Traffic
from adaptersync_tools.demo.synthetic import RANK, write_base_model
from adaptersync_tools.simulator.adapter_files import BaseModel, read_adapter
from adaptersync_tools.simulator.engine import Engine, EngineConfig
from adaptersync_tools.simulator.voice import speak
from adaptersync_tools.supervisor import Spec, python
from adaptersync_tools.up import CLIENT_TIER, Progress, Stack, StackSettings

RUNS = ("run-a", "run-b")
CLIENTS = 3
TABLE_AGE_S = 8.0  # how long a router may serve from a table it cannot read again
FIRST_S = 60.0  # from the start of the trainers to the first version of each run
STEP_S = 2.0  # how long a fault waits for its step of the protocol
LOOK_S = 0.2
CONVERGE_S = 90.0  # the stated bound, on a machine with two busy cores
JUDGE_AFTER_S = 1.0  # an answer is judged when events younger than it were read
PAGE = 1000
LEDGER_S = 30.0  # how long rows may take from a router's spool to the ledger
ROLLBACK_EVERY = 12  # faults between two rollbacks, so that versions are voided, too

SETTINGS: dict[str, Any] = {
    "coordinator.lease_s": 2.0,
    "coordinator.alive_s": 4.0,
    "coordinator.deadline_s": 15.0,
    "coordinator.drain_s": 30.0,
    "coordinator.eject_s": 1.0,
    "agent.heartbeat_s": 0.5,
    "agent.probe_timeout_s": 2.0,
    "agent.load_timeout_s": 10.0,
    "agent.visible_timeout_s": 5.0,
    "router.table_max_age_s": TABLE_AGE_S,
    "router.hold_s": 5.0,
    "router.request_timeout_s": 20.0,
    "router.connect_timeout_s": 2.0,
    "trainer.max_staleness": 2,
    "jobs.verify": False,
}


def run(*, seed: int, seconds: float, replicas: int, directory: Path, progress: Progress | None = None) -> Report:
    """Start, break, watch, stop; leaves no process behind."""
    model = write_base_model(directory / "model")
    settings = StackSettings(
        model=model,
        state_dir=directory / "fleet",
        replicas=replicas,
        simulated=True,
        coordinators=2,
        routers=2,
        engine={"max_loras": 10, "max_cpu_loras": 12},
        overrides=SETTINGS,
    )
    with Stack(settings, progress) as stack:
        for name in RUNS:
            stack.supervisor.start(
                Spec(
                    name=f"trainer-{name}",
                    command=python("adaptersync_tools.chaos.trainer", "--run", name),
                    environment={"ADAPTERSYNC_CONFIG": str(stack.config_path)},
                    tier=CLIENT_TIER,
                )
            )
        return asyncio.run(_Drive(stack, model, seed=seed, seconds=seconds).run())


class _Drive:
    def __init__(self, stack: Stack, model: Path, *, seed: int, seconds: float) -> None:
        self._stack = stack
        self._seed = seed
        self._seconds = seconds
        self._keys = Keys(stack.config.group.name)
        self._client = RedisClient(stack.config.redis.control_url, name="chaos")
        self._registry = Registry(self._client, self._keys)
        self._began = time.monotonic()
        self._engine = Engine(EngineConfig(root=str(model), base=BaseModel.from_directory(model)))
        self._history = History(late_s=TABLE_AGE_S + 1.0, speak=self._speak)
        self._violations: dict[tuple[str, str], Violation] = {}
        self._waiting: deque[Rollout] = deque()
        self._answers: Counter[str] = Counter()
        self._versions: Counter[str] = Counter()
        self._ids: set[str] = set()
        self._seen: Counter[str] = Counter()
        self._news = asyncio.Event()
        self._struck: list[Struck] = []
        self._ordered: Counter[str] = Counter()
        self._after = "0"

    async def run(self) -> Report:
        probe = Probe(self._registry, self._stack.engine_urls, self._found)
        traffic = Traffic(self._stack.router_urls, RUNS, seed=self._seed, take=self._take, pinned=self._pinned)
        converged: float | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [tasks.create_task(self._follow()), tasks.create_task(probe.run())]
                await self._first()
                self._began = time.monotonic()
                clients = tasks.create_task(traffic.run(CLIENTS))
                await self._break()
                converged = await self._converge()
                traffic.stop()
                await clients
                for task in background:
                    task.cancel()
            while await self._read():
                pass
            self._judge(until=float("inf"))
            rows = await self._rows()
        finally:
            await self._client.close()
        unrecorded = len(self._ids - rows)
        if unrecorded:
            self._found(Violation(kind="ledger", what=f"{unrecorded} answers have no row", at=time.time()))
        crashes = {
            name: ended
            for name, service in self._stack.supervisor.services.items()
            if (ended := service.restarts - self._ordered[name]) > 0
        }
        for name, count in crashes.items():
            last = self._stack.supervisor.services[name].last_words()
            self._found(Violation(kind="crash", what=f"{name} ended by itself, {count} times: {last}", at=time.time()))
        return Report(
            seed=self._seed,
            seconds=self._seconds,
            replicas=len(self._stack.engine_urls),
            faults=self._struck,
            answers=dict(self._answers),
            versions=dict(self._versions),
            probes=probe.checked,
            rows=len(rows),
            unrecorded=unrecorded,
            crashes=crashes,
            converged_s=converged,
            converge_bound_s=CONVERGE_S,
            violations=list(self._violations.values()),
        )

    def _found(self, violation: Violation) -> None:
        self._violations.setdefault((violation.kind, violation.what), violation)

    async def _first(self) -> None:
        """Wait for the first version of each run: before it there is nothing to ask for."""
        async with asyncio.timeout(FIRST_S):
            while not all(self._pinned(run) for run in RUNS):
                await self._anything()

    # faults

    async def _break(self) -> None:
        targets = sorted(self._stack.supervisor.services)
        deadline = time.monotonic() + self._seconds
        thawing: set[asyncio.Task[None]] = set()
        try:
            for fault in faults(self._seed, targets):
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return
                reached = await self._step(fault.after, min(STEP_S, left_s))
                await asyncio.sleep(fault.delay_s)
                self._struck.append(Struck(fault=fault, at_s=round(time.monotonic() - self._began, 3), reached=reached))
                if fault.kind == "freeze":
                    thawing.add(asyncio.create_task(self._freeze(fault)))
                elif self._stack.supervisor.services[fault.target].signal(signal.SIGKILL):
                    self._ordered[fault.target] += 1
                if fault.number % ROLLBACK_EVERY == 0:
                    await self._void()
                await asyncio.sleep(min(fault.pause_s, max(0.0, deadline - time.monotonic())))
        finally:
            for task in thawing:
                task.cancel()
            await asyncio.gather(*thawing, return_exceptions=True)

    async def _step(self, event: str, limit_s: float) -> str:
        """Wait for the next event of that kind; "" when none came in time."""
        before = self._seen[event]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s if event else 0):
                while self._seen[event] == before:
                    await self._anything()
                return event
        return ""

    async def _anything(self) -> None:
        """Wait for any event."""
        self._news.clear()
        await self._news.wait()

    async def _freeze(self, fault: Fault) -> None:
        service = self._stack.supervisor.services[fault.target]
        service.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(fault.lasts_s)
        finally:
            service.signal(signal.SIGCONT)

    async def _void(self) -> None:
        with contextlib.suppress(ControlError):
            await self._registry.request(Request(kind="rollback", run=RUNS[0], reason="chaos"))

    # what is watched

    def _take(self, rollout: Rollout) -> None:
        self._answers[str(rollout.status or "no answer")] += 1
        self._waiting.append(rollout)
        if rollout.status == 200:
            self._ids.add(rollout.request_id)

    def _pinned(self, run: str) -> Sequence[str]:
        """Versions a client may know of: the latest few that were promoted, some of which are gone by now."""
        mine = [name for name in self._history.promoted if name.startswith(f"{run}-v")]
        return mine[-4:]

    async def _follow(self) -> None:
        """Read the events in their order, and judge what was answered before the last reading began."""
        while True:
            began = time.time()
            with contextlib.suppress(ControlError):
                if not await self._read():
                    self._judge(until=began - JUDGE_AFTER_S)
            await asyncio.sleep(LOOK_S)

    async def _read(self) -> bool:
        """Take in what came since; False when nothing did."""
        entries = await self._client.read_stream(self._keys.events, self._after, count=PAGE)
        for entry_id, fields in entries:
            self._after = entry_id
            for violation in self._history.add(float(entry_id.partition("-")[0]), from_fields(fields)):
                self._found(violation)
            self._seen[fields["type"]] += 1
            if fields["type"].startswith(("version.", "adapter.")):
                self._versions[fields["type"].partition(".")[2]] += 1
        if entries:
            self._news.set()
        return bool(entries)

    def _judge(self, *, until: float) -> None:
        while self._waiting and self._waiting[0].got_at < until:
            for violation in self._history.judge(self._waiting.popleft()):
                self._found(violation)

    def _speak(self, version: str, prompt: Sequence[int], limit: int, seed: int) -> list[int]:
        """What the stored weights of a version say: the simulator's answers are a function of them."""
        return speak(self._voice(version), prompt, limit=limit, seed=seed, stop_probability=0.0).tokens

    @functools.lru_cache(maxsize=64)  # noqa: B019 - one object a run
    def _voice(self, version: str) -> Any:
        place = Path(self._stack.config.store.path) / parse_adapter_id(version).run / version
        return self._engine.voice(read_adapter(str(place), max_lora_rank=RANK, base=self._engine.config.base))

    async def _rows(self) -> set[str]:
        """The ledger, once every answer has its row or none comes any more."""
        rows: set[str] = set()
        for _ in range(int(LEDGER_S / LOOK_S)):
            rows = await self._ledger()
            if not self._ids - rows:
                break
            await asyncio.sleep(LOOK_S)
        return rows

    async def _ledger(self) -> set[str]:
        """Request ids of all rows; one may be written twice."""
        ids, after = set(), "0"
        while rows := await self._client.read_stream(self._keys.rollouts, after, count=PAGE):
            after = rows[-1][0]
            ids |= {fields["request_id"] for _, fields in rows}
        return ids

    # the end

    async def _converge(self) -> float | None:
        """Seconds from the last fault until all is well: everybody ready, and newer versions served by every router."""
        began, before = time.monotonic(), dict(self._history.promoted)
        trainers = [self._stack.supervisor.services[f"trainer-{run}"] for run in RUNS]
        why = ""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as session:
            while time.monotonic() - began < CONVERGE_S:
                why = await self._unwell(session, before)
                if not why:
                    for trainer in trainers:
                        trainer.spec = msgspec.structs.replace(trainer.spec, restart=False)
                        trainer.terminate()
                    converged = time.monotonic() - began
                    return converged if await self._at_rest(session, began) else None
                await asyncio.sleep(LOOK_S)
        self._found(Violation(kind="convergence", what=f"not within {CONVERGE_S:g} s: {why}", at=time.time()))
        return None

    async def _unwell(self, session: aiohttp.ClientSession, before: dict[str, float]) -> str:
        """What is not yet as it should be, or nothing."""
        given_up = [name for name, service in self._stack.supervisor.services.items() if service.given_up]
        if given_up:
            return f"given up: {', '.join(given_up)}"
        try:
            table = await self._registry.table()
        except ControlError as error:
            return str(error)
        missing = [f"{name}: {_said(table, name)}" for name in self._stack.engine_urls if name not in table.ready()]
        if missing:
            return f"not ready: {'; '.join(missing)}"
        for run in RUNS:
            current = table.runs[run].current if run in table.runs else None
            if current is None or current in before:
                return f"no newer version of {run} is current"
            for url in self._stack.router_urls:
                body = {"model": current, "prompt": [33], "max_tokens": 1}
                async with _answer(session, f"{url}/v1/completions", body) as status:
                    if status != 200 and (await self._registry.table()).routable(current):
                        return f"{url} answers {status} for {current}"
        return ""

    async def _at_rest(self, session: aiohttp.ClientSession, began: float) -> bool:
        """With nothing published any more, every engine comes to list what is served and nothing else."""
        why = ""
        while time.monotonic() - began < CONVERGE_S:
            why = ""
            with contextlib.suppress(ControlError):
                table = await self._registry.table()
                served = {name for name in table.versions if table.routable(name)}
                if set(table.versions) != served:
                    why = f"still on their way: {', '.join(sorted(set(table.versions) - served))}"
                for name, url in self._stack.engine_urls.items():
                    held = await _listed(session, url)
                    if held != served:
                        why = why or f"{name} lists {sorted(held or ())} instead of {sorted(served)}"
                if not why:
                    return True
            await asyncio.sleep(LOOK_S)
        self._found(Violation(kind="convergence", what=f"not at rest within {CONVERGE_S:g} s: {why}", at=time.time()))
        return False


def _said(table: Table, name: str) -> str:
    member = table.members.get(name)
    return f"{member.state}, {member.reason}" if member else "is no member"


@contextlib.asynccontextmanager
async def _answer(session: aiohttp.ClientSession, url: str, body: object) -> AsyncIterator[int]:
    try:
        async with session.post(url, json=body) as answer:
            await answer.read()
            yield answer.status
    except (aiohttp.ClientError, TimeoutError, OSError):
        yield 0


async def _listed(session: aiohttp.ClientSession, url: str) -> set[str] | None:
    """Adapters of ours that an engine's server lists."""
    try:
        async with session.get(f"{url}/v1/models") as answer:
            cards = orjson.loads(await answer.read())["data"]
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError):
        return None
    return {card["id"] for card in cards if card.get("parent") and not card["id"].startswith("canary")}
