"""What breaks when: an endless series of faults from a seed. Pure.

The same seed gives the same series. When exactly a fault strikes depends on the fleet, since each waits for something
to happen first; the report has the times.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Literal

from msgspec import Struct

Kind = Literal["kill", "freeze"]
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
LONGEST_DELAY_S = 0.3  # between the event and the fault: a step of the protocol takes less
LONGEST_FREEZE_S = 8.0  # longer than a lease and than the age of a heartbeat
LONGEST_PAUSE_S = 2.5  # before the next fault
AT_ONCE = 0.3  # the share of faults that follow the one before without a pause
FREEZES = 0.35  # the share of faults that stop a process for a time instead of ending it


class Fault(Struct, frozen=True, kw_only=True):
    """`target` is the name of a service. `lasts_s` is how long it stays frozen; a killed one is started again."""

    number: int
    kind: Kind
    target: str
    after: str
    delay_s: float
    lasts_s: float
    pause_s: float


def faults(seed: int, targets: Sequence[str]) -> Iterator[Fault]:
    rng = random.Random(seed)  # noqa: S311 - to be repeated, not to be secret
    number = 0
    while True:
        number += 1
        kind: Kind = "freeze" if rng.random() < FREEZES else "kill"
        yield Fault(
            number=number,
            kind=kind,
            target=rng.choice(targets),
            after=rng.choice(STEPS),
            delay_s=round(rng.uniform(0.0, LONGEST_DELAY_S), 3),
            lasts_s=round(rng.uniform(0.5, LONGEST_FREEZE_S), 3) if kind == "freeze" else 0.0,
            pause_s=0.0 if rng.random() < AT_ONCE else round(rng.uniform(0.5, LONGEST_PAUSE_S), 3),
        )
