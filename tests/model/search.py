"""Breadth-first search over the machine: every state once, up to the names of replicas and the size of counters.

Two states are the same when they differ only in which replica is which, in how large generations are (their order
counts), in how terms are called, or in how old what is old already is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct

from adaptersync.coordinator.journal import Recollection
from adaptersync_core.table import Table
from model.leading import check_routers
from model.machine import actions, at_rest, calm_round, mended
from model.state import RUN, YOUNG_S, Action, Broken, State
from model.world import announce, reserve


class Found(Struct, frozen=True, kw_only=True):
    """What a search came to. `complete`: no state was left out for the bound of depth."""

    states: int
    steps: int
    depth: int
    rests: int
    complete: bool
    seconds: float


def search(
    start: State, *, depth: int = 10_000, progress: Callable[[int, int, float], None] = lambda *_: None
) -> Found:
    """All states within `depth` steps; Broken, with the way to it, when a promise does not hold."""
    began = time.monotonic()
    origin: dict[int, tuple[int, Action]] = {}
    first = canonical(start)
    seen = {first}
    resting: set[int] = set()
    queue = deque([(start, first, 0)])
    steps, deepest, complete = 0, 0, True
    while queue:
        state, key, level = queue.popleft()
        if level > deepest:
            deepest = level
            progress(level, len(seen), time.monotonic() - began)
        try:
            check_routers(state)
            _comes_to_rest(state, resting)
            if level == depth:
                complete = False
                continue
            for action, following in actions(state):
                steps += 1
                found = canonical(following)
                if found not in seen:
                    seen.add(found)
                    origin[found] = (key, action)
                    queue.append((following, found, level + 1))
        except Broken as error:
            raise Broken(f"{error}\nafter: {'; '.join(' '.join(one) for one in way(origin, key))}") from error
    return Found(
        states=len(seen),
        steps=steps,
        depth=deepest,
        rests=len(resting),
        complete=complete,
        seconds=time.monotonic() - began,
    )


def way(origin: dict[int, tuple[int, Action]], key: int) -> list[Action]:
    taken = []
    while key in origin:
        key, action = origin[key]
        taken.append(action)
    return taken[::-1]


def replay(state: State, words: str) -> State:
    """Go the way that a broken promise names; for looking at it."""
    for step in words.split("; "):
        state = next(following for action, following in actions(state) if " ".join(action) == step)
    return state


# liveness


def _comes_to_rest(state: State, resting: set[int]) -> None:
    """When faults stop, the newest healthy publication becomes current. Ways that meet one already gone end there."""
    state = mended(state)
    gone: list[int] = []
    for _ in range(60):
        key = canonical(state)
        if key in resting:
            resting.update(gone)
            return
        gone.append(key)
        before = state
        state = calm_round(state)
        if at_rest(before, state):
            _newest_is_current(state)
            resting.update(gone)
            return
    raise Broken("it does not come to rest")


def _newest_is_current(state: State) -> None:
    for name in state.redis.table.ready():
        if set(state.engines[name].loaded) != set(state.redis.table.wanted()):
            raise Broken(f"{name} holds {state.engines[name].loaded} at rest")
        if state.redis.table.members[name].silent:
            raise Broken(f"{name} is heard of and counts as silent at rest")
    live = [place for place, trainer in enumerate(state.trainers) if not trainer.closed]
    if not live:
        return
    for again in (False, True):
        entry = state.redis.table.runs.get(RUN)
        published = sorted(state.redis.published.values(), key=lambda one: one.seq)
        newest = published[-1] if published else None
        if newest is not None and (again or _healthy(state, newest.adapter_id, newest.epoch)):
            current = entry.current if entry else None
            if current != newest.adapter_id:
                raise Broken(f"{newest.adapter_id} was published last and {current} is current")
        if not state.redis.table.ready() or again:
            return
        for place in reversed(live):  # and one more becomes current too
            following = reserve(state, place)
            place = min(place, len(following.trainers) - 1)
            if following.trainers[place].seq:
                state = announce(following, place)
                break
        else:
            return
        for _ in range(60):
            before = state
            state = calm_round(state)
            if at_rest(before, state):
                break


def _healthy(state: State, name: str, epoch: int) -> bool:
    """Neither refused, nor of a trainer that was replaced."""
    run = state.redis.run
    return (
        name not in state.told.refused
        and name not in state.journal.known.fates
        and run is not None
        and (epoch == run.epoch)
    )


# which states are the same


def canonical(state: State) -> int:
    generations = sorted(set(_generations(state)))
    rank = {generation: place for place, generation in enumerate(generations)}
    terms: dict[str, int] = {}

    def term(name: str) -> int:
        return terms.setdefault(name, len(terms))

    def age(at: float) -> bool:
        return state.now - at <= YOUNG_S

    def table(one: Table) -> tuple[Any, ...]:
        return (
            term(one.incarnation),
            rank[one.generation],
            age(one.restored_at),
            tuple((run.epoch, run.considered, run.current) for run in one.runs.values()),
            tuple(
                sorted(
                    (
                        name,
                        version.state,
                        version.drained,
                        version.exposed,
                        version.fate,
                        version.state == "retiring" and rank[version.changed_in],
                        version.state != "retained" and age(version.since),
                    )
                    for name, version in one.versions.items()
                )
            ),
        )

    def recollection(one: Recollection | None) -> object:
        if one is None:
            return None
        runs = tuple((run.epoch, run.seq) for run in one.runs.values())
        return table(one.table), tuple(sorted((name, fate.state) for name, fate in one.fates.items())), runs

    def redis(one: Any) -> tuple[Any, ...]:
        return (
            one.leader,
            term(one.term),
            one.token if state.saved is not None or state.set_back else 0,
            state.now < one.until,
            rank[one.generation],
            table(one.table),
            one.run and (one.run.epoch, one.run.seq),
            one.floor,
            one.nonce,
            tuple(sorted(one.published)),
            one.asked,
            tuple(
                sorted(
                    (name, term(said.incarnation), rank[said.generation], tuple(sorted(said.inflight)), age(at))
                    for name, (said, at) in one.routers.items()
                )
            ),
        )

    whole = (
        redis(state.redis),
        state.saved and redis(state.saved),
        state.set_back,
        term(state.journal.term),
        recollection(state.journal.known),
        tuple(
            (
                name,
                term(me.term),
                term(me.former),
                me.step,
                recollection(me.known),
                me.lease and (term(me.lease.incarnation), me.lease.token if state.saved else 0),
                me.decision
                and (
                    table(me.decision.table),
                    tuple(sorted((name, record.state) for name, record in me.decision.records.items())),
                    me.decision.answered,
                ),
            )
            for name, me in sorted(state.coordinators.items())
        ),
        tuple(
            (name, router.cut, router.stale, router.inflight, table(router.table))
            for name, router in sorted(state.routers.items())
        ),
        state.trainers,
        tuple(sorted(state.store)),
        tuple(sorted(state.left.items())),
        state.told.refused,
        term(state.told.leading),
        tuple(sorted(_engine_key(state, name, rank, age) for name in state.engines)),
    )
    return hash(repr(whole))


def _engine_key(state: State, name: str, rank: dict[int, int], age: Callable[[float], bool]) -> str:
    """All that is said anywhere of one replica, without its name."""
    engine = state.engines[name]

    def life(epoch: str) -> int:
        return int(epoch) - engine.life

    def member(one: Table) -> object:
        found = one.members.get(name)
        return found and (found.state, found.silent, life(found.engine_epoch), age(found.since))

    def redis(one: Any) -> object:
        said, at = one.reports.get(name, (None, 0.0))
        acks = sorted(
            (key, ack.accepted, ack.fault, life(ack.engine_epoch)) for key, ack in one.acks.get(name, {}).items()
        )
        return member(one.table), said and (life(said.engine_epoch), said.loaded, said.draining, age(at)), acks

    return repr(
        (
            engine.loaded,
            engine.frozen,
            engine.refuses,
            engine.draining,
            engine.absent,
            rank[engine.seen],
            engine.late and (engine.late[:2], life(engine.late[2])),
            redis(state.redis),
            state.saved and redis(state.saved),
            member(state.journal.known.table),
            [member(router.table) for _, router in sorted(state.routers.items())],
            [
                (
                    me.known and member(me.known.table),
                    me.decision and member(me.decision.table),
                    me.decision and sorted(need.version for need in me.decision.needs if need.replica == name),
                )
                for _, me in sorted(state.coordinators.items())
            ],
        )
    )


def _generations(state: State) -> Iterator[int]:
    tables = [state.redis.table, state.journal.known.table, *(router.table for router in state.routers.values())]
    for redis in (state.redis, state.saved):
        if redis is not None:
            yield redis.generation
            tables.append(redis.table)
            yield from (said.generation for said, _ in redis.routers.values())
    for me in state.coordinators.values():
        if me.known is not None:
            tables.append(me.known.table)
        if me.decision is not None:
            tables.append(me.decision.table)
            yield me.decision.table.generation - 1
    yield from (engine.seen for engine in state.engines.values())
    for table in tables:
        yield table.generation
        yield from (version.changed_in for version in table.versions.values() if version.state == "retiring")
