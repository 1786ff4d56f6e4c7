"""The state machine: trainers, engines with their agents, routers, coordinators, their journal, and one Redis.

Decisions, recovery, the journal's memory and the agents' plans are the product's own functions. What is modelled is
what surrounds them: each Lua script is one step, a coordinator's turn is three (decided and intent noted, committed,
outcome noted) with anything in between, and Redis is a value that can be set back to an earlier one, or emptied.

Time is young or old. `wait` makes everything old at once: whoever can speak has spoken again, who cannot is silent, a
lease that was not renewed has run out, a router that could not read serves nothing any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec.structs import replace

from model.leading import _coordinator, check_routers, commit, note_outcome, turn
from model.state import WAIT_S, YOUNG_S, Action, Broken, Coordinator, Engine, Journal, Redis, Router, State
from model.world import announce, announce_again, begin, do, late, next_deed, read, report, reserve


def start(*, engines: int, routers: int = 0, coordinators: int = 1, torn: bool = False, **budget: int) -> State:
    """A fleet at rest: everybody is up, a trainer has begun, nothing is published."""
    state = State(
        now=WAIT_S,
        engines={f"r{number}": Engine() for number in range(1, engines + 1)},
        routers={f"g{number}": Router() for number in range(1, routers + 1)},
        coordinators={name: Coordinator() for name in "AB"[:coordinators]},
        trainers=(),
        redis=Redis(),
        journal=Journal(),
        store={},
        left=budget,
        torn=torn,
    )
    return settle(begin(state))


# what may happen


def actions(state: State) -> Iterator[tuple[Action, State]]:
    """Every step that may follow, and the state it leads to."""
    left = state.left

    def spent(next_state: State, kind: str) -> State:
        return replace(next_state, left=left | {kind: left[kind] - 1})

    for name in state.engines:
        yield from _engine_actions(state, name, spent)
    for name, router in state.routers.items():
        yield from _router_actions(state, name, router, spent)
    for name, me in state.coordinators.items():
        if me.step == "rest":
            yield ("turn", name), turn(state, name)
        elif me.step == "decided":
            yield ("commit", name), commit(state, name)
        else:
            yield ("note", name), note_outcome(state, name)
        if left.get("crash") and (me.step != "rest" or me.known is not None):
            yield ("crash", name), spent(_coordinator(state, name, Coordinator()), "crash")
    for place, trainer in enumerate(state.trainers):
        if trainer.closed:
            continue
        if trainer.seq:
            yield ("announce", str(place)), announce(state, place)
        elif left.get("publish"):
            reserved = reserve(state, place)
            if reserved is not state:
                yield ("reserve", str(place)), spent(reserved, "publish")
    if left.get("begin"):
        yield ("begin",), spent(begin(state), "begin")
    if left.get("ask") and not state.redis.asked:
        yield ("ask",), spent(replace(state, redis=replace(state.redis, asked=True)), "ask")
    if left.get("save") and state.redis.generation:
        yield ("save",), spent(replace(state, saved=state.redis), "save")
    if left.get("rewind") and state.saved is not None:
        yield ("rewind",), spent(replace(state, redis=state.saved, set_back=True), "rewind")
    if left.get("empty"):
        yield ("empty",), spent(replace(state, redis=Redis(), set_back=True), "empty")
    if left.get("wait"):
        yield ("wait",), spent(wait(state), "wait")


def _engine_actions(state: State, name: str, spent: Callable[[State, str], State]) -> Iterator[tuple[Action, State]]:
    engine, left = state.engines[name], state.left

    def changed(kind: str, **fields: object) -> State:
        return spent(replace(state, engines=state.engines | {name: replace(engine, **fields)}), kind)

    deed = next_deed(state, name)
    if engine.late is not None:
        yield ("late", name), late(state, name)
        return
    if deed is not None:
        yield ("work", name), do(state, name, deed)
        if left.get("freeze"):
            yield ("freeze", name), changed("freeze", late=deed, frozen=True)
    said = state.redis.reports.get(name)
    news = said is None or (said[0].engine_epoch, said[0].loaded, said[0].draining) != (
        str(engine.life),
        engine.loaded,
        engine.draining,
    )
    if news and not engine.absent and not engine.frozen:
        yield ("report", name), report(state, name)
    if engine.absent:
        if left.get("join"):
            yield ("join", name), report(changed("join", absent=False), name)
        return
    if left.get("restart"):
        yield ("restart", name), changed("restart", life=engine.life + 1, loaded=())
    if left.get("silence") and not engine.frozen:
        yield ("silence", name), changed("silence", frozen=True)
    if engine.frozen:
        yield (
            ("speak", name),
            report(replace(state, engines=state.engines | {name: replace(engine, frozen=False)}), name),
        )
    if left.get("refuse") and not engine.refuses:
        yield ("refuse", name), changed("refuse", refuses="version")
    if left.get("fail") and not engine.refuses:
        yield ("fail", name), changed("fail", refuses="replica")
    if left.get("drain") and not engine.draining:
        yield ("drain", name), changed("drain", draining=True)


def _router_actions(
    state: State, name: str, router: Router, spent: Callable[[State, str], State]
) -> Iterator[tuple[Action, State]]:
    left = state.left

    def changed(**fields: object) -> State:
        return replace(state, routers=state.routers | {name: replace(router, **fields)})

    now_read = read(state, name)
    if now_read != state:
        yield ("read", name), now_read
    if not router.stale and left.get("admit"):
        for version in router.table.versions:
            if router.table.routable(version) and version not in router.inflight:
                yield ("admit", name), spent(changed(inflight=(*router.inflight, version)), "admit")
    for version in router.inflight:
        yield ("finish", name), changed(inflight=tuple(one for one in router.inflight if one != version))
    if left.get("cut") and not router.cut:
        yield ("cut", name), spent(changed(cut=True), "cut")
    if router.cut:
        yield ("mend", name), changed(cut=False)


def wait(state: State) -> State:
    """Everything that is young becomes old, but for those who can speak and have."""
    held = state.now < state.redis.until
    state = replace(state, now=state.now + WAIT_S)
    for name in state.engines:
        state = report(state, name)
    for name in state.routers:
        before = state.routers[name]
        state = read(state, name)
        if state.routers[name] is before:  # it could not read, or what it read was older
            ended = replace(before, stale=True, inflight=() if before.cut else before.inflight)
            state = replace(state, routers=state.routers | {name: ended})
    for me in state.coordinators.values():
        if held and me.step == "rest" and me.lease is not None and state.redis.term == me.term:
            state = replace(state, redis=replace(state.redis, until=state.now + YOUNG_S))
    return state


# the end of all faults


def mended(state: State) -> State:
    """No more faults: who was frozen goes on, who was cut off is back, nobody refuses or drains any more."""
    for name, engine in state.engines.items():
        if engine.late is not None:
            state = late(state, name)
        engine = replace(state.engines[name], frozen=False, refuses="", draining=False)
        state = replace(state, engines=state.engines | {name: engine})
    routers = {name: replace(router, cut=False, inflight=()) for name, router in state.routers.items()}
    return replace(state, routers=routers, left={}, saved=None)


def settle(state: State) -> State:
    """Everybody does what there is to do, in turn, and time passes, until nothing changes any more."""
    for _ in range(60):
        before = state
        state = calm_round(state)
        if at_rest(before, state):
            return state
    raise Broken("it does not come to rest")


def calm_round(state: State) -> State:
    for place, trainer in enumerate(state.trainers):
        if trainer.seq and not trainer.closed:
            state = announce(state, place)
        state = announce_again(state, trainer)
    for name in state.engines:
        state = report(state, name)
        while (deed := next_deed(state, name)) is not None:
            state = do(state, name, deed)
    for name in state.coordinators:
        for _ in range(30):
            generation = state.redis.generation
            step = state.coordinators[name].step
            state = {"rest": turn, "decided": commit, "committed": note_outcome}[step](state, name)
            if state.coordinators[name].step == "rest" and state.redis.generation == generation and step == "rest":
                break
    for name in state.routers:
        state = read(state, name)
    check_routers(state)
    return wait(state)


def at_rest(before: State, after: State) -> bool:
    def still(state: State) -> object:
        return (
            {name: (engine.loaded, engine.life) for name, engine in state.engines.items()},
            state.redis.generation,
            state.trainers,
            {name: (me.lease is not None, me.step) for name, me in state.coordinators.items()},
            {name: router.table.generation for name, router in state.routers.items()},
        )

    return still(before) == still(after) and any(me.lease for me in after.coordinators.values())
