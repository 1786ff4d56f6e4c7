"""One run: a fleet, traffic, faults from a seed, and observers that share nothing with what they observe."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from adaptersync_core.archive import require
from adaptersync_core.errors import ControlError, StoreError
from adaptersync_core.keys import Keys
from adaptersync_core.records import Request
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from adaptersync_core.rollouts import decode
from adaptersync_core.store import ArtifactStore, verify_files
from adaptersync_tools.calm import Calm
from adaptersync_tools.chaos.audit import audit
from adaptersync_tools.chaos.history import History, Rollout, Violation
from adaptersync_tools.chaos.names import Names
from adaptersync_tools.chaos.plan import faults
from adaptersync_tools.chaos.probe import Probe
from adaptersync_tools.chaos.report import Report, told
from adaptersync_tools.chaos.strike import Striker, Struck
from adaptersync_tools.chaos.traffic import Traffic
from adaptersync_tools.chaos.watch import Watch
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
CONVERGE_S = 90.0  # the stated bound after a fault: 65 s in which nothing drains after a loss, and time to act
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
    "jobs.ledger_s": 5.0,  # between two losses of Redis, too
    "jobs.ledger_kept_s": 86_400.0,  # every row is looked for at the end
}


def run(
    *, seed: int, seconds: float, replicas: int, slots: int, directory: Path, progress: Progress | None = None
) -> Report:
    """Start, break, watch, stop; leaves no process behind."""
    require()  # at the end of it
    model = write_base_model(directory / "model")
    settings = StackSettings(
        model=model,
        state_dir=directory / "fleet",
        replicas=replicas,
        simulated=True,
        coordinators=2,
        routers=2,
        engine={"max_loras": slots, "max_cpu_loras": slots},
        overrides=SETTINGS,
    )
    with Stack(settings, progress) as stack:
        for name in RUNS:
            stack.supervisor.start(
                Spec(
                    name=f"trainer-{name}",
                    command=python("adaptersync_tools.demo.publishing", "--run", name),
                    environment={"ADAPTERSYNC_CONFIG": str(stack.config_path)},
                    tier=CLIENT_TIER,
                )
            )
        return asyncio.run(_Drive(stack, model, seed=seed, seconds=seconds, slots=slots).run())


class _Drive:
    def __init__(self, stack: Stack, model: Path, *, seed: int, seconds: float, slots: int) -> None:
        self._stack = stack
        self._seed = seed
        self._seconds = seconds
        self._slots = slots
        self._keys = Keys(stack.config.group.name)
        self._client = RedisClient(stack.config.redis.control_url, name="chaos")
        self._cache = RedisClient(stack.config.redis.cache_url, name="chaos")
        self._registry = Registry(self._client, self._keys)
        self._store = ArtifactStore(Path(stack.config.store.path))
        self._began = time.monotonic()
        self._engine = Engine(EngineConfig(root=str(model), base=BaseModel.from_directory(model)))
        self._history = History(late_s=TABLE_AGE_S + 1.0, speak=self._speak)
        self._names = Names()
        self._watch = Watch(self._client, self._keys, self._history, self._names, self._found)
        self._striker = Striker(stack, self._watch, self._client, self._cache, self._void)
        self._calm = Calm(
            self._registry,
            services=stack.supervisor.services,
            engines=stack.engine_urls,
            routers=stack.router_urls,
            runs=RUNS,
        )
        self._violations: dict[tuple[str, str], Violation] = {}
        self._waiting: deque[Rollout] = deque()
        self._answers: Counter[str] = Counter()
        self._answered: dict[str, str] = {}  # version by request id
        self._struck: list[Struck] = []
        self._open: list[Struck] = []  # not recovered from

    async def run(self) -> Report:
        probe = Probe(
            self._registry,
            self._found,
            token_file=self._stack.token_file,
            newest=lambda: self._history.generation,
            voided=self._history.voided,
        )
        traffic = Traffic(self._stack.router_urls, RUNS, seed=self._seed, take=self._take, pinned=self._pinned)
        rest_s: float | None = None
        rows: dict[str, str] = {}
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [tasks.create_task(self._follow()), tasks.create_task(probe.run())]
                await self._first()
                self._began = time.monotonic()
                clients = tasks.create_task(traffic.run(CLIENTS))
                try:
                    if await self._break() and await self._recover():
                        rest_s = await self._rest()
                finally:
                    await self._striker.stop()
                traffic.stop()
                await clients
                for task in background:
                    task.cancel()
            while await self._watch.read():
                pass
            self._judge(until=float("inf"))
            rows = await self._rows()
        finally:
            await self._client.close()
            await self._cache.close()
        self._check_rows(rows)
        await asyncio.to_thread(self._check_store)
        audited = await audit(self._stack.config, RUNS, lambda what: self._broken("audit", what))
        crashes = self._crashes()
        unrecorded = len(self._answered.keys() - rows.keys())
        return Report(
            seed=self._seed,
            seconds=self._seconds,
            replicas=len(self._stack.engine_urls),
            slots=self._slots,
            began_at=time.time() - (time.monotonic() - self._began),
            faults=[told(struck, self._began) for struck in self._struck],
            answers=dict(self._answers),
            versions=dict(self._watch.versions),
            restored=self._watch.seen["control.restored"],
            probes=probe.checked,
            names=len(self._names),
            rows=len(rows),
            unrecorded=unrecorded,
            audited=audited,
            crashes=crashes,
            rest_s=rest_s,
            converge_bound_s=CONVERGE_S,
            violations=list(self._violations.values()),
        )

    def _found(self, violation: Violation) -> None:
        self._violations.setdefault((violation.kind, violation.what), violation)

    def _broken(self, kind: str, what: str) -> None:
        self._found(Violation(kind=kind, what=what, at=time.time()))

    async def _first(self) -> None:
        """Wait for the first version of each run: before it there is nothing to ask for."""
        async with asyncio.timeout(FIRST_S):
            while not all(self._pinned(run) for run in RUNS):
                await self._watch.anything()

    # faults

    async def _break(self) -> bool:
        """Strike until the time is over; False when the fleet did not recover in between."""
        deadline = time.monotonic() + self._seconds
        for fault in faults(self._seed, sorted(self._stack.supervisor.services)):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            reached = await self._watch.step(fault.after, min(STEP_S, left_s))
            await asyncio.sleep(fault.delay_s)
            struck = Struck(fault, time.monotonic(), reached)
            self._struck.append(struck)
            self._open.append(struck)
            await self._striker.strike(struck)
            if fault.number % ROLLBACK_EVERY == 0:
                await self._void()
            if fault.calm:
                if not await self._recover():
                    return False
            else:
                await asyncio.sleep(min(fault.pause_s, max(0.0, deadline - time.monotonic())))
        return True

    async def _recover(self) -> bool:
        """Wait until all is well again; the bound counts from the end of the last fault."""
        await self._striker.over()
        why = await self._calm.well(set(self._history.promoted), CONVERGE_S)
        if why:
            last = self._open[-1].fault if self._open else None
            after = f"after fault {last.number} ({last.kind} {last.target})" if last else "at the end"
            self._broken("convergence", f"not within {CONVERGE_S:g} s {after}: {why}")
            return False
        ended = max((struck.ended or struck.at for struck in self._open), default=0.0)
        for struck in self._open:
            struck.recovered_s = time.monotonic() - ended
        self._open.clear()
        return True

    async def _rest(self) -> float | None:
        """Stop the trainers; the seconds until nothing is on its way and every engine holds what is served."""
        for run in RUNS:
            trainer = self._stack.supervisor.services[f"trainer-{run}"]
            trainer.spec = msgspec.structs.replace(trainer.spec, restart=False)
            trainer.terminate()
        began = time.monotonic()
        if why := await self._calm.at_rest(CONVERGE_S):
            self._broken("convergence", f"not at rest within {CONVERGE_S:g} s: {why}")
            return None
        return time.monotonic() - began

    async def _void(self) -> None:
        with contextlib.suppress(ControlError):
            await self._registry.request(Request(kind="rollback", run=RUNS[0], reason="chaos"))

    # what is watched

    def _take(self, rollout: Rollout) -> None:
        self._answers[str(rollout.status or "no answer")] += 1
        self._waiting.append(rollout)
        if rollout.status == 200:
            self._answered[rollout.request_id] = rollout.version

    def _pinned(self, run: str) -> Sequence[str]:
        """Versions a client may know of: the latest few that were promoted, some of which are gone by now."""
        mine = [name for name in self._history.promoted if name.startswith(f"{run}-v")]
        return mine[-4:]

    async def _follow(self) -> None:
        """Read the events in their order, and judge what was answered before the last reading began."""
        while True:
            began = time.time()
            with contextlib.suppress(ControlError):
                if not await self._watch.read():
                    self._judge(until=began - JUDGE_AFTER_S)
            await asyncio.sleep(LOOK_S)

    def _judge(self, *, until: float) -> None:
        while self._waiting and self._waiting[0].got_at < until:
            for violation in self._history.judge(self._waiting.popleft()):
                self._found(violation)

    def _speak(self, version: str, prompt: Sequence[int], limit: int, seed: int) -> list[int]:
        """What the stored weights of a version say: the simulator's answers are a function of them."""
        return speak(self._voice(version), prompt, limit=limit, seed=seed, stop_probability=0.0).tokens

    @functools.lru_cache(maxsize=64)  # noqa: B019 - one object a run
    def _voice(self, version: str) -> Any:
        place = self._store.directory(version)
        return self._engine.voice(read_adapter(str(place), max_lora_rank=RANK, base=self._engine.config.base))

    # the end

    async def _rows(self) -> dict[str, str]:
        """The version of each request by the ledger, once every answer has its row or none comes any more."""
        rows: dict[str, str] = {}
        after, deadline = "0", time.monotonic() + LEDGER_S
        while True:
            while page := await self._client.read_stream(self._keys.rollouts, after, count=PAGE):
                after = page[-1][0]
                for _, fields in page:
                    row = decode(fields)
                    if row is None:
                        self._broken("ledger", f"an entry cannot be read: {str(fields)[:96]}")
                        continue
                    rows[row.request_id] = row.version
                    if row.run and row.digest:
                        for what in self._names.add("the ledger", row.version, row.digest):
                            self._broken("identity", what)
            if not self._answered.keys() - rows.keys() or time.monotonic() > deadline:
                return rows
            await asyncio.sleep(LOOK_S)

    def _check_rows(self, rows: dict[str, str]) -> None:
        if unrecorded := len(self._answered.keys() - rows.keys()):
            self._broken("ledger", f"{unrecorded} answers have no row")
        for request_id, version in self._answered.items():
            if rows.get(request_id, version) != version:
                self._broken("ledger", f"{request_id} was served by {version}, its row says {rows[request_id]}")

    def _check_store(self) -> None:
        """What is stored under a name is what was announced under it, byte for byte."""
        for version in self._store.versions():
            try:
                manifest = self._store.read_manifest(version)
                verify_files(manifest, self._store.directory(version))
            except StoreError as error:
                self._broken("identity", f"{version} in the store: {error}")
                continue
            for what in self._names.add("the store", version, manifest.digest):
                self._broken("identity", what)

    def _crashes(self) -> dict[str, int]:
        crashes = {
            name: ended
            for name, service in self._stack.supervisor.services.items()
            if (ended := service.restarts - self._striker.ordered[name]) > 0
        }
        for name, count in crashes.items():
            last = self._stack.supervisor.services[name].last_words()
            self._broken("crash", f"{name} ended by itself, {count} times: {last}")
        return crashes
