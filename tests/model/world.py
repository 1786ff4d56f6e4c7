"""What surrounds the coordinators: trainers, engines with their agents, routers. Each script is one step."""

from __future__ import annotations

from msgspec.structs import replace

from adaptersync.agent.reconcile import plan
from adaptersync_core.manifest import Manifest
from adaptersync_core.records import (
    Ack,
    ReplicaReport,
    RouterReport,
    RunRecord,
)
from model.state import RUN, WINDOW, Broken, State, Trainer
from support.world import manifest

# trainers


def begin(state: State) -> State:
    """begin_run.lua, as the publisher calls it: never below what the store has."""
    stored = state.store.values()
    epoch, seq = max((one.epoch for one in stored), default=0), max((one.seq for one in stored), default=0)
    known = state.redis.run or RunRecord(epoch=0, seq=0, max_staleness=0)
    run = RunRecord(epoch=max(known.epoch, state.redis.floor, epoch) + 1, seq=max(known.seq, seq), max_staleness=WINDOW)
    nonce = state.begun + 1
    return replace(
        state,
        begun=nonce,
        redis=replace(state.redis, run=run, nonce=nonce),
        trainers=(*state.trainers, Trainer(run.epoch, nonce)),
    )


def reserve(state: State, place: int) -> State:
    """reserve.lua; a trainer whose epoch was lost begins again, once there is a table."""
    trainer, run = state.trainers[place], state.redis.run
    if run is None or run.epoch < trainer.epoch:
        if not state.redis.table.generation:
            return state
        state = begin(state)
        anew = replace(state.trainers[-1], latest=trainer.latest)
        state, run = (
            replace(state, trainers=(*state.trainers[:place], anew, *state.trainers[place + 1 : -1])),
            state.redis.run,
        )
        trainer = anew
    assert run is not None
    if fenced(state, trainer):
        return _trainer(state, place, replace(trainer, closed=True))
    seq = max(run.seq, trainer.latest) + 1
    state = _trainer(state, place, replace(trainer, seq=seq, latest=seq))
    return replace(state, redis=replace(state.redis, run=replace(run, seq=seq)))


def fenced(state: State, trainer: Trainer) -> bool:
    run, nonce = state.redis.run, state.redis.nonce
    return run is None or run.epoch != trainer.epoch or nonce not in (0, trainer.nonce)


def announce(state: State, place: int) -> State:
    """Store, then publish.lua. Fenced or forgotten: the files stay, nothing is announced."""
    trainer = state.trainers[place]
    made = replace(manifest(RUN, trainer.seq, trainer.epoch), digest=f"{trainer.nonce:012x}{trainer.seq:052x}")
    if made.adapter_id in state.store:
        raise Broken(f"{made.adapter_id} is made twice")
    state = replace(_trainer(state, place, replace(trainer, seq=0)), store=state.store | {made.adapter_id: made})
    taken = any(one.seq == made.seq for one in state.redis.published.values())
    if taken or fenced(state, trainer):
        return state
    if state.told.epochs.get(trainer.epoch, trainer.nonce) != trainer.nonce:
        raise Broken(f"two trainers publish in epoch {trainer.epoch}")
    state = replace(state, told=replace(state.told, epochs=state.told.epochs | {trainer.epoch: trainer.nonce}))
    return _announced(state, {made.adapter_id: made})


def announce_again(state: State, trainer: Trainer) -> State:
    """A publisher whose announced version is unknown to Redis says so again."""
    redis = state.redis
    taken = {one.seq for one in redis.published.values()}
    mine = [
        one
        for one in state.store.values()
        if one.epoch == trainer.epoch
        and one.digest[:12] == f"{trainer.nonce:012x}"
        and one.seq not in taken
        and state.told.names.get(one.seq) == one.adapter_id
    ]
    if fenced(state, trainer):
        return state
    return _announced(state, {one.adapter_id: one for one in mine})


def _announced(state: State, made: dict[str, Manifest]) -> State:
    for one in made.values():
        if state.told.names.get(one.seq, one.adapter_id) != one.adapter_id:
            raise Broken(f"number {one.seq} is announced under two names")
    return replace(
        state,
        redis=replace(state.redis, published=state.redis.published | made),
        told=replace(state.told, names=state.told.names | {one.seq: one.adapter_id for one in made.values()}),
    )


