"""From the last replica's ack to every router serving the version, for fleets of several sizes.

Coordinator, routers and Redis servers are processes as in production; replicas are light (`light.py`). A request that
asks each router for the version by its own id waits there from before the acks; its answer is the moment at which that
router serves. When the last ack came, and when the promotion was committed, is told by their events, which carry the
server's clock; what the script that commits it took, by the server's own measure.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from msgspec import Struct

from adaptersync.trainer import AdapterPublisher
from adaptersync_core.errors import AdapterSyncError
from adaptersync_core.redis import RedisClient
from adaptersync_core.scripts import Script
from adaptersync_core.table import Table
from adaptersync_tools.bench.light import LightFleet
from adaptersync_tools.bench.result import Figure, Machine, Result, Target, now
from adaptersync_tools.demo.synthetic import write_adapter, write_base_model
from adaptersync_tools.up import Progress, Stack, StackSettings

RUN = "bench"
ROUTERS = 2
LIMIT_S = 60.0  # for any one wait
LOOK_S = 0.02
AT_REST_S = 0.3  # between promotions, so that each begins when nothing of the last is left
SLOWER = 3.0  # promised: the largest fleet's decision over the smallest's, at most
SLOW_LOG = 8192  # commands the control server remembers: more than run in one promotion
PROMPT = list(range(1, 33))


class Settings(Struct, frozen=True, kw_only=True):
    """`rounds`: how often all sizes are gone through, so that a busy minute of the machine is not one size's alone."""

    replicas: tuple[int, ...] = (4, 16, 64, 256)
    promotions: int = 10
    rounds: int = 2


class Decision(Struct, frozen=True, kw_only=True):
    """One promotion. `decided_s`: from the last ack to the commit, which itself takes the server `script_s`.

    `served_s`: from the commit until all serve. It and `decided_s` make up `total_s`. All but `script_s` are known to a
    millisecond, and may be that much too long, never too short.
    """

    total_s: float
    decided_s: float
    script_s: float
    served_s: float


class BenchFailed(AdapterSyncError):
    code = "bench-failed"


def run(settings: Settings, directory: Path, progress: Progress) -> Result:
    """Measure; every process that was started has ended when this returns or raises."""
    began_at = now()
    model = write_base_model(directory / "model")
    sizes = sorted(set(settings.replicas))
    found: dict[int, list[Decision]] = {size: [] for size in sizes}
    for number in range(settings.rounds):
        for size in sizes:
            place = directory / f"{size}-replicas-{number}"
            found[size] += _measure(size, settings.promotions, model, place, progress)
    figures, targets = judge(found)
    return Result(
        bench="decision",
        began_at=began_at,
        machine=Machine.here(),
        settings={
            "replicas": list(sizes),
            "routers": ROUTERS,
            "promotions": settings.promotions,
            "rounds": settings.rounds,
        },
        figures=figures,
        targets=targets,
    )


def judge(found: dict[int, list[Decision]]) -> tuple[tuple[Figure, ...], tuple[Target, ...]]:
    """Figures by size, each followed by its parts, and the promise about the largest against the smallest."""
    figures: list[Figure] = []
    totals: list[Figure] = []
    for size, decisions in found.items():
        smallest = totals[0] if totals else None
        totals.append(Figure.of(f"{size} replicas", [each.total_s for each in decisions], against=smallest))
        figures += [
            totals[-1],
            Figure.of("  ack to commit", [each.decided_s for each in decisions]),
            Figure.of("    of it the script", [each.script_s for each in decisions]),
            Figure.of("  commit to served", [each.served_s for each in decisions]),
        ]
    if len(totals) == 1:
        return tuple(figures), ()
    slower = totals[-1].p50_s / totals[0].p50_s
    target = Target.at_most(f"{totals[-1].name} over {totals[0].name}", slower, SLOWER)
    return tuple(figures), (target,)


def _measure(size: int, promotions: int, model: Path, directory: Path, progress: Progress) -> list[Decision]:
    settings = StackSettings(
        model=model,
        state_dir=directory / "fleet",
        replicas=0,
        simulated=True,
        routers=ROUTERS,
        overrides={"trainer.max_staleness": 1, "jobs.verify": False, "coordinator.min_ready": size},
    )
    with Stack(settings, progress) as stack, AdapterPublisher(stack.config, run=RUN) as publisher:
        return asyncio.run(_Drive(stack, publisher, size, promotions, directory, progress).run())


