"""Recorded traffic through the router's decision once more, by other rules: what would have gone elsewhere?

Requests begin and end when they did; only the choice is made anew, with what it knows built up from the same traffic.
A replica that was asked for something within a minute could have been chosen, unless it had just failed. A replay does
not see: what engines said of their caches, how fast they prefill (`expected` takes all for equally fast), further
prompts of one request, tables that routers forgot for want of room, and that another choice would have taken another
time. Rows that do not say how large a block is, of former routers, join no queue. Ledgers of any length are read in
bounded memory, twice: first for who was there.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from typing import get_args

from msgspec import Struct
from msgspec.structs import replace

from adaptersync.router.books import Books
from adaptersync.router.ownership import GATHER_S, block_tokens
from adaptersync.router.policy import Outcome, Policy, turn_of
from adaptersync.router.promises import Repeats
from adaptersync.router.queues import RATE, SECOND_US, Queues
from adaptersync_core.ranks import rank_name, split
from adaptersync_core.rollouts import OPEN, Row

LATE_S = 30.0  # a row is in the ledger so soon after its request began: one that takes long is told of before it ends
LONGEST_S = 600.0  # a request of which nothing says how it ended is over after this
BUFFER = 200_000  # beginnings and ends that wait for their turn
THERE_S = 60.0  # a replica is there so long before it is first asked, and after it is last
VERSIONS, BLOCKS, SESSIONS = 16, 50_000, 100_000  # remembered, those used last; blocks of each version
RECORDED = "recorded"
FAR_S = 1e11  # a time beyond this is none, in seconds, and too coarse to tell a beginning from an end

_CHAIN = re.compile(r"(?:(?:[0-9]{1,9}:[0-9a-f]+~? )?[0-9a-f]{7,}~?)?")  # see Row


class Figures(Struct, kw_only=True):
    """Of one policy, or what was `recorded`.

    `warm_percent`: blocks of prompts expected to be cached where they went. `largest`: most sequences in flight at one
    replica. `imbalance`: those at the busiest over the mean, on average over arrivals. `elsewhere`: requests that
    would have gone to another replica, each as things stood when it came: all that went before, as recorded.
    `tokens_per_s`: so fast every replica was taken to prefill, where the policy asks.
    """

    policy: str
    spill: int | None = None
    requests: int = 0
    warm_percent: float = 0.0
    largest: int = 0
    imbalance: float = 1.0
    spilled: int = 0
    elsewhere: int = 0
    tokens_per_s: int | None = None


class Event(Struct, frozen=True, order=True):
    """A request begins, or ends; of one moment the ends come first."""

    at: float
    begins: bool
    number: int
    row: Row


def damage(row: Row) -> str:
    """What no router writes and no replay can go by, or nothing."""
    for name in ("started_at", "hold_s", "total_s"):
        if abs(getattr(row, name) or 0.0) > FAR_S:
            return f"`{name}` is no time"
    return "" if _CHAIN.fullmatch(row.chain) else "`chain` is no hash of blocks"


def _asked(row: Row) -> str:
    """Who was chosen for it: a replica, or one of its ranks."""
    return rank_name(row.replica, row.rank)


def _place(name: str) -> tuple[str, int]:
    replica, rank = split(name)
    return replica, -1 if rank is None else rank


def _begins_at(row: Row) -> float:
    return row.started_at + (row.hold_s or 0.0)


class Presence:
    """When each replica was asked: the first reading."""

    def __init__(self) -> None:
        self._spans: dict[str, tuple[float, float]] = {}

    def read(self, row: Row) -> None:
        if row.replica:
            at = _begins_at(row)
            first, last = self._spans.get(_asked(row), (at, at))
            self._spans[_asked(row)] = min(first, at), max(last, at)

    def candidates(self, row: Row) -> Sequence[str]:
        """Who could have been chosen for it, in the order in which routers have them."""
        at, failed = _begins_at(row), {said.partition(" ")[0] for said in row.tried.split(", ")}
        there = {name for name, (first, last) in self._spans.items() if first - THERE_S <= at <= last + THERE_S}
        return sorted({name for name in there if split(name)[0] not in failed} | {_asked(row)}, key=_place)


class Order:
    """Rows as the ledger has them, opened and ended, put in order of time."""

    def __init__(self) -> None:
        self._waiting: list[Event] = []
        self._open: OrderedDict[str, Row] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._number = 0
        self._newest = 0.0

    def read(self, row: Row) -> Iterator[Event]:
        """What is certain to come next."""
        if row.replica and row.request_id not in self._ended:
            if row.request_id not in self._open:
                self._push(_begins_at(row), True, row)
                self._open[row.request_id] = row
            if row.outcome != OPEN:
                self._end(self._open.pop(row.request_id), row)
            elif len(self._open) > BUFFER:
                _, forgotten = self._open.popitem(last=False)
                self._end(forgotten, forgotten)
        while self._waiting and (self._waiting[0].at < self._newest - LATE_S or len(self._waiting) > BUFFER):
            yield heapq.heappop(self._waiting)

    def rest(self) -> Iterator[Event]:
        for row in [*self._open.values()]:
            self._end(row, row)
        while self._waiting:
            yield heapq.heappop(self._waiting)

    def _end(self, begun: Row, row: Row) -> None:
        """The row that it began with stands for it: the events name one replica."""
        took_s = LONGEST_S if row.total_s is None else row.total_s
        # routers know of an end when it has been told
        self._push(max(row.started_at + took_s, _begins_at(begun)) + GATHER_S, False, begun)
        self._newest = max(self._newest, row.started_at if row.total_s is None else row.started_at + row.total_s)
        self._ended[row.request_id] = None
        if len(self._ended) > BUFFER:
            self._ended.popitem(last=False)

    def _push(self, at: float, begins: bool, row: Row) -> None:
        self._number += 1
        self._newest = max(self._newest, row.started_at)
        heapq.heappush(self._waiting, Event(at, begins, self._number, row))


class _Fleet:
    """What is in flight where, when requests went where somebody says."""

    def __init__(self, policy: str = RECORDED, spill: int | None = None) -> None:
        self.figures = Figures(policy=policy, spill=spill, tokens_per_s=RATE if policy == "expected" else None)
        self.inflight: Counter[str] = Counter()
        self._at: dict[str, str] = {}
        self._blocks = self._warm = self._imbalance = 0.0

    def begun(self, row: Row, replica: str, *, warm: int, spilled: bool, candidates: Sequence[str]) -> None:
        """It is in flight at `replica`, with so many blocks expected to be warm."""
        figures = self.figures
        figures.requests += 1
        figures.spilled += spilled
        self._at[row.request_id] = replica
        self._blocks += row.blocks
        self._warm += warm
        figures.largest = max(figures.largest, self.inflight[replica])
        counts = [self.inflight[name] for name in candidates]
        self._imbalance += max(counts) * len(counts) / max(sum(counts), 1)

    def end(self, row: Row) -> None:
        replica = self._at.pop(row.request_id)
        self.inflight[replica] -= row.weight

    def concluded(self) -> Figures:
        figures = self.figures
        if figures.requests:
            figures.imbalance = round(self._imbalance / figures.requests, 3)
        if self._blocks:
            figures.warm_percent = round(100 * self._warm / self._blocks, 2)
        return figures


class _Shelf:
    """The books of each version, over what is in flight and queued of all of them."""

    def __init__(self, policy: Policy, spill: int, inflight: Counter[str]) -> None:
        self._policy: Policy = policy
        self._spill = spill
        self._inflight = inflight
        self._queues = Queues()
        self._books: OrderedDict[str, Books] = OrderedDict()
        self._repeats: dict[str, Repeats] = {}

    def of(self, row: Row) -> Books:
        books = self._books.get(row.version)
        if books is None:
            books = self._books[row.version] = Books(policy=self._policy, spill=self._spill)
            books.inflight = self._inflight
            books.queues = self._queues
            books.repeats = self._repeats.setdefault(row.run or row.version, Repeats())
            if len(self._books) > VERSIONS:
                self._books.popitem(last=False)
        self._books.move_to_end(row.version)
        while len(books.blocks) > BLOCKS:
            del books.blocks[next(iter(books.blocks))]
        return books


class _Anew:
    """One policy: its `fleet` as it would have been, and what it would have done as things stood."""

    def __init__(self, policy: Policy, spill: int, recorded: _Fleet) -> None:
        self.fleet = _Fleet(policy, spill)
        self._own = _Shelf(policy, spill, self.fleet.inflight)
        self._recorded = _Shelf(policy, spill, recorded.inflight)
        self._sessions: OrderedDict[str, str] = OrderedDict()

    def begin(self, row: Row, at: float, candidates: Sequence[str], turn: int) -> None:
        hashes, ends = _chain(row)
        now_us, tokens = round(at * SECOND_US), block_tokens(hashes, row.block_size)
        kept = self._sessions.get(row.session, "")
        choice = self._own.of(row).route(
            hashes, candidates, turn, row.weight, row.alike, kept, now_us=now_us, tokens=tokens, ends=ends
        )
        if row.session:
            self._sessions[row.session] = choice.replica
            self._sessions.move_to_end(row.session)
            if len(self._sessions) > SESSIONS:
                self._sessions.popitem(last=False)
        warm = ends[choice.boilerplate + choice.owned] if choice.owned else row.boilerplate
        spilled = choice.outcome == "spill"
        self.fleet.begun(row, choice.replica, warm=warm, spilled=spilled, candidates=candidates)
        # and what was recorded, followed: only the choice is this policy's
        books = self._recorded.of(row)
        kept = _asked(row) if row.routing == "session" else ""
        would = books.decide(hashes, candidates, turn, kept, now_us=now_us, tokens=tokens, ends=ends)
        self.fleet.figures.elsewhere += would.replica != _asked(row)
        outcome = row.routing if row.routing in get_args(Outcome) else would.outcome
        known = sum(end <= row.boilerplate + (row.owned_blocks or 0) for end in ends[1:])  # where it went
        owned = max(known - would.boilerplate, 0)
        went = replace(would, replica=_asked(row), outcome=outcome, owned=owned)
        # the recorded fleet counts it in flight
        books.note(hashes, candidates, went, 0, row.alike, now_us=now_us, tokens=tokens, ends=ends)


def _chain(row: Row) -> tuple[list[str], list[int]]:
    """Hashes that tell the prompt from others, and after how many of its blocks each stands; first the boilerplate."""
    hashes, ends = [], [row.boilerplate]
    for part in row.chain.split():
        place, _, name = part.rpartition(":")
        hashes.append(name)
        ends.append(int(place) if place else row.blocks)
    return hashes, ends


class Replay:
    """Fed with a ledger's rows, in its order; `presence` has seen them all before."""

    def __init__(self, presence: Presence, policies: Sequence[Policy], *, spill: int) -> None:
        self._presence = presence
        self._order = Order()
        self._recorded = _Fleet()
        self._anew = [_Anew(policy, spill, self._recorded) for policy in policies]

    def read(self, row: Row) -> None:
        for event in self._order.read(row):
            self._happen(event)

    def figures(self) -> list[Figures]:
        """Nothing more is read after this: first what was recorded, then each policy."""
        for event in self._order.rest():
            self._happen(event)
        return [fleet.concluded() for fleet in (self._recorded, *(each.fleet for each in self._anew))]

    def _happen(self, event: Event) -> None:
        row, recorded = event.row, self._recorded
        if not event.begins:
            for fleet in (recorded, *(each.fleet for each in self._anew)):
                fleet.end(row)
            return
        candidates = self._presence.candidates(row)
        last = row.chain.rpartition(" ")[2]
        turn = turn_of(last) if last else event.number
        for each in self._anew:
            each.begin(row, event.at, candidates, turn)
        recorded.inflight[_asked(row)] += row.weight
        warm = row.boilerplate + (row.owned_blocks or 0)
        recorded.begun(row, _asked(row), warm=warm, spilled=row.routing == "spill", candidates=candidates)
