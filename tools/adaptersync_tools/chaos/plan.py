"""What breaks when: an endless series of faults from a seed. Pure.

The same seed gives the same series. When exactly a fault strikes depends on the fleet, since each waits for something
to happen first; the report has the times. Kinds are dealt from a deck, so that each comes up in every dozen or so.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, TypeVar

from msgspec import Struct

Kind = Literal["kill", "freeze", "stall", "flush", "rewind"]
KINDS: Mapping[Kind, str] = MappingProxyType(
    {
        "kill": "SIGKILL, and started again",
        "freeze": "SIGSTOP for as long as a lease or less",
        "stall": "SIGSTOP for longer than every lease",
        "flush": "FLUSHALL of a Redis",
        "rewind": "control Redis put back to its files of some seconds before",
    }
)
DECK: tuple[Kind, ...] = ("kill",) * 5 + ("freeze",) * 2 + ("stall",) * 2 + ("flush",) * 2 + ("rewind",) * 2
# what a fault waits for, so that all steps of the protocol are hit; "" strikes at once
STEPS = (
    "",
    "run.began",
    "adapter.published",
    "version.staging",
    "replica.acked",
    "version.promoted",
    "version.retiring",
    "version.retired",
    "version.voided",
    "replica.state",
    "coordinator.elected",
)
CONTROL, CACHE = "redis-control", "redis-cache"
LONGEST_DELAY_S = 0.3  # between the event and the fault: a step of the protocol takes less
LEASES_S = 14.0  # more than every lease of the fleet: a router's table of 8 s, and the 5 s it is waited for beyond
LASTS_S: Mapping[Kind, tuple[float, float]] = MappingProxyType(
    {"freeze": (0.5, 4.0), "stall": (LEASES_S, LEASES_S + 3.0), "rewind": (0.5, 10.0)}
)
LONGEST_PAUSE_S = 1.5  # before the next fault
AT_ONCE = 0.5  # the share of pauses of no length
CALM = 0.6  # the share of faults after which the fleet is left alone until it has recovered

T = TypeVar("T")


class Fault(Struct, frozen=True, kw_only=True):
    """`target` is the name of a service; a killed one is started again. `calm`: recovery is waited for before the next.

    `lasts_s`: how long it stays frozen, or how far Redis is set back.
    """

    number: int
    kind: Kind
    target: str
    after: str
    delay_s: float
    lasts_s: float
    pause_s: float
    calm: bool


def faults(seed: int, targets: Sequence[str]) -> Iterator[Fault]:
    """`targets` are all services; Redis servers are recognised by their names."""
    rng = random.Random(seed)  # noqa: S311 - to be repeated, not to be secret
    servers = [name for name in targets if name in (CONTROL, CACHE)]
    others = [name for name in targets if name not in servers]
    of: dict[Kind, Iterator[str]] = {
        "kill": _dealt(rng, targets),
        "freeze": _dealt(rng, targets),
        "stall": _dealt(rng, others),
        "flush": _dealt(rng, servers),
        "rewind": _dealt(rng, [name for name in servers if name == CONTROL]),
    }
    steps = _dealt(rng, STEPS)
    for number, kind in enumerate(
        _dealt(rng, [kind for kind in DECK if servers or kind not in ("flush", "rewind")]), 1
    ):
        yield Fault(
            number=number,
            kind=kind,
            target=next(of[kind]),
            after=next(steps),
            delay_s=round(rng.uniform(0.0, LONGEST_DELAY_S), 3),
            lasts_s=round(rng.uniform(*LASTS_S.get(kind, (0.0, 0.0))), 3),
            pause_s=0.0 if rng.random() < AT_ONCE else round(rng.uniform(0.1, LONGEST_PAUSE_S), 3),
            calm=rng.random() < CALM,
        )


def _dealt(rng: random.Random, deck: Sequence[T]) -> Iterator[T]:
    """Each of them once, in random order; then again."""
    while deck:
        yield from rng.sample(deck, len(deck))
