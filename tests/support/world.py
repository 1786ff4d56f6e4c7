"""A small world for the protocol, without Redis, engines or clocks: trainers, replicas, routers and one coordinator.

A world is an immutable value and `apply` gives the next one, so that a test may walk it at random and a search may walk
it exhaustively. The rules are the product's own: `decide` of the coordinator and `plan` of the agent. What is modelled
here is the rest: `commit` is scripts/decide.lua, and a replica does one thing of its plan at a time.

A coordinator reads and commits in two steps, with anything in between; since it keeps nothing, a crash of it, or
another leader, is just a read that is not committed. Every commit is checked against `violations`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from adaptersync.agent.reconcile import plan
from adaptersync.coordinator.membership import alive, answer
from adaptersync.coordinator.protocol import decide
from adaptersync_core.config import Config, CoordinatorSection, GroupSection
from adaptersync_core.events import AnyEvent, ReplicaState, VersionPromoted, VersionRolledBack
from adaptersync_core.manifest import AdapterShape, Manifest
from adaptersync_core.records import (
    Ack,
    Decision,
    Fleet,
    ReplicaReport,
    Request,
    RouterReport,
    RunRecord,
    SeenReplica,
    SeenRouter,
    VersionRecord,
)
from adaptersync_core.table import Table

Action = tuple[str, ...]
SHAPE = AdapterShape(
    rank=8, alpha=16, target_modules=("q_proj",), base_model="base", dtype="F32", tensors={}, noop=False
)


class Replica(Struct, frozen=True, kw_only=True):
    """An engine and its agent. `life` counts the engine's lives; `said` is the report Redis has, `at` when it came."""

    life: int = 1
    loaded: tuple[str, ...] = ()
    acks: dict[str, Ack] = {}
    said: ReplicaReport | None = None
    at: float = 0.0
    silent: bool = False
    draining: bool = False
    refuses: tuple[str, ...] = ()
    unable: bool = False
    slots: int = 0


class World(Struct, frozen=True, kw_only=True):
    """Everything there is. `read` is a decision that was made and is not committed yet; `heard` were alive for it.

    Routers that are `cut` off serve on and hear nothing.
    """

    config: Config
    now: float = 1000.0
    table: Table = Table()
    runs: dict[str, RunRecord] = {}
    published: dict[str, tuple[Manifest, ...]] = {}
    replicas: dict[str, Replica] = {}
    routers: dict[str, SeenRouter] = {}
    cut: tuple[str, ...] = ()
    requests: dict[str, Request] = {}
    records: dict[str, VersionRecord] = {}
    events: tuple[AnyEvent, ...] = ()
    read: Decision | None = None
    heard: tuple[str, ...] = ()


def new_world(
    *,
    replicas: int = 2,
    min_ready: int = 1,
    runs: int = 1,
    max_staleness: int = 1,
    slots: int = 0,
    routers: int = 0,
    gate: bool = False,
    **more: Any,
) -> World:
    """Replicas that have reported once, runs that have begun, and nothing decided yet; `more` are coordinators'."""
    coordinator = CoordinatorSection(
        min_ready=min_ready, alive_s=5, deadline_s=60, drain_s=100, eject_s=10, gate=gate, **more
    )
    world = World(
        config=Config(coordinator=coordinator, group=GroupSection(base_model="base")),
        replicas={f"r{number}": Replica(slots=slots) for number in range(1, replicas + 1)},
        routers={f"g{number}": _heard(0) for number in range(1, routers + 1)},
    )
    for number in range(1, runs + 1):
        world = apply(world, ("begin", f"run{number}", str(max_staleness)))
    return report_all(world)


def manifest(run: str, seq: int, epoch: int = 1, created_at: float = 0.0) -> Manifest:
    return Manifest(
        run=run, seq=seq, epoch=epoch, digest=f"{seq:064x}"[::-1], files=(), shape=SHAPE, created_at=created_at
    )


def name_of(run: str, seq: int) -> str:
    return manifest(run, seq).adapter_id


def fleet(world: World) -> Fleet:
    """What a coordinator would read now."""
    return Fleet(
        now=world.now,
        table=world.table,
        runs=world.runs,
        published={
            run: tuple(one for one in versions if one.seq > considered(world.table, run))
            for run, versions in world.published.items()
        },
        replicas={
            name: SeenReplica(report=replica.said, age_s=world.now - replica.at)
            for name, replica in world.replicas.items()
            if replica.said is not None
        },
        acks={name: replica.acks for name, replica in world.replicas.items()},
        routers=world.routers,
        requests=world.requests,
    )


