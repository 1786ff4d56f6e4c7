"""What each policy makes of the same load, simulated: the router's own decision, replicas that only take their time.

Events are simulated, so the figures are those of the rule alone: no network, no clock, the same on every machine. A
prompt is warm where it has been sent before, from the moment on at which it was sent; nothing is evicted.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections import Counter
from collections.abc import Iterator
from typing import get_args

from msgspec import Struct
from rich.text import Text

from adaptersync.router.books import Books
from adaptersync.router.policy import Policy, turn_of
from adaptersync.router.queues import SECOND_US
from adaptersync_core.blocks import block_hashes
from adaptersync_tools.bench.result import Target
from adaptersync_tools.output import console, print_json, table

BLOCK_SIZE = 16
COARSE = 128  # where prompts are long: the rule is the same, and the simulation does not take all day
VOCABULARY = 150_000
REPLICAS = 4
COMPLETIONS = 8  # of each prompt
FEW = 2  # of a prompt that is given up
JITTER = 0.8  # of the mean time an answer takes, either way
DEFAULT: Policy = "promise"


class Load(Struct, frozen=True, kw_only=True):
    """`clients` keep as many requests in flight. `window` prompts are asked for in shuffled order, then the next ones;
    with two routers each asks for its half of every prompt's completions, in an order of its own."""

    name: str
    clients: int = 128
    window: int = 16
    routers: int = 1
    tokens: int = 135
    template: int = 23
    """Tokens that all prompts begin with."""
    given_up: float = 0.0
    """Part of the prompts of which only `FEW` completions are asked for."""
    longest: int = 0
    """Prompts are of any length from `tokens` to this, each doubling as often as the next."""
    answer_s: float = 1.0
    """The mean time that decoding an answer takes."""
    rates: tuple[int, ...] = (8_000,) * REPLICAS
    """Tokens that each replica prefills in a second, one prompt after the other."""
    away: bool = False
    """One replica is not there for the middle third of the requests, and comes back with nothing cached."""


LOADS = (
    Load(name="shuffled"),
    Load(name="two routers", routers=2),
    Load(name="in order", window=1),
    Load(name="long template", clients=32, window=1, tokens=475, template=400),
    Load(name="groups given up", given_up=0.5),
    Load(name="one replica away", away=True),
    Load(name="long prompts", tokens=2_048, longest=16_384, answer_s=20.0),
    Load(name="long prompts, short answers", tokens=2_048, longest=16_384, answer_s=10.0),
    Load(name="one slow replica", tokens=2_048, longest=16_384, answer_s=20.0, rates=(2_000, 8_000, 8_000, 8_000)),
    Load(name="mixed lengths", tokens=135, longest=16_384, answer_s=10.0),
)


SOONER = {"long prompts": 0.9, "mixed lengths": 0.85, "one slow replica": 0.5}


class Settings(Struct, frozen=True, kw_only=True):
    """`requests` of each load, by each policy, with each of `rounds` seeds."""

    requests: int = 12_000
    rounds: int = 3
    spill: int = 8


class Outcome(Struct, frozen=True, kw_only=True):
    """Of one policy under one load: the mean over all rounds, and of `largest` and `busiest` the worst.

    `possible`: what would be warm on one replica for all. `largest`: most in flight at one replica at once.
    `busiest`: the part of all requests that one replica got. `first_token`: the time to it, decoding aside.
    """

    load: str
    policy: str
    warm_percent: float
    possible_percent: float
    largest: int
    busiest_percent: float
    spilled_percent: float
    first_token_s: float
    first_token_p95_s: float


class Result(Struct, frozen=True, kw_only=True):
    bench: str
    settings: Settings
    replicas: int
    completions: int
    outcomes: tuple[Outcome, ...]
    targets: tuple[Target, ...]


def run(settings: Settings) -> Result:
    outcomes = tuple(
        _mean([simulate(load, policy, settings, seed) for seed in range(settings.rounds)])
        for load in LOADS
        for policy in get_args(Policy)
    )
    return Result(
        bench="policy",
        settings=settings,
        replicas=REPLICAS,
        completions=COMPLETIONS,
        outcomes=outcomes,
        targets=promised(_by_load(outcomes, DEFAULT), _by_load(outcomes, "expected")),
    )


def _by_load(outcomes: tuple[Outcome, ...], policy: Policy) -> dict[str, Outcome]:
    return {outcome.load: outcome for outcome in outcomes if outcome.policy == policy}


def promised(found: dict[str, Outcome], expected: dict[str, Outcome]) -> tuple[Target, ...]:
    """Of the policy that routers have when nothing is set, and of `expected`, how soon its slow answers begin."""
    one, two, template, away = (
        found[name] for name in ("shuffled", "two routers", "long template", "one replica away")
    )
    return (
        Target.at_least("shuffled: warm", one.warm_percent, 87.0, unit="%"),
        Target.at_most("shuffled: largest in flight", one.largest, 43, unit="requests"),
        Target.at_most("two routers: fewer warm", one.warm_percent - two.warm_percent, 0.3, unit="points"),
        Target.at_most("two routers: largest in flight", two.largest, 43, unit="requests"),
        Target.at_most("groups given up: fewer warm than possible", _lost(found["groups given up"]), 2, unit="points"),
        Target.at_most("one replica away: fewer warm than possible", _lost(away), 1, unit="points"),
        Target.at_most("one replica away: largest in flight", away.largest, 54, unit="requests"),
        Target.at_most("long template: busiest replica", template.busiest_percent, 30, unit="%"),
        *(
            Target.at_most(
                f"{load}: p95 to the first token, expected of {DEFAULT}",
                expected[load].first_token_p95_s / found[load].first_token_p95_s,
                bound,
                unit="of it",
            )
            for load, bound in SOONER.items()
        ),
    )


