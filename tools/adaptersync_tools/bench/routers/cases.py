"""What is measured, one case at a time, of one party: figures by name. Knows no promise and no repetition."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path

from msgspec import Struct

from adaptersync_tools.bench.machine import OTHERS, Meter
from adaptersync_tools.bench.routers import parties
from adaptersync_tools.bench.routers.load import Found, Load, clients, press
from adaptersync_tools.bench.routers.parties import BenchFailed, Party, Replicas, Serving, serving

SERVICE_S = 0.1
JITTER = 0.8
QUICK_SERVICE_S = 0.05  # where it is answers that are counted
WARM_UP_S = 1.0
WARM_UP_SEED = 7
BEFORE, AWAY = 0.2, 0.2  # parts of a run after which a replica dies, and for which it is away
LONGER = 1.5  # runs in which a replica dies: it must have time to be found again

Figures = dict[str, float]


class Place(Struct, frozen=True, kw_only=True):
    """Where and for how long one party is measured once."""

    directory: Path
    program: Path | None
    seconds: float


class Case(Struct, frozen=True, kw_only=True):
    """`shown` are the figures of its table, with their headings, and how to print them."""

    name: str
    title: str
    parties: tuple[Party, ...]
    measure: Callable[[Party, Place], Coroutine[None, None, Figures]]
    shown: tuple[tuple[str, str, str], ...]


async def warmth(party: Party, place: Place) -> Figures:
    return await _routed(party, place, Load())


async def two_routers(party: Party, place: Place) -> Figures:
    return await _routed(party, place, Load(), routers=2)


async def template(party: Party, place: Place) -> Figures:
    return await _routed(party, place, Load(connections=32, window=1, tokens=475, template=400), jitter=0.0)


async def _routed(party: Party, place: Place, load: Load, *, routers: int = 1, jitter: float = JITTER) -> Figures:
    """Where requests went that take their time."""
    async with _at_work(party, place, replicas=4, delay_s=SERVICE_S, jitter=jitter, routers=routers) as (
        fleet,
        at_work,
    ):
        await _warm_up(party, at_work, load, fleet)
        async with clients(at_work.urls, load, party, at_work.model) as seen:
            await asyncio.sleep(place.seconds)
        counts = await fleet.counts()
    asked = [each.requests for each in counts]
    if not sum(asked):
        raise BenchFailed("no request reached a replica", router=party.name)
    return {
        "warm_percent": 100 * sum(each.warm for each in counts) / sum(asked),
        "largest_inflight": max(each.largest for each in counts),
        "busiest_percent": 100 * max(asked) / sum(asked),
        "requests": sum(asked),
        "errors": seen.failed,
    }


async def restarted(party: Party, place: Place) -> Figures:
    """A replica dies, and its engine comes back with no adapter loaded."""
    return await _failing(party, place, comes_back=True)


async def killed(party: Party, place: Place) -> Figures:
    """A replica dies, and stays so."""
    return await _failing(party, place, comes_back=False)


async def _failing(party: Party, place: Place, *, comes_back: bool) -> Figures:
    seconds = place.seconds * LONGER
    load = Load(connections=32)
    async with _at_work(party, place, replicas=4, delay_s=QUICK_SERVICE_S, quick=True) as (_, at_work):
        with contextlib.ExitStack() as away:  # who is away comes back when all is counted
            async with clients(at_work.urls, load, party, at_work.model) as seen:
                await asyncio.sleep(seconds * BEFORE)
                await asyncio.to_thread(away.enter_context, at_work.away())
                if comes_back:
                    await asyncio.sleep(seconds * AWAY)
                    await asyncio.to_thread(away.close)
                    seen.mark()
                    await asyncio.sleep(seconds * (1 - BEFORE - AWAY))
                else:
                    await asyncio.sleep(seconds * (1 - BEFORE))
        return {
            "answers": seen.outcomes["200"],
            "not_found": seen.outcomes["404"],
            "errors": seen.failed,
            "back_answers": seen.since[at_work.last] if comes_back else 0,
        }


async def throughput(party: Party, place: Place) -> Figures:
    """As many answers as there can be, of replicas that take no time."""
    async with _at_work(party, place, replicas=2) as (fleet, at_work):
        load = Load()
        await _warm_up(party, at_work, load, fleet)
        meter = Meter({**at_work.leaders, **fleet.leaders})
        before, began = meter.read(), time.monotonic()
        found = await press(at_work.urls[0], load, party, at_work.model, seconds=place.seconds)
        after, seconds = meter.read(), time.monotonic() - began
    spent = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in after}
    return {
        "requests_per_s": found.rate,
        "router_cpu_us": 1e6 * spent.get("router", 0.0) / found.requests,
        "redis_cpu_us": 1e6 * spent.get("redis", 0.0) / found.requests,
        "others_cores": spent[OTHERS] / seconds,
        **_times(found),
    }


async def added(party: Party, place: Place) -> Figures:
    """What a request takes that waits for nothing but the router."""
    async with _at_work(party, place, replicas=2) as (fleet, at_work):
        load = Load(connections=2)
        await _warm_up(party, at_work, load, fleet)
        return _times(await press(at_work.urls[0], load, party, at_work.model, seconds=place.seconds))


def _times(found: Found) -> Figures:
    return {"p50_ms": 1000 * found.p50_s, "p99_ms": 1000 * found.p99_s, "errors": found.errors}


@contextlib.asynccontextmanager
async def _at_work(
    party: Party,
    place: Place,
    *,
    replicas: int,
    delay_s: float = 0.0,
    jitter: float = 0.0,
    routers: int = 1,
    quick: bool = False,
) -> AsyncIterator[tuple[Replicas, Serving]]:
    fleet = Replicas(place.directory / "replicas", replicas, delay_s=delay_s, jitter=jitter)
    with fleet.supervisor:
        await fleet.start()
        async with serving(party, place.program, fleet, place.directory, routers=routers, quick=quick) as at_work:
            yield fleet, at_work


async def _warm_up(party: Party, at_work: Serving, load: Load, fleet: Replicas) -> None:
    """Connections are made, code is loaded; then the replicas forget it all."""
    for url in at_work.urls:
        await press(url, load, party, at_work.model, seconds=WARM_UP_S, seed=WARM_UP_SEED)
    await fleet.idle()
    await fleet.post("/reset")


ROUTERS = (parties.OURS, parties.VLLM, parties.VLLM_STICKY, parties.SGLANG, parties.RULE)
SPEED = (
    parties.DIRECT,
    parties.OURS,
    parties.OURS_TWO,
    parties.VLLM,
    parties.VLLM_STICKY,
    parties.SGLANG,
    parties.RULE,
)
COUNT, PERCENT, TIME = "{:.0f}", "{:.1f}", "{:.2f}"
WHERE = (("warm_percent", "warm, %", PERCENT), ("largest_inflight", "most in flight at one", COUNT))
ERRORS = ("errors", "errors", COUNT)

CASES = (
    Case(
        name="warmth",
        title="4 replicas, 128 in flight, 16 prompts shuffled, 8 completions each, 100 ms ± 80 %",
        parties=ROUTERS,
        measure=warmth,
        shown=(*WHERE, ERRORS),
    ),
    Case(
        name="two-routers",
        title="the same through two routers, each prompt's completions split 4 + 4",
        parties=ROUTERS,
        measure=two_routers,
        shown=(*WHERE, ERRORS),
    ),
    Case(
        name="template",
        title="4 replicas, 32 in flight, 400 of 475 tokens common to all prompts",
        parties=ROUTERS,
        measure=template,
        shown=(("busiest_percent", "requests at the busiest, %", PERCENT), WHERE[0], ERRORS),
    ),
    Case(
        name="restarted",
        title="a replica is killed and comes back without its adapter, 32 clients",
        parties=(parties.OURS_AGENTS, *ROUTERS),
        measure=restarted,
        shown=(
            ("not_found", "404 at clients", COUNT),
            ERRORS,
            ("answers", "good answers", COUNT),
            ("back_answers", "of the one that came back", COUNT),
        ),
    ),
    Case(
        name="killed",
        title="a replica is killed, 32 clients",
        parties=ROUTERS,
        measure=killed,
        shown=(ERRORS, ("answers", "good answers", COUNT)),
    ),
    Case(
        name="throughput",
        title="2 replicas that take no time, 128 connections",
        parties=SPEED,
        measure=throughput,
        shown=(
            ("requests_per_s", "requests/s", COUNT),
            ("router_cpu_us", "CPU of routers, µs a request", COUNT),
            ("redis_cpu_us", "of Redis", COUNT),
            ("p50_ms", "p50, ms", TIME),
            ("p99_ms", "p99, ms", TIME),
            ERRORS,
            ("others_cores", "cores other programs took", TIME),
        ),
    ),
    Case(
        name="added",
        title="2 replicas that take no time, 2 connections",
        parties=tuple(party for party in SPEED if party != parties.OURS_TWO),
        measure=added,
        shown=(("added_ms", "p50 added, ms", TIME), ("p50_ms", "p50, ms", TIME), ("p99_ms", "p99, ms", TIME), ERRORS),
    ),
)