def considered(table: Table, run: str) -> int:
    return table.runs[run].considered if run in table.runs else 0


def apply(world: World, action: Action) -> World:
    """The world after one action; an action that cannot happen now changes nothing."""
    match action:
        case ("decide",):
            return apply(apply(world, ("read",)), ("commit",))
        case ("read",):
            heard = tuple(name for name in world.replicas if alive(fleet(world), world.config, name))
            decision = decide(fleet(world), world.config)
            if decision is not None and (found := list(unjust(fleet(world), world.config, decision))):
                raise AssertionError("\n".join(found))
            return replace(world, read=decision, heard=heard)
        case ("commit",):
            return _commit(world)
        case ("begin", run, staleness):
            known = world.runs.get(run, RunRecord(epoch=0, seq=0, max_staleness=0))
            begun = replace(known, epoch=known.epoch + 1, max_staleness=int(staleness))
            return replace(world, runs=world.runs | {run: begun})
        case ("publish", run):
            record = world.runs[run]
            new = manifest(run, record.seq + 1, record.epoch, world.now)
            return replace(
                world,
                runs=world.runs | {run: replace(record, seq=new.seq)},
                published=world.published | {run: (*world.published.get(run, ()), new)},
            )
        case ("wait", seconds):
            older = {name: replace(seen, age_s=seen.age_s + float(seconds)) for name, seen in world.routers.items()}
            return replace(world, now=world.now + float(seconds), routers=older)
        case ("ask", request, run, version):
            return apply(world, ("ask", request, run, version, "rollback"))
        case ("ask", request, run, version, kind):
            asked = Request(kind=kind, run=run, version=version, reason="asked")
            return replace(world, requests=world.requests | {request: asked})
        case ("route", router):  # serves the present table and has nothing in flight
            if router in world.cut:
                return world
            return replace(world, routers=world.routers | {router: _heard(world.table.generation)})
        case ("hear", router):  # says once more what it serves
            if router in world.cut:
                return world
            return replace(world, routers=world.routers | {router: replace(world.routers[router], age_s=0.0)})
        case ("cut", router):
            return replace(world, cut=tuple(sorted({*world.cut, router})))
        case ("mend", router):
            return replace(world, cut=tuple(one for one in world.cut if one != router))
        case ("inflight", router, version):
            if router in world.cut:
                return world
            busy = _heard(world.routers[router].report.generation, inflight={version: 1})
            return replace(world, routers=world.routers | {router: busy})
        case (verb, name):
            changed = _replica(world, verb, name, world.replicas[name])
            return replace(world, replicas=world.replicas | {name: changed})
    raise ValueError(f"no such action: {action}")


def _heard(generation: int, **more: Any) -> SeenRouter:
    return SeenRouter(report=RouterReport(generation=generation, **more), age_s=0.0)


def _replica(world: World, verb: str, name: str, replica: Replica) -> Replica:
    match verb:
        case "restart":
            return replace(replica, life=replica.life + 1, loaded=())
        case "silence":
            return replace(replica, silent=True)
        case "speak":
            return replace(replica, silent=False)
        case "drain":
            return replace(replica, draining=True)
        case "undrain":
            return replace(replica, draining=False)
        case "refuse":  # from now on, whatever is on its way in
            candidates = [one for run in world.table.runs if (one := world.table.candidate(run))]
            return replace(replica, refuses=tuple(dict.fromkeys((*replica.refuses, *candidates))))
        case "break":  # its disk fills up, say: from now on it can bring nothing
            return replace(replica, unable=True)
        case "relent":
            return replace(replica, refuses=(), unable=False)
        case "report" if not replica.silent:
            said = ReplicaReport(
                url=f"http://{name}",
                base_model="base",
                engine_epoch=str(replica.life),
                max_loras=replica.slots,
                max_cpu_loras=replica.slots,
                max_lora_rank=64,
                block_size=16,
                loaded=replica.loaded,
                draining=replica.draining,
            )
            return replace(replica, said=said, at=world.now)
        case "work" if not replica.silent and replica.said and replica.said.engine_epoch == str(replica.life):
            return _work(world, name, replica)
        case "report" | "work":
            return replica
    raise ValueError(f"no such action: {verb}")


