"""A coordinator's turn, in the three steps between which it may die, and what a commit must keep."""

from __future__ import annotations

from msgspec.structs import replace

from adaptersync.coordinator.journal import REFUSALS, Entry, Recollection, intent, outcome, remember
from adaptersync.coordinator.protocol import decide
from adaptersync.coordinator.recovery import exposed, highest_numbers, lost, refused, renewed, restored
from adaptersync_core.records import (
    Decision,
    Fleet,
    Leadership,
    Request,
    RunRecord,
    SeenReplica,
    SeenRouter,
)
from adaptersync_core.registry import NUMBERS_GAP
from model.state import CONFIG, RUN, WINDOW, YOUNG_S, Broken, Coordinator, Journal, Redis, State
from model.world import _announced
from support.world import unjust

# coordinators


def fleet(state: State) -> Fleet:
    redis = state.redis
    considered = redis.table.runs[RUN].considered if RUN in redis.table.runs else 0
    newer = sorted((one for one in redis.published.values() if one.seq > considered), key=lambda one: one.seq)
    return Fleet(
        now=state.now,
        table=redis.table,
        runs={RUN: redis.run} if redis.run else {},
        published={RUN: tuple(newer)} if redis.run else {},
        replicas={name: SeenReplica(report=said, age_s=state.now - at) for name, (said, at) in redis.reports.items()},
        acks=redis.acks,
        routers={
            name: SeenRouter(report=said, age_s=0.0)
            for name, (said, at) in redis.routers.items()
            if state.now - at <= YOUNG_S
        },
        requests={"q": Request(kind="rollback", run=RUN, reason="asked")} if redis.asked else {},
    )


def lead(state: State, name: str) -> tuple[State, Leadership | None]:
    """lead.lua, and what Coordinator._lead makes of the answer."""
    me, redis = state.coordinators[name], state.redis
    if not me.term:
        state = replace(state, terms=state.terms + 1)
        me = replace(me, term=f"t{state.terms}")
    held = bool(redis.leader) and state.now < redis.until
    mine = redis.leader == name and redis.term in (me.term, me.former)
    over = (me.term == me.former and redis.term != me.term) or (not held and redis.term == me.term)
    if (held and not mine) or over:
        return _coordinator(state, name, Coordinator()), None
    token = redis.token + (redis.leader != name or redis.term != me.term)
    redis = replace(redis, leader=name, term=me.term, token=token, until=state.now + YOUNG_S)
    lease = Leadership(token=token, generation=redis.generation, incarnation=me.term, leader=name)
    state = replace(state, redis=redis, told=replace(state.told, leading=me.term))
    return _coordinator(state, name, replace(me, former=me.term, lease=lease)), lease


def turn(state: State, name: str) -> State:
    """Coordinator._decide_once up to where the intent is noted; restoring is one step."""
    state, lease = lead(state, name)
    if lease is None:
        return state
    me = state.coordinators[name]
    seen = fleet(state)
    known = me.known if me.known is not None else state.journal.known
    if lost(lease, seen.table, known.table):
        return _restore(state, name, lease, seen, known)
    if me.known is None:
        known = remember(known, Entry(generation=seen.table.generation, table=seen.table, runs=seen.runs))
        state = replace(state, journal=Journal(lease.incarnation, known))
    if seen.table.incarnation != lease.incarnation:
        seen = replace(seen, table=exposed(seen.table))
    first = seen.table.incarnation != lease.incarnation
    seen = replace(seen, fates=known.fates)
    decision = None if first and refused(seen.table, known.fates) else decide(seen, CONFIG)
    if decision is not None:
        for broken in unjust(seen, CONFIG, decision):
            raise Broken(broken)
    if decision is None and first:
        decision = renewed(seen, known.fates)
    if decision is None:
        return _coordinator(state, name, replace(me, known=known))
    decision = replace(decision, table=replace(decision.table, incarnation=lease.incarnation))
    state, known = _note(state, me.term, known, intent(decision))
    return _coordinator(state, name, replace(me, known=known, decision=decision, step="decided", runs=seen.runs))


def commit(state: State, name: str) -> State:
    """decide.lua."""
    me, redis = state.coordinators[name], state.redis
    decision, lease = me.decision, me.lease
    assert decision is not None
    assert lease is not None
    if (redis.term, redis.token) != (lease.incarnation, lease.token) or state.now >= redis.until:
        return _coordinator(state, name, Coordinator())
    rest = _coordinator(state, name, replace(me, step="rest", decision=None))
    if redis.generation != decision.table.generation - 1:
        return rest
    for need in decision.needs:
        said, at = redis.reports.get(need.replica, (None, 0.0))
        ack = redis.acks.get(need.replica, {}).get(need.version)
        if said is None or state.now - at > YOUNG_S or said.engine_epoch != need.engine_epoch:
            return rest
        if need.version and (ack is None or not ack.accepted or ack.engine_epoch != need.engine_epoch):
            return rest
    if lease.incarnation != state.told.leading:
        raise Broken(f"{name} writes although it no longer leads")
    check(state, decision)
    given_up = {one for one, record in decision.records.items() if record.state in REFUSALS}
    told = state.told
    table = decision.table
    if told.written.get(table.incarnation, -1) >= table.generation:
        raise Broken(f"generation {table.generation} is written twice in {table.incarnation}")
    state = replace(
        state,
        redis=replace(redis, generation=table.generation, table=table, asked=redis.asked and not decision.answered),
        told=replace(
            told, refused=told.refused | given_up, written=told.written | {table.incarnation: table.generation}
        ),
    )
    state = _coordinator(state, name, replace(me, step="committed"))
    return state if state.torn else note_outcome(state, name)