def _lost(outcome: Outcome) -> float:
    return outcome.possible_percent - outcome.warm_percent


def simulate(load: Load, policy: Policy, settings: Settings, seed: int) -> Outcome:
    """One life of a fleet; the same for the same arguments."""
    third = settings.requests // 3
    chance = random.Random(f"{load.name} {seed}")  # noqa: S311 (a load, no secret)
    books = Books(policy=policy, spill=settings.spill)
    replicas = [f"replica-{number}" for number in range(REPLICAS)]
    template = _tokens(chance, load.template)
    rates = dict(zip(replicas, load.rates, strict=True))
    books.queues.rates = rates
    size = COARSE if load.longest else BLOCK_SIZE
    prompts: dict[int, tuple[int, list[str]]] = {}
    seen: dict[str, set[int]] = {name: set() for name in replicas}
    asking = [_asking(load, random.Random(f"{seed} {router}")) for router in range(load.routers)]  # noqa: S311
    outcomes: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    idle_at = dict.fromkeys(replicas, 0.0)
    waits: list[float] = []
    running: list[tuple[float, int, str, int]] = []  # ends at, number, replica, router
    warm = possible = largest = 0
    now = 0.0
    for number in range(settings.requests):
        router = number % load.routers
        if number >= load.clients:
            now, _, ended, router = heapq.heappop(running)
            books.release(ended)
        prompt = next(asking[router])
        if prompt not in prompts:
            length = load.tokens
            if load.longest:
                length = round(load.tokens * (load.longest / load.tokens) ** chance.random())
                tokens = [chance.randrange(VOCABULARY)] * length  # as good as any, and soon made
            else:
                tokens = template + _tokens(chance, length - load.template)
            prompts[prompt] = length, block_hashes("simulated", tokens, size, length)
        length, hashes = prompts[prompt]
        there = replicas[1:] if load.away and third <= number < 2 * third else replicas
        if load.away and number == 2 * third:
            seen[replicas[0]].clear()
        turn = turn_of(hashes[-1]) if hashes else number
        choice = books.route(hashes, there, turn, now_us=int(now * SECOND_US), tokens=size)
        chosen = choice.replica
        outcomes[choice.outcome] += 1
        sent[chosen] += 1
        cached = len(hashes) * size if prompt in seen[chosen] else load.template if seen[chosen] else 0
        idle_at[chosen] = max(idle_at[chosen], now) + (length - cached) / rates[chosen]
        waits.append(idle_at[chosen] - now)
        possible += any(prompt in caches for caches in seen.values())
        warm += prompt in seen[chosen]
        seen[chosen].add(prompt)
        largest = max(largest, books.inflight[chosen])
        heapq.heappush(
            running, (idle_at[chosen] + load.answer_s * chance.uniform(1 - JITTER, 1 + JITTER), number, chosen, router)
        )
    percent = 100 / settings.requests
    return Outcome(
        load=load.name,
        policy=policy,
        warm_percent=warm * percent,
        possible_percent=possible * percent,
        largest=largest,
        busiest_percent=max(sent.values()) * percent,
        spilled_percent=outcomes["spill"] * percent,
        first_token_s=statistics.fmean(waits),
        first_token_p95_s=statistics.quantiles(waits, n=20)[-1],
    )


def _asking(load: Load, chance: random.Random) -> Iterator[int]:
    """The prompts one router is asked for, by number."""
    first = 0
    while True:
        window = []
        for prompt in range(first, first + load.window):
            completions = FEW if load.given_up and chance.random() < load.given_up else COMPLETIONS
            window += [prompt] * (completions // load.routers)
        chance.shuffle(window)
        yield from window
        first += load.window


def _tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(VOCABULARY) for _ in range(count)]


def _mean(lives: list[Outcome]) -> Outcome:
    return Outcome(
        load=lives[0].load,
        policy=lives[0].policy,
        warm_percent=statistics.fmean(life.warm_percent for life in lives),
        possible_percent=statistics.fmean(life.possible_percent for life in lives),
        largest=max(life.largest for life in lives),
        busiest_percent=max(life.busiest_percent for life in lives),
        spilled_percent=statistics.fmean(life.spilled_percent for life in lives),
        first_token_s=statistics.fmean(life.first_token_s for life in lives),
        first_token_p95_s=statistics.fmean(life.first_token_p95_s for life in lives),
    )


def show(result: Result, *, as_json: bool) -> int:
    """Print it; the exit status is 0 when every target was kept, else 1."""
    kept = all(target.kept for target in result.targets)
    if as_json:
        print_json(result)
        return 0 if kept else 1
    out = console()
    rows = [
        (
            each.load,
            each.policy,
            f"{each.warm_percent:.2f}",
            f"{each.possible_percent:.2f}",
            each.largest,
            f"{each.busiest_percent:.1f}",
            f"{each.spilled_percent:.2f}",
            f"{each.first_token_s:.3f}",
            f"{each.first_token_p95_s:.3f}",
        )
        for each in result.outcomes
    ]
    columns: tuple[str, ...] = (
        "load",
        "policy",
        "warm, %>",
        "possible>",
        "in flight at one>",
        "requests at one, %>",
        "spilled, %>",
    )
    columns += ("first token, s>", "p95, s>")
    out.print(table(f"policy  (simulated, {result.replicas} replicas)", columns, rows))
    for target in result.targets:
        mark, style = ("✓", "green") if target.kept else ("✗", "bold red")
        out.print(
            Text.assemble(
                (f"{mark} ", style),
                f"{target.name}  ",
                (f"{target.value:.4g} {target.unit}", "bold"),
                (f"  ({target.kind} {target.bound:g})", "dim"),
            )
        )
    return 0 if kept else 1