def _work(world: World, name: str, replica: Replica) -> Replica:
    """The first thing the agent's plan says."""
    if not world.table.generation:
        return replica
    life = str(replica.life)
    again = [name for name, ack in replica.acks.items() if not ack.accepted and ack.engine_epoch == life]
    todo = plan(
        wanted=world.table.wanted(),
        loaded=replica.loaded,
        acks=replica.acks,
        engine_epoch=life,
        busy=(),
        resting=[version for version in again if version in replica.refuses or replica.unable],
    )
    if todo.unload:
        return replace(replica, loaded=tuple(one for one in replica.loaded if one != todo.unload[0]))
    if todo.forget:
        return replace(replica, acks={key: ack for key, ack in replica.acks.items() if key not in todo.forget})
    if todo.bring or todo.confirm:
        version = (*todo.bring, *todo.confirm)[0]
        if replica.unable and version not in replica.loaded:
            ack = Ack(accepted=False, engine_epoch=life, reason="disk full", fault="replica")
            return replace(replica, acks=replica.acks | {version: ack})
        if version in replica.refuses:
            return replace(replica, acks=replica.acks | {version: Ack(accepted=False, engine_epoch=life, reason="no")})
        return replace(
            replica,
            loaded=tuple(sorted({*replica.loaded, version})),
            acks=replica.acks | {version: Ack(accepted=True, engine_epoch=life)},
        )
    return replica


def _commit(world: World) -> World:
    """scripts/decide.lua: all of it or nothing."""
    decision, world = world.read, replace(world, read=None)
    if decision is None or decision.table.generation != world.table.generation + 1:
        return world
    for need in decision.needs:
        replica = world.replicas.get(need.replica)
        if replica is None or replica.said is None or world.now - replica.at > world.config.coordinator.alive_s:
            return world
        ack = replica.acks.get(need.version)
        if replica.said.engine_epoch != need.engine_epoch:
            return world
        if need.version and (ack is None or not ack.accepted or ack.engine_epoch != need.engine_epoch):
            return world
    if found := list(violations(world, decision)):
        raise AssertionError("\n".join(found))
    return replace(
        world,
        table=decision.table,
        records=world.records | decision.records,
        events=world.events + decision.events,
        requests={name: one for name, one in world.requests.items() if name not in decision.answered},
    )


def violations(world: World, decision: Decision) -> Iterator[str]:
    """What this decision would break, each as a sentence. `world` is as it is when the decision is committed."""
    before, after = world.table, decision.table
    for run, entry in after.runs.items():
        mine = {name: version for name, version in after.versions.items() if version.run == run}
        coming = [name for name, version in mine.items() if version.state in ("staging", "ready")]
        current = [name for name, version in mine.items() if version.state == "current"]
        if len(coming) > 1:
            yield f"{run} has {len(coming)} candidates"
        if current != ([entry.current] if entry.current else []):
            yield f"{run} points to {entry.current} and {current} are current"
        known = before.runs.get(run)
        if known is not None and (entry.considered < known.considered or entry.epoch < known.epoch):
            yield f"{run} goes back in time"
        moved = known is not None and entry.current != known.current
        if moved and entry.current is not None:
            was = before.versions[entry.current].state
            if was not in ("staging", "ready", "retained"):
                yield f"{run} moves to {entry.current}, which was {was}"
            if world.config.coordinator.gate and was != "retained" and not before.versions[entry.current].admitted:
                yield f"{run} moves to {entry.current}, which nobody admitted"
            if was != "retained" and len(after.window(run)) > entry.max_staleness + 1:
                yield f"{run} has a window of {len(after.window(run))}"
    for name, version in after.versions.items():
        old = before.versions.get(name)
        if old is None and name in world.records and world.records[name].state != "published":
            yield f"{name} comes back after it was {world.records[name].state}"
        if old is not None and old.state == "retiring" and version.state != "retiring":
            yield f"{name} no longer retires"
        if old is not None and old.state in ("current", "retained") and version.state == "staging":
            yield f"{name} is staged again"
        if old is not None and version.drained and not old.drained and old.state == "retiring":
            yield from _still_served(world, name)
    for name in before.versions.keys() - after.versions.keys():
        # one that was silent reconciles when it is back
        late = world.now - before.versions[name].since > world.config.coordinator.unload_s
        holders = [
            one for one in world.heard if name in world.replicas[one].loaded and (not late or one in after.ready())
        ]
        if holders:
            yield f"{name} leaves the table while {holders} hold it"
        if before.versions[name].state != "retiring":
            yield f"{name} leaves the table as {before.versions[name].state}"
    for event in decision.events:
        if isinstance(event, VersionPromoted):
            if len(after.ready()) < world.config.coordinator.min_ready:
                yield f"{event.version} is promoted on {len(after.ready())} replicas"
            for name in after.ready():
                yield from _unproved(world, name, [event.version])
        if isinstance(event, ReplicaState) and event.state == "ready":
            yield from _unproved(world, event.replica, [name for name in after.versions if after.routable(name)])
        if (
            isinstance(event, ReplicaState)
            and event.state == "ejected"
            and len(after.ready()) < world.config.coordinator.min_ready
        ):
            yield f"{event.replica} is ejected below the floor"


