"""Why a request got the version and the replica that it got, as one line of JSON for whoever asked. Pure.

The numbers are those that the decision was made from. Bounded, and printable ASCII, whatever was asked for.
"""

from __future__ import annotations

import json

from msgspec import Struct

from adaptersync.router.policy import Choice, Policy, Standing
from adaptersync.router.queues import SECOND_US
from adaptersync.router.resolve import parse
from adaptersync_core.ranks import split
from adaptersync_core.rollouts import Row

MOST = 16  # candidates, and replicas left out, that are told of; of others their number
WHY = 120  # characters of a reason


class Explanation(Struct, kw_only=True):
    """Filled as the request goes its way; what it never came to stays empty. `left_out` says why, by replica."""

    policy: Policy
    spill: int
    why: str = ""
    blocks: int = 0
    choice: Choice | None = None
    left_out: dict[str, str] = {}

    def line(self, row: Row) -> bytes:
        """What a header may hold; `row` tells the rest."""
        told: dict[str, object] = {"asked": row.asked, "version": row.version, "why": self.why}
        if row.hold_s is not None:
            told["held_s"] = round(row.hold_s, 6)
        if row.session:
            told["session"] = row.session
        told |= {"policy": self.policy, "spill": self.spill}
        if choice := self.choice:
            replica, rank = split(choice.replica)
            told |= {"replica": replica} | ({} if rank is None else {"rank": rank})
            told |= {"routing": choice.outcome, "weight": choice.weight}
            told |= {"blocks": self.blocks, "known": choice.known, "boilerplate": choice.boilerplate}
            told["candidates"] = {each.replica: self._standing(each) for each in choice.standings[:MOST]}
            if len(choice.standings) > MOST:
                told["candidates_more"] = len(choice.standings) - MOST
        told["left_out"] = {name: _plain(self.left_out[name]) for name in [*self.left_out][:MOST]}
        if len(self.left_out) > MOST:
            told["left_out_more"] = len(self.left_out) - MOST
        if row.tried:
            told["before"] = row.tried.split(", ")
        return json.dumps(told, separators=(",", ":")).replace("\x7f", "?").encode("ascii")

    def _standing(self, each: Standing) -> dict[str, float]:
        told: dict[str, float] = {"owned": each.owned, "in_flight": each.inflight, "promised": each.promised}
        if self.policy == "expected":
            told |= {"wait_s": each.wait_us / SECOND_US, "prefill_s": each.prefill_us / SECOND_US}
        return told


def _plain(reason: str) -> str:
    return reason[:WHY].encode("ascii", "replace").decode()


def why(asked: str, *, base_model: str, session: bool) -> str:
    """Why `asked` stands for the version that it was admitted as; `session`: that had it before."""
    if asked == base_model:
        return "base model"
    if session:
        return "session"
    wanted = parse(asked)
    return "by name" if wanted.adapter_id else "by number" if wanted.seq else "current"
