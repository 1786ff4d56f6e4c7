"""Which replica a request should go to, from what is owned, what is in flight and what is promised. Pure.

This is the readable form of the decision; `scripts/route.lua` makes the same one where the state is, and a test holds
the two together. A request goes to the replica that owns most of its prompt, unless that one is too far ahead of the
others; then, and when nobody owns it, to the one with least to do. A policy says what these words mean:

- `promise`: too far is more than `spill`, and more than an eighth, ahead of the mean in flight, and what a replica has
  to do is what is in flight there and what is promised to it (`promises.py`): a prompt brings the rest of its group.
- `threshold`: too far is more than `spill` ahead of the least loaded, and what is in flight is all. This is the rule of
  the published Hugging Face proxy, here with its spilled prompts keeping their affinity.
- `expected`: as `promise`, but of those that are not too far ahead only they count from which the first token is
  expected soonest, or no later than a step after that.

Load is counted in sequences, what an engine decodes at once: a request for eight completions is eight of them.

The mean stands still where the least loaded replica moves with every answer, so a group is torn apart less often for
the same largest load; and promises keep two groups that began in the same moment from growing on one replica.

A prefix that leads to several different continuations is boilerplate (a chat template, a shared system prompt):
everybody will have it soon, so owning it speaks for nobody.

A session that has a replica keeps it, whatever else is true: its turns are one conversation, and are cached there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

Outcome = Literal["affinity", "cold", "spill", "session", "local"]
Policy = Literal["promise", "threshold", "expected"]

HEAD = 4  # hex digits of a block's hash by which its parent remembers it: 1 in 65,536 branches is seen one prompt later
MANY = "*"
STEP_US = 50_000  # an engine's step with a prefill in it: what differs by less is not known to differ
EVEN = 8  # a replica is as busy as the others while it is no more than one in so many ahead of their mean


class Block(Struct, frozen=True, kw_only=True):
    """What is known of one block: the head of the one block seen after it ("" none, "*" several), and who owns it."""

    child: str
    owners: tuple[str, ...]


class Standing(Struct, frozen=True, kw_only=True):
    """One candidate, a replica or one rank of it: how many blocks beyond the boilerplate it owns, its sequences in
    flight from all routers, and how many more of prompts that went there are expected.

    By `queues.py`: how long this one would wait there until its prefill begins, how long that would take, and for how
    long of it what another candidate owns would be computed.
    """

    replica: str
    owned: int
    inflight: int
    promised: int = 0
    wait_us: int = 0
    prefill_us: int = 0
    again_us: int = 0

    @property
    def expected_us(self) -> int:
        """What is computed again counts twice: whoever comes later waits for it as well, and for nothing new."""
        return self.wait_us + self.prefill_us + self.again_us


class Choice(Struct, frozen=True, kw_only=True):
    """Where a request goes, why, how many blocks beyond the boilerplate are expected to be warm there, and as how many
    sequences it is counted.

    Of the prompt's blocks `known` had been seen, of which the first `boilerplate` are everybody's. `standings` are what
    it was decided from, where somebody wanted to know.
    """

    replica: str
    outcome: Outcome
    owned: int
    weight: int = 1
    boilerplate: int = 0
    known: int = 0
    standings: tuple[Standing, ...] = ()


def promising(policy: Policy) -> bool:
    """Whether it goes by the mean and by what is expected, or by the least loaded and what is in flight alone."""
    return policy != "threshold"


def turn_of(last: str) -> int:
    """From which candidate on a prompt's are looked at, by the hash of its last block: the same for all routers."""
    return int(last[:7], 16)


def boilerplate(known: Sequence[Block], hashes: Sequence[str]) -> int:
    """How many leading blocks are boilerplate. `known` are the first blocks of `hashes`, as far as the table has them.

    The last block of the prompt does not count as branching: a prompt that others continue is still one prompt.
    """
    common = 0
    for place, (block, following) in enumerate(zip(known, hashes[1:], strict=False), start=1):
        if block.child and block.child != following[:HEAD]:
            common = place
    return common


def owned(known: Sequence[Block], common: int) -> dict[str, int]:
    """For each replica, how many blocks after the first `common` it owns without a gap."""
    depth: dict[str, int] = {}
    alive: set[str] = set()
    for place, block in enumerate(known[common:], start=1):
        alive = set(block.owners) if place == 1 else alive & set(block.owners)
        if not alive:
            break
        depth.update(dict.fromkeys(alive, place))
    return depth


def choose(standings: Sequence[Standing], *, policy: Policy, spill: int, turn: int, kept: str = "") -> Choice:
    """The rule, over at least one candidate. `turn` breaks ties: a prompt breaks them the same way everywhere.

    `kept` is the replica of the request's session.
    """
    for standing in standings if kept else ():
        if standing.replica == kept:
            return Choice(replica=kept, outcome="session", owned=standing.owned)
    shift = turn % len(standings)
    order = [*standings[shift:], *standings[:shift]]
    if promising(policy):
        # compared as whole numbers, so that both forms of the rule round alike: not at all
        total = sum(standing.inflight for standing in order)
        most = max(total + spill * len(order), total + total // EVEN)
        near = [standing for standing in order if standing.inflight * len(order) <= most]
    else:
        least = min(standing.inflight for standing in order)
        near = [standing for standing in order if standing.inflight - least <= spill]
    if policy == "expected":
        soonest = min(standing.expected_us for standing in near)
        near = [standing for standing in near if standing.expected_us - soonest <= STEP_US]
    if owners := [standing for standing in near if standing.owned > 0]:
        best = max(owners, key=lambda standing: (standing.owned, -standing.inflight))
        return Choice(replica=best.replica, outcome="affinity", owned=best.owned)
    best = min(near, key=lambda standing: standing.inflight + (standing.promised if promising(policy) else 0))
    known = any(standing.owned > 0 for standing in order)
    return Choice(replica=best.replica, outcome="spill" if known else "cold", owned=best.owned)
