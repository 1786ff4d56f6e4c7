"""Who owns which prefix, who is how busy and what is expected, shared by all routers of a group by the cache server.

One script call decides, counts and learns (`route.lua`); ends of requests are given back in batches; once a second
the router says what it really has in flight, which mends every count that was lost and drops those of routers that
died. A version that left the table takes what was kept of it along. When the cache server is away or slow the router
decides alone, by the prompt's own hash and its own counts: same prompts still meet.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Sequence
from functools import lru_cache

from msgspec import Struct

from adaptersync.router.policy import Choice, Policy, Standing, choose
from adaptersync_core.blocks import BY_BYTES
from adaptersync_core.bus import Bell
from adaptersync_core.errors import ControlError, ControlUnavailable
from adaptersync_core.identity import is_adapter_id, parse_adapter_id
from adaptersync_core.keys import INFLIGHT_TTL_S, OWNERSHIP_TTL_S, PROMISES_TTL_S, QUEUES_TTL_S, REPEATS_TTL_S, Keys
from adaptersync_core.pipe import Pipe, ScriptCall
from adaptersync_core.scripts import Script

BEAT_S = 1.0  # between two counts of what is in flight
LEASE_S = 5.0  # a router silent for this long gives its counts back
GATHER_S = 0.005  # ends of requests that are told together
CALLS = 256  # packed, they are kept
TOKEN_BYTES = 4  # of text, about, where prompts are known by their bytes

log = logging.getLogger(__name__)


class Arrival(Struct, frozen=True, kw_only=True):
    """A request that a replica is to be chosen for, among `candidates`.

    It is of `weight` sequences, `alike` of them of the prompt that `hashes` tell of, in blocks of `block_size`; its
    session has the replica `kept`. Not `promising`: what is expected of prompts stays as it is. `whole`: the candidates
    are all there are, so nothing in flight at them is nothing in flight. `explained`: with what it was decided from.
    """

    version: str
    hashes: tuple[str, ...]
    candidates: tuple[str, ...]
    turn: int = 0
    weight: int = 1
    alike: int = 1
    kept: str = ""
    promising: bool = True
    whole: bool = True
    explained: bool = False
    block_size: int = 0


class Ownership:
    """The decision, as this router asks for it. `inflight` are its own sequences by replica; `refusal` is what a server
    that answers has said since the last beat but one instead of doing what it was asked, as when it takes no writes."""

    def __init__(
        self, pipe: Pipe, keys: Keys, *, router: str, policy: Policy, spill: int, blocks_per_version: int
    ) -> None:
        self._pipe = pipe
        self._keys = keys
        self._router = router
        self.policy: Policy = policy
        self.spill = spill
        self._blocks_per_version = blocks_per_version
        self._scripts = {name: Script(name) for name in ("route", "release", "count")}
        self._ended: Counter[str] = Counter()
        self._bell = Bell()
        self._touches: dict[str, tuple[str, ...]] = {}
        # the requests of a group are alike, and to pack one costs 6 us
        self._calls = lru_cache(maxsize=CALLS)(self._call)
        self._refused = ""  # since the last beat
        self.refusal = ""
        self.inflight: Counter[str] = Counter()

    @property
    def reachable(self) -> bool:
        return self._pipe.connected and not self.refusal

    async def choose(self, arrival: Arrival) -> Choice:
        """One of its candidates (at least one), counted in flight until `release`."""
        self._touched(arrival.version)
        try:
            reply = await self._pipe.script(self._calls(arrival))
        except ControlError as error:
            self._failed(error)
            choice = self._alone(arrival)
        else:
            choice = Choice(
                replica=reply[0],
                outcome=reply[1],
                owned=reply[2],
                weight=arrival.weight,
                boilerplate=reply[3],
                known=reply[4],
                standings=_standings(arrival.candidates, reply[5:]) if arrival.explained else (),
            )
        self.inflight[choice.replica] += arrival.weight
        return choice

    async def note(self, version: str, chains: Sequence[tuple[str, ...]], choice: Choice, *, block_size: int) -> None:
        """Prompts that share their request with the one that was looked up for `choice` will be cached there, too.

        A choice without an alternative, of nothing in flight and by the policy that promises nothing, does just that.
        """
        if choice.outcome == "local":
            return
        asked = [
            self._pipe.script(
                self._call(
                    Arrival(
                        version=version,
                        hashes=chain,
                        candidates=(choice.replica,),
                        weight=0,
                        alike=0,
                        promising=False,
                        whole=False,
                        block_size=block_size,
                    )
                )
            )
            for chain in chains
            if chain
        ]
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answer, ControlError):
                log.debug("not noted, these prompts will be cold once more: %s", answer)
            elif isinstance(answer, BaseException):
                raise answer

    def release(self, choice: Choice) -> None:
        """The request that `choose` counted has ended."""
        replica = choice.replica
        self.inflight[replica] -= choice.weight
        if self.inflight[replica] <= 0:
            del self.inflight[replica]  # replicas come and go, and their names with them
        if choice.outcome != "local":
            self._ended[replica] += choice.weight
            self._bell.ring()

    async def tell_ends(self) -> None:
        """Give counts back soon after requests end; runs until cancelled."""
        while True:
            await self._bell.wait(BEAT_S)
            await asyncio.sleep(GATHER_S)
            ended, self._ended = self._ended, Counter()
            if ended:
                pairs = [part for item in ended.items() for part in item]
                await self._tell("release", self._router, *pairs)

    async def beat(self) -> None:
        """Renew the lease and mend the counts, and say when the server is of no use; runs until cancelled."""
        while True:
            await self._count(LEASE_S)
            before, self.refusal, self._refused = self.refusal, self._refused, ""
            if self.refusal and not before:
                log.warning("cache server does not do what it is asked: deciding alone; %s", self.refusal)
            elif before and not self.refusal:
                log.info("cache server does what it is asked again")
            await asyncio.sleep(BEAT_S)

    async def forget(self, live: Collection[str]) -> None:
        """Free what is kept of versions that this router asked for and that are no longer live."""
        gone = [version for version in self._touches if is_adapter_id(version) and version not in live]
        for version in gone:
            owned, _, promises, *_ = self._touches.pop(version)
            try:
                await self._pipe.call("UNLINK", owned, promises)
            except ControlError as error:
                log.debug("not freed, it expires: %s", error)

    async def leave(self) -> None:
        """Give everything back at once."""
        self.inflight.clear()
        await self._count(0)

    async def _count(self, lease_s: float) -> None:
        pairs = [part for item in self.inflight.items() for part in item]
        await self._tell("count", self._router, int(lease_s * 1000), INFLIGHT_TTL_S, *pairs)

    async def _tell(self, script: str, *arguments: str | int) -> None:
        try:
            await self._pipe.script(ScriptCall(self._scripts[script], (self._keys.inflight,), arguments))
        except ControlError as error:
            self._failed(error)
            log.debug("counts not told, the next beat mends them: %s", error)

    def _failed(self, error: ControlError) -> None:
        if not isinstance(error, ControlUnavailable):  # of that the connection tells
            self._refused = str(error)

    def _touched(self, version: str) -> tuple[str, ...]:
        """The keys that a choice for this version touches; remembered, and with them who is to be forgotten."""
        keys = self._touches.get(version)
        if keys is None:
            # the base model is a run of its own
            run = parse_adapter_id(version).run if is_adapter_id(version) else version
            each = self._keys
            keys = (each.owned(version), each.inflight, each.promises(version), each.repeats(run), each.queues)
            self._touches[version] = keys
        return keys

    def _call(self, arrival: Arrival) -> ScriptCall:
        hashes = arrival.hashes
        arguments: tuple[str | int, ...] = (
            self._router,
            self.policy if arrival.promising else "threshold",
            self.spill,
            arrival.turn,
            self._blocks_per_version,
            OWNERSHIP_TTL_S,
            INFLIGHT_TTL_S,
            PROMISES_TTL_S,
            REPEATS_TTL_S,
            QUEUES_TTL_S,
            arrival.weight,
            arrival.alike,
            arrival.kept,
            "1" if arrival.explained else "",
            block_tokens(hashes, arrival.block_size) if self.policy == "expected" else 0,
            "1" if arrival.whole else "",
            len(arrival.candidates),
            *arrival.candidates,
            *hashes,
        )
        return ScriptCall(self._scripts["route"], self._touched(arrival.version), arguments)

    def _alone(self, arrival: Arrival) -> Choice:
        """The same rule with the replica that the prompt's hash falls on as its owner."""
        turn = arrival.turn
        home = turn % len(arrival.candidates)
        standings = [
            Standing(replica=name, owned=int(place == home), inflight=self.inflight[name])
            for place, name in enumerate(arrival.candidates)
        ]
        choice = choose(standings, policy=self.policy, spill=self.spill, turn=turn, kept=arrival.kept)
        return Choice(
            replica=choice.replica,
            outcome="local",
            owned=0,
            weight=arrival.weight,
            standings=tuple(standings) if arrival.explained else (),
        )


def _standings(candidates: Sequence[str], numbers: Sequence[int]) -> tuple[Standing, ...]:
    each = iter(numbers)
    return tuple(
        Standing(
            replica=name, owned=owned, inflight=inflight, promised=promised, wait_us=wait_us, prefill_us=prefill_us
        )
        for name, owned, inflight, promised, wait_us, prefill_us in zip(
            candidates, each, each, each, each, each, strict=True
        )
    )


def block_tokens(hashes: Sequence[str], block_size: int) -> int:
    """About how many tokens are in one of these blocks."""
    return -(-block_size // TOKEN_BYTES) if hashes and hashes[-1].endswith(BY_BYTES) else block_size
