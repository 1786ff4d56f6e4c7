"""The decision with all it remembers, in Python: what `scripts/route.lua` does where the state is. Pure.

The simulation drives it, and tests hold the script to it. Routers do not use it: alone, they know too little.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from adaptersync.router.policy import HEAD, MANY, Block, Choice, Policy, Standing, boilerplate, choose, owned, promising
from adaptersync.router.promises import Promises, Repeats
from adaptersync.router.queues import Queues

OWNERS = 16  # owners remembered of one block; the oldest gives way


class Books:
    """Of one version. Unbounded: what the script forgets for want of room is remembered here."""

    def __init__(self, *, policy: Policy, spill: int) -> None:
        self.policy: Policy = policy
        self.spill = spill
        self.blocks: dict[str, Block] = {}
        self.inflight: Counter[str] = Counter()
        self.promises = Promises()
        self.repeats = Repeats()
        self.queues = Queues()

    def route(
        self,
        hashes: Sequence[str],
        candidates: Sequence[str],
        turn: int,
        weight: int = 1,
        alike: int = 1,
        kept: str = "",
        *,
        whole: bool = True,
        now_us: int = 0,
        tokens: int = 0,
        ends: Sequence[int] = (),
    ) -> Choice:
        """A request of `weight` sequences, `alike` of them of the prompt that `hashes` tell of, in blocks of `tokens`
        (0: no queue is kept); its session has `kept`. `whole`: there are no replicas but these.

        Where hashes stand for more blocks than one, `ends` says after how many each does, and before them how many are
        everybody's anyway.
        """
        choice = self.decide(hashes, candidates, turn, kept, whole=whole, now_us=now_us, tokens=tokens, ends=ends)
        self.note(hashes, candidates, choice, weight, alike, now_us=now_us, tokens=tokens, ends=ends)
        return choice

    def decide(
        self,
        hashes: Sequence[str],
        candidates: Sequence[str],
        turn: int,
        kept: str = "",
        *,
        whole: bool = True,
        now_us: int = 0,
        tokens: int = 0,
        ends: Sequence[int] = (),
    ) -> Choice:
        """The choice alone."""
        ends = ends or range(len(hashes) + 1)
        known = self._known(hashes)
        common = boilerplate(known, hashes)
        depth = owned(known, common)
        if promising(self.policy) and whole and not self._busy(candidates):
            self.promises.quiet(self.repeats)
        deepest = max(depth.get(name, 0) for name in candidates)
        standings = []
        for name in candidates:
            mine = depth.get(name, 0)
            standings.append(
                Standing(
                    replica=name,
                    owned=mine,
                    inflight=self.inflight[name],
                    promised=self.promises.by_replica[name],
                    wait_us=self.queues.wait_us(name, now_us) if tokens else 0,
                    prefill_us=self.queues.takes_us(name, (ends[-1] - ends[common + mine]) * tokens),
                    again_us=self.queues.takes_us(name, (ends[common + deepest] - ends[common + mine]) * tokens),
                )
            )
        choice = choose(standings, policy=self.policy, spill=self.spill, turn=turn, kept=kept)
        return replace(choice, boilerplate=common, known=len(known))

    def note(
        self,
        hashes: Sequence[str],
        candidates: Sequence[str],
        choice: Choice,
        weight: int = 1,
        alike: int = 1,
        *,
        now_us: int = 0,
        tokens: int = 0,
        ends: Sequence[int] = (),
    ) -> None:
        """The request goes where `choice` says."""
        ends = ends or range(len(hashes) + 1)
        if promising(self.policy):
            self.promises.note(hashes, choice, self.repeats, inflight=self._busy(candidates), alike=alike)
        self.inflight[choice.replica] += weight
        known, common = self._known(hashes), choice.boilerplate
        new = (ends[-1] - ends[common + choice.owned]) * tokens
        self.queues.join(choice.replica, self.queues.takes_us(choice.replica, new), now_us)
        for place, name in enumerate(hashes):
            before = known[place] if place < len(known) else Block(child="", owners=())
            self.blocks[name] = _seen(before, hashes[place + 1 : place + 2], choice.replica if place >= common else "")

    def release(self, replica: str, weight: int = 1) -> None:
        self.inflight[replica] -= weight

    def _known(self, hashes: Sequence[str]) -> list[Block]:
        known: list[Block] = []
        for name in hashes:
            if name not in self.blocks:
                break
            known.append(self.blocks[name])
        return known

    def _busy(self, candidates: Sequence[str]) -> int:
        return sum(self.inflight[name] for name in candidates)


def _seen(block: Block, following: Sequence[str], owner: str) -> Block:
    """The block after one more prompt went through it, to one more owner if that is not empty."""
    child, owners = block.child, block.owners
    if following:
        head = following[0][:HEAD]
        child = head if child in ("", head) else MANY
    if owner and owner not in owners:
        owners = (*owners, owner)[-OWNERS:]
    return Block(child=child, owners=owners)
