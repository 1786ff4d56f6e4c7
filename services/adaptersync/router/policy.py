"""Which replica a request should go to, from what is owned and what is in flight. Pure.

This is the readable form of the decision; `scripts/route.lua` makes the same one where the state is, and a test holds
the two together. The rule: the replica that owns most of the prompt, unless it is more than `spill` requests ahead of
the least loaded one. A prefix that leads to several different continuations is boilerplate (a chat template, a shared
system prompt): everybody will have it soon, so owning it speaks for nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

Outcome = Literal["affinity", "cold", "spill", "local"]

HEAD = 4  # hex digits of a block's hash by which its parent remembers it: 1 in 65,536 branches is seen one prompt later
MANY = "*"


class Block(Struct, frozen=True, kw_only=True):
    """What is known of one block: the head of the one block seen after it ("" none, "*" several), and who owns it."""

    child: str
    owners: tuple[str, ...]


class Standing(Struct, frozen=True, kw_only=True):
    """One candidate: how many blocks beyond the boilerplate it owns, and its requests in flight from all routers."""

    replica: str
    owned: int
    inflight: int


class Choice(Struct, frozen=True, kw_only=True):
    """Where a request goes, why, and how many blocks beyond the boilerplate are expected to be warm there."""

    replica: str
    outcome: Outcome
    owned: int


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


def choose(standings: Sequence[Standing], *, spill: int, turn: int) -> Choice:
    """The rule, over at least one candidate. `turn` breaks ties: a prompt breaks them the same way everywhere."""
    shift = turn % len(standings)
    order = [*standings[shift:], *standings[:shift]]
    least = min(order, key=lambda standing: standing.inflight)
    owners = [standing for standing in order if standing.owned > 0]
    near = [standing for standing in owners if standing.inflight - least.inflight <= spill]
    if near:
        best = max(near, key=lambda standing: (standing.owned, -standing.inflight))
        return Choice(replica=best.replica, outcome="affinity", owned=best.owned)
    return Choice(replica=least.replica, outcome="spill" if owners else "cold", owned=least.owned)