def _trainer(state: State, place: int, trainer: Trainer) -> State:
    return replace(state, trainers=(*state.trainers[:place], trainer, *state.trainers[place + 1 :]))


# engines and agents


def report(state: State, name: str) -> State:
    engine = state.engines[name]
    if engine.frozen or engine.absent:
        return state
    said = ReplicaReport(
        url=name,
        base_model="base",
        engine_epoch=str(engine.life),
        max_loras=0,
        max_cpu_loras=0,
        max_lora_rank=64,
        block_size=16,
        loaded=engine.loaded,
        draining=engine.draining,
    )
    reports = state.redis.reports | {name: (said, state.now)}
    return replace(state, redis=replace(state.redis, reports=reports))


def next_deed(state: State, name: str) -> tuple[str, str, str] | None:
    """The first thing the agent's plan says: (deed, version, life of the engine it is meant for)."""
    engine, table = state.engines[name], state.redis.table
    if engine.frozen or engine.absent or not table.generation or table.generation < engine.seen:
        return None
    life = str(engine.life)
    acks = state.redis.acks.get(name, {})
    again = [one for one, ack in acks.items() if not ack.accepted and ack.engine_epoch == life and engine.refuses]
    todo = plan(wanted=table.wanted(), loaded=engine.loaded, acks=acks, engine_epoch=life, busy=(), resting=again)
    forget = todo.retract + todo.forget
    for deed, versions in (("unload", todo.unload), ("forget", forget), ("bring", todo.bring + todo.confirm)):
        if versions:
            return deed, versions[0], life
    return None


def do(state: State, name: str, deed: tuple[str, str, str]) -> State:
    """Carry one deed out, now or late; the report of it follows at once."""
    verb, version, life = deed
    engine = state.engines[name]
    acks = dict(state.redis.acks.get(name, {}))
    if verb == "unload":
        _may_unload(state, name, version)
        engine = replace(engine, loaded=tuple(one for one in engine.loaded if one != version))
    elif verb == "forget":
        acks.pop(version, None)
    elif engine.refuses and version not in engine.loaded:
        acks[version] = Ack(accepted=False, engine_epoch=life, reason="no", fault=engine.refuses)
    else:
        engine = replace(engine, loaded=tuple(sorted({*engine.loaded, version})))
        acks[version] = Ack(accepted=True, engine_epoch=life)
    state = replace(
        state,
        engines=state.engines | {name: replace(engine, late=None, seen=max(engine.seen, state.redis.table.generation))},
        redis=replace(state.redis, acks=state.redis.acks | {name: acks}),
    )
    return report(state, name)


def late(state: State, name: str) -> State:
    """A frozen agent goes on with what it was about to do."""
    engine = state.engines[name]
    assert engine.late is not None
    awake = replace(engine, frozen=False)
    return do(replace(state, engines=state.engines | {name: awake}), name, engine.late)


def _may_unload(state: State, name: str, version: str) -> None:
    engine = state.engines[name]
    for router in state.routers.values():
        if router.stale:
            continue
        member = router.table.members.get(name)
        sends = member is not None and member.state == "ready" and member.engine_epoch == str(engine.life)
        if sends and (router.table.routable(version) or version in router.inflight):
            raise Broken(f"{name} unloads {version}, to which a router sends")


# routers


def read(state: State, name: str) -> State:
    """TableView.read, and the report that follows."""
    router, table = state.routers[name], state.redis.table
    if router.cut or table.generation < max(router.table.generation, 1):
        return state
    router = replace(router, table=table, stale=False)
    for version in table.versions:
        if table.routable(version) and version in state.told.refused:
            raise Broken(f"{version} was refused and a router serves it again")
    said = RouterReport(
        generation=table.generation, incarnation=table.incarnation, inflight=dict.fromkeys(router.inflight, 1)
    )
    return replace(
        state,
        routers=state.routers | {name: router},
        redis=replace(state.redis, routers=state.redis.routers | {name: (said, state.now)}),
    )