def unjust(seen: Fleet, config: Config, decision: Decision) -> Iterator[str]:
    """Versions given up although all that speaks against them is what some replicas could not do themselves."""
    ready = seen.table.ready()
    for event in decision.events:
        if not isinstance(event, VersionRolledBack) or decision.answered:
            continue
        version = seen.table.versions.get(event.version)
        if version and version.state == "ready" and config.coordinator.gate_inconclusive == "refuse":
            continue  # nobody said in time that it is good
        heard = [name for name in ready if alive(seen, config, name)]
        words = [answer(seen, name, event.version, seen.table.members[name].engine_epoch) for name in heard]
        said = [ack for ack in words if ack is not None]
        blamed = any(not ack.accepted and ack.fault == "version" for ack in said)
        enough = sum(ack.accepted for ack in said) >= config.coordinator.min_ready
        if len(said) == len(ready) and enough and not blamed:
            yield f"{event.version} is rolled back for what its replicas could not do"


def _still_served(world: World, name: str) -> Iterator[str]:
    """Routers that may still send requests to a version when its unloading begins."""
    version = world.table.versions[name]
    if world.now - version.since > world.config.coordinator.drain_s:
        return
    for router, seen in world.routers.items():
        told = seen.report.generation >= version.changed_in and not seen.report.inflight.get(name)
        if not told and seen.age_s <= seen.report.max_age_s:
            yield f"{name} is unloaded while {router} serves it"


def _unproved(world: World, name: str, versions: list[str]) -> Iterator[str]:
    replica = world.replicas[name]
    for version in versions:
        ack = replica.acks.get(version)
        if replica.said is None or ack is None or not ack.accepted or ack.engine_epoch != replica.said.engine_epoch:
            yield f"{name} counts for {version}, which it did not accept in this life"


# walks


def report_all(world: World) -> World:
    for name in world.replicas:
        world = apply(world, ("report", name))
    for name in world.routers:
        world = apply(world, ("hear", name))
    return world


def coordinate(world: World, limit: int = 100) -> World:
    """Decide until nothing is left to decide."""
    for _ in range(limit):
        next_world = apply(world, ("decide",))
        if next_world.table.generation == world.table.generation:
            return next_world
        world = next_world
    raise AssertionError(f"still deciding after {limit} decisions; the last: {world.events[-5:]}")


def settle(world: World, limit: int = 200) -> World:
    """Agents work and report, routers read, the coordinator decides, until nothing changes; no time passes."""
    for _ in range(limit):
        before = world
        for name in world.replicas:
            world = apply(apply(world, ("work", name)), ("report", name))
        world = coordinate(world)
        for name in world.routers:
            world = apply(world, ("route", name))
        if world == before:
            return world
    raise AssertionError(f"not settled after {limit} rounds; the last: {world.events[-5:]}")


def calm(world: World) -> World:
    """Everything that was broken is mended, and enough time passes for everybody to come back."""
    for name in world.replicas:
        for verb in ("speak", "undrain", "relent"):
            world = apply(world, (verb, name))
    for name in world.routers:
        world = apply(world, ("mend", name))
    for _ in range(3):
        world = admit_all(settle(report_all(world)))
        world = apply(world, ("wait", str(world.config.coordinator.eject_s)))
    return admit_all(settle(report_all(world)))


def admit_all(world: World, limit: int = 10) -> World:
    """An operator admits whatever is at the gate, until nothing is."""
    for _ in range(limit):
        waiting = [(name, one.run) for name, one in world.table.versions.items() if one.state == "ready"]
        if not waiting:
            return world
        for name, run in waiting:
            world = apply(world, ("ask", f"admit-{run}", run, name, "admit"))
        world = settle(world)
    raise AssertionError(f"still at the gate: {waiting}")