def note_outcome(state: State, name: str) -> State:
    me = state.coordinators[name]
    assert me.decision is not None
    assert me.known is not None
    state, known = _note(state, me.term, me.known, outcome(me.decision, me.runs))
    return _coordinator(state, name, replace(me, known=known, step="rest", decision=None, runs={}))


def _note(state: State, term: str, known: Recollection, entry: Entry | None) -> tuple[State, Recollection]:
    if entry is None:
        return state, known
    known = remember(known, entry)
    if state.journal.term == term:
        state = replace(state, journal=Journal(term, remember(state.journal.known, entry)))
    return state, known


def _restore(state: State, name: str, lease: Leadership, seen: Fleet, known: Recollection) -> State:
    """Coordinator._restore with restore.lua."""
    redis = state.redis
    state = replace(state, terms=state.terms + 1)
    term = f"t{state.terms}"
    table = restored(known, seen.table, incarnation=term, now=seen.now)
    runs = highest_numbers(known.runs, state.store.values())
    known = replace(known, table=table, runs=runs)
    floor, run = redis.floor, redis.run
    if RUN in runs:
        present = run or RunRecord(epoch=0, seq=0, max_staleness=0)
        newest = present if present.epoch >= runs[RUN].epoch else runs[RUN]
        run = replace(newest, seq=max(present.seq, runs[RUN].seq) + NUMBERS_GAP)
        floor = newest.epoch + NUMBERS_GAP
    for version in table.versions:
        if table.routable(version) and version in state.told.refused:
            raise Broken(f"{version} was refused and is restored")
    state = replace(
        state,
        set_back=False,
        journal=Journal(term, known),
        redis=replace(
            redis,
            term=term,
            generation=table.generation,
            table=table,
            run=run,
            nonce=0 if run is not redis.run and run is not None and _raised(redis, run) else redis.nonce,
            floor=floor,
        ),
        told=replace(state.told, leading=term, written=state.told.written | {term: table.generation}),
    )
    known_seqs = {one.seq for one in redis.published.values()}
    latest = {one.seq: one for one in sorted(state.store.values(), key=lambda one: one.epoch)}
    state = _announced(state, {one.adapter_id: one for seq, one in latest.items() if seq not in known_seqs})
    lease = replace(lease, incarnation=term)
    return _coordinator(state, name, Coordinator(term=term, former=lease.incarnation, known=known, lease=lease))


def _raised(redis: Redis, run: RunRecord) -> bool:
    return redis.run is None or redis.run.epoch < run.epoch


def _coordinator(state: State, name: str, me: Coordinator) -> State:
    return replace(state, coordinators=state.coordinators | {name: me})


# promises


def check(state: State, decision: Decision) -> None:
    """What a commit would break, seen from what engines really hold."""
    before, after = state.redis.table, decision.table
    candidates = [one for one in after.versions.values() if one.state in ("staging", "ready")]
    if len(candidates) > 1:
        raise Broken("two candidates")
    entry = after.runs.get(RUN)
    moved = entry is not None and (RUN not in before.runs or entry.current != before.runs[RUN].current)
    if entry is not None and len(after.window(RUN)) > WINDOW + 1:
        raise Broken("the window is too large")
    for name, version in after.versions.items():
        if after.routable(name) and name in state.told.refused:
            raise Broken(f"{name} was refused and is served again")
        was = before.versions.get(name)
        if was is not None and was.state == "retiring" and version.state != "retiring":
            raise Broken(f"{name} no longer retires")
    for name in after.ready():
        newly = name not in before.ready()
        engine, member = state.engines[name], after.members[name]
        said, _ = state.redis.reports.get(name, (None, 0.0))
        if newly and (said is None or said.engine_epoch != member.engine_epoch):
            raise Broken(f"{name} becomes ready in a life it did not report")
        if not newly and not moved:
            continue
        for one in after.window(RUN) if newly else [entry.current] if entry and entry.current else []:
            ack = state.redis.acks.get(name, {}).get(one)
            if moved and one in before.window(RUN):
                continue  # back to a version that everybody serves already
            if ack is None or not ack.accepted or ack.engine_epoch != member.engine_epoch:
                raise Broken(f"{name} counts for {one}, which it did not accept in this life")
            if str(engine.life) == member.engine_epoch and one not in engine.loaded:
                raise Broken(f"{name} counts for {one}, which it does not hold")
    for name in before.versions.keys() - after.versions.keys():
        for router in state.routers.values():
            if not router.stale and (router.table.routable(name) or name in router.inflight):
                raise Broken(f"{name} leaves the table while a router uses it")
        if before.versions[name].fate not in ("retired", "voided"):
            continue  # never served; who loads it late unloads it when it looks
        for replica in after.ready():
            member = after.members[replica]
            engine = state.engines[replica]
            young = replica in state.redis.reports and state.now - state.redis.reports[replica][1] <= YOUNG_S
            if young and str(engine.life) == member.engine_epoch and name in engine.loaded:
                raise Broken(f"{name} leaves the table while {replica} holds it")


def check_routers(state: State) -> None:
    """Whoever a router may send to holds what it may ask for, unless its engine was restarted since."""
    tables = [router.table for router in state.routers.values() if not router.stale]
    if not state.set_back:
        tables.append(state.redis.table)
    for table in tables:
        for name in table.ready():
            engine = state.engines[name]
            if str(engine.life) != table.members[name].engine_epoch or engine.absent:
                continue
            for version in table.versions:
                if table.routable(version) and version not in engine.loaded:
                    raise Broken(f"{name} is ready and does not hold {version}")