class _Drive:
    def __init__(
        self,
        stack: Stack,
        publisher: AdapterPublisher,
        size: int,
        promotions: int,
        directory: Path,
        progress: Progress,
    ) -> None:
        self._stack = stack
        self._publisher = publisher
        self._size = size
        self._promotions = promotions
        self._directory = directory
        self._progress = progress

    async def run(self) -> list[Decision]:
        """The first promotion is not counted: it loads scripts and opens connections."""
        began = time.monotonic()
        config = self._stack.config
        async with LightFleet(config, self._size) as fleet, aiohttp.ClientSession() as session:
            # the server's own clock of every command: its log of slow ones, told that all are
            await fleet.registry.client.command("CONFIG", "SET", "slowlog-max-len", SLOW_LOG)
            await fleet.registry.client.command("CONFIG", "SET", "slowlog-log-slower-than", 0)
            fleet.release_acks()
            await self._until(lambda table: len(table.ready()) == self._size, fleet, f"{self._size} replicas to join")
            found = []
            for number in range(self._promotions + 1):
                self._progress.waiting(f"promotion {number} of {self._promotions}, {self._size} replicas")
                found.append(await self._promote(fleet, session, number))
                await self._until(_at_rest, fleet, "the fleet to be at rest")
                await asyncio.sleep(AT_REST_S)
        self._progress.done(f"{self._size} replicas", time.monotonic() - began)
        return found[1:]

    async def _promote(self, fleet: LightFleet, session: aiohttp.ClientSession, number: int) -> Decision:
        fleet.hold_acks()
        await fleet.registry.client.command("SLOWLOG", "RESET")
        source = write_adapter(self._directory / "adapter", base="base", seed=number)
        publication = await asyncio.to_thread(self._publisher.publish, source)
        version = publication.adapter_id
        asked = [asyncio.create_task(_ask(session, url, version)) for url in self._stack.router_urls]
        await self._wait_until_held(session)
        fleet.release_acks()
        async with asyncio.timeout(LIMIT_S):
            served = await asyncio.gather(*asked)
        acked, committed = await _acked_and_committed(fleet, version, self._size)
        # both clocks are this host's; they are compared here, when neither can have been set since
        served_at = max(served) + time.time() - time.monotonic()
        return Decision(
            total_s=served_at - acked,
            decided_s=committed - acked,
            script_s=await _script_s(fleet.registry.client),
            served_s=served_at - committed,
        )

    async def _wait_until_held(self, session: aiohttp.ClientSession) -> None:
        async with asyncio.timeout(LIMIT_S):
            for url in self._stack.router_urls:
                while not await _holds(session, url):  # noqa: ASYNC110 (of another process)
                    await asyncio.sleep(LOOK_S)

    async def _until(self, enough: Callable[[Table], bool], fleet: LightFleet, what: str) -> None:
        self._progress.waiting(what)
        deadline = time.monotonic() + LIMIT_S
        while not enough(await fleet.registry.table()):
            await asyncio.to_thread(self._stack.check)
            if time.monotonic() > deadline:
                raise BenchFailed(f"waited {LIMIT_S:g} s for {what}", logs=str(self._stack.logs))
            await asyncio.sleep(LOOK_S)


def _at_rest(table: Table) -> bool:
    return all(table.routable(name) for name in table.versions)


async def _ask(session: aiohttp.ClientSession, url: str, version: str) -> float:
    """When the answer came, on the monotonic clock."""
    body = {"model": version, "prompt": PROMPT, "max_tokens": 1}
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        text = await answer.text()
        if answer.status != 200 or answer.headers.get("x-adaptersync-version") != version:
            raise BenchFailed(f"router answered {answer.status}: {text[:200]}", version=version, router=url)
        return time.monotonic()


async def _holds(session: aiohttp.ClientSession, url: str) -> bool:
    async with session.get(f"{url}/health") as answer:
        return bool((await answer.json())["held"])


async def _acked_and_committed(fleet: LightFleet, version: str, size: int) -> tuple[float, float]:
    """When the last replica's ack was taken, and the promotion committed, on the server's wall clock."""
    entries = await fleet.registry.client.command("XREVRANGE", fleet.registry.keys.events, "+", "-", "COUNT", 4096)
    return moments([(entry_id, fields) for entry_id, fields in entries if fields.get("version") == version], size)


def moments(entries: Sequence[tuple[str, dict[str, str]]], size: int) -> tuple[float, float]:
    """Of a version's events, in any order: the last of all acks, and the promotion, in seconds."""
    at: dict[str, list[float]] = {}
    for entry_id, fields in entries:
        at.setdefault(fields["type"], []).append(int(entry_id.partition("-")[0]) / 1000)
    acks, promotions = at.get("replica.acked", []), at.get("version.promoted", [])
    if len(acks) != size or len(promotions) != 1:
        raise BenchFailed("a version left other events than one promotion and an ack of each replica", acks=len(acks))
    return max(acks), promotions[0]


async def _script_s(client: RedisClient) -> float:
    """The longest commit since the log was emptied: the one that counted every replica's ack."""
    sha = Script("decide").sha
    entries: Sequence[Any] = await client.command("SLOWLOG", "GET", SLOW_LOG)
    spent = [int(duration) for _, _, duration, words, *_ in entries if sha in words]
    if not spent:
        raise BenchFailed("the server has not logged the commit", log=SLOW_LOG)
    return max(spent) / 1e6
