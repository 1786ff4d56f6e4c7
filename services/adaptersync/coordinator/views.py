"""What the fleet looks like to a person: rows for tables and documents for programs, from what was read. No I/O.

Ages and waits are seconds. A view is healthy when nothing needs an operator; `problems` says what does.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from msgspec import Struct

from adaptersync.coordinator.hosts import HostView, host_problems, hosts
from adaptersync.coordinator.membership import slots_of
from adaptersync.coordinator.waits import WaitView
from adaptersync_core.errors import MEND
from adaptersync_core.job_records import JobFailure
from adaptersync_core.keys import TRAINER_ALIVE_S
from adaptersync_core.manifest import Manifest
from adaptersync_core.records import Ack, CacheReport, Fleet, RunRecord, SeenReplica
from adaptersync_core.rollouts import SERVED, UNKNOWN, Row
from adaptersync_core.scaling import Scale
from adaptersync_core.table import Member, RunEntry

NOT_TOLD = ("type", "digest", "seq", "published_at", "engine_epoch", "incarnation", "generation")  # in events
RESIGNED_S = 1e9  # who resigns leaves a lease that ran out when time began


class ReplicaView(Struct, frozen=True, kw_only=True):
    """`holds` of `wanted` versions are accepted in its engine's present life. `age_s`: since its last heartbeat."""

    replica: str
    state: str
    reason: str
    age_s: float | None
    since_s: float | None
    holds: int
    wanted: int
    slots: int
    url: str
    engine: str
    engine_epoch: str
    cache: CacheReport = CacheReport()


class RunView(Struct, frozen=True, kw_only=True):
    """`waiting` publications were not taken up yet; `replicas` of `ready` accepted the current version.

    `trainer` is alive, silent or ended; `heard_s` since it was last heard of, None when it never was.
    """

    run: str
    epoch: int
    current: str
    since_s: float | None
    candidate: str
    window: list[str]
    waiting: int
    replicas: int
    ready: int
    trainer: str
    heard_s: float | None


class RouterView(Struct, frozen=True, kw_only=True):
    """`age_s`: since its last report. `missing`: versions that replicas did not know when asked, by replica."""

    router: str
    url: str
    generation: int
    behind: int
    inflight: int
    age_s: float
    missing: dict[str, list[str]] = {}


class StatusView(Struct, frozen=True, kw_only=True):
    group: str
    healthy: bool
    problems: list[str]
    generation: int
    leader: str
    lease_left_s: float
    replicas: list[ReplicaView]
    runs: list[RunView]
    routers: list[RouterView]
    waits: list[WaitView] = []
    hosts: list[HostView] = []
    failed_jobs: list[JobFailure] = []


class AckView(Struct, frozen=True, kw_only=True):
    accepted: bool
    reason: str
    phases: dict[str, float]


class RolloutCounts(Struct, frozen=True, kw_only=True):
    """Of one version: `unknown` ones have no known end, `voided` ones must not be trained on."""

    total: int = 0
    ok: int = 0
    unknown: int = 0
    voided: int = 0


class VersionView(Struct, frozen=True, kw_only=True):
    """`promoted_s` counts from publication to the first promotion.

    `verified` is None until the stored bytes were read again, `rollouts` when the ledger was not read.
    """

    version: str
    run: str
    seq: int
    state: str
    reason: str
    step: int | None
    size: int | None
    rank: int | None
    noop: str
    age_s: float | None
    promoted_s: float | None
    verified: bool | None
    acks: dict[str, AckView]
    rollouts: RolloutCounts | None = None

    def phase(self, name: str) -> float | None:
        """The slowest replica's seconds in a phase: what the fleet waited for."""
        return max((ack.phases[name] for ack in self.acks.values() if name in ack.phases), default=None)


class Facts(Struct, frozen=True, kw_only=True):
    """What is kept of one version: its manifest and the fields of its record, each as far as it is still there."""

    version: str
    run: str
    seq: int
    manifest: Manifest | None
    record: dict[str, str]


def status(
    fleet: Fleet,
    *,
    group: str,
    leader: str,
    lease_left_s: float,
    alive_s: float,
    waits: Sequence[WaitView] = (),
    corrupt: Mapping[str, str] = MappingProxyType({}),
    cache_problem: str = "",
    scales: Mapping[str, Scale] = MappingProxyType({}),
    workers: Mapping[str, int] | None = None,
    failed_jobs: Sequence[JobFailure] = (),
    unarchived_s: float | None = None,
    late_s: float = math.inf,
    ahead: Sequence[str] = (),
) -> StatusView:
    """The fleet as it is, what is wrong with it, and what `waits`.

    `corrupt` says of a live version what was found wrong with its stored bytes. `scales` are what hosts were asked to
    run, `workers` how many run there, None where that may not be read. What was written `unarchived_s` ago is in no
    archive yet, and should be after `late_s`. `ahead` are streams whose ids are not the clock's any more.
    """
    replicas = list(_replicas(fleet))
    runs = [_run(fleet, run) for run in sorted(fleet.runs.keys() | fleet.table.runs.keys())]
    routers = [
        RouterView(
            router=name,
            url=seen.report.url,
            generation=seen.report.generation,
            behind=max(0, fleet.table.generation - seen.report.generation),
            inflight=sum(seen.report.inflight.values()),
            age_s=seen.age_s,
            missing=seen.report.missing,
        )
        for name, seen in sorted(fleet.routers.items())
        if seen.may_serve
    ]
    placed = list(hosts(fleet, replicas, scales, workers))
    problems = [
        *_leader_problems(leader, lease_left_s),
        *_replica_problems(replicas, fleet.table.min_ready, alive_s),
        *(_run_problem(run) for run in runs if run.current and run.replicas < run.ready),
        *_router_problems(routers, alive_s),
        *host_problems(placed),
        *(_corrupt_problem(version, reason) for version, reason in sorted(corrupt.items())),
        *([f"cache server: {cache_problem}"] if cache_problem else []),
        *map(_job_problem, failed_jobs),
        *(f"stream {name} is ahead of the clock: its events and rows may be refused; {MEND}" for name in ahead),
        *([_archive_problem(unarchived_s)] if unarchived_s is not None and unarchived_s > late_s else []),
    ]
    return StatusView(
        group=group,
        healthy=not problems,
        problems=problems,
        generation=fleet.table.generation,
        leader=leader if lease_left_s > 0 else "",
        lease_left_s=max(0.0, lease_left_s),
        replicas=replicas,
        runs=runs,
        routers=routers,
        waits=list(waits),
        hosts=placed,
        failed_jobs=list(failed_jobs),
    )


def _replicas(fleet: Fleet) -> Iterator[ReplicaView]:
    wanted = fleet.table.wanted()
    for name in sorted(fleet.table.members.keys() | fleet.replicas.keys()):
        member: Member | None = fleet.table.members.get(name)
        seen: SeenReplica | None = fleet.replicas.get(name)
        if member is None and seen is not None and seen.report.draining:
            continue  # it left in order, and its record is kept for a while
        epoch = seen.report.engine_epoch if seen else ""
        accepted = [v for v, ack in fleet.acks.get(name, {}).items() if _serves(ack, epoch)]
        yield ReplicaView(
            replica=name,
            state=member.state if member else "unknown",
            reason=member.reason if member else "the coordinator has not taken it in",
            age_s=seen.age_s if seen else None,
            since_s=fleet.now - member.since if member else None,
            holds=len(set(accepted) & set(wanted)),
            wanted=len(wanted),
            slots=slots_of(seen.report) if seen else 0,
            url=member.url if member else seen.report.url if seen else "",
            engine=seen.report.engine if seen else "",
            engine_epoch=epoch,
            cache=seen.report.cache if seen else CacheReport(),
        )


def _run(fleet: Fleet, run: str) -> RunView:
    entry = fleet.table.runs.get(run, RunEntry(epoch=0, max_staleness=0))
    current = fleet.table.versions.get(entry.current or "")
    ready = fleet.table.ready()
    epochs = {name: seen.report.engine_epoch for name, seen in fleet.replicas.items()}
    holding = [
        name
        for name in ready
        if (ack := fleet.acks.get(name, {}).get(entry.current or "")) and _serves(ack, epochs.get(name, ""))
    ]
    trainer, heard_s = _trainer(fleet.runs.get(run), fleet.now)
    return RunView(
        run=run,
        epoch=fleet.runs[run].epoch if run in fleet.runs else entry.epoch,
        current=entry.current or "",
        since_s=fleet.now - current.since if current else None,
        candidate=fleet.table.candidate(run) or "",
        window=fleet.table.window(run),
        waiting=len(fleet.published.get(run, ())),
        replicas=len(holding),
        ready=len(ready),
        trainer=trainer,
        heard_s=heard_s,
    )


def followed(cache: CacheReport) -> str:
    """What routers know of a replica's cache, in a few words."""
    if not cache.followed:
        return "as routed"
    lost = f", {cache.losses} lost" if cache.losses else ""
    return f"{cache.blocks} blocks, {duration(cache.lag_s)}{lost}"


def _trainer(known: RunRecord | None, now: float) -> tuple[str, float | None]:
    heard_s = max(0.0, now - known.heartbeat_ms / 1000) if known and known.heartbeat_ms else None
    if known and known.ended_at:
        return "ended", heard_s
    return "silent" if heard_s is None or heard_s >= TRAINER_ALIVE_S else "alive", heard_s


def _serves(ack: Ack, engine_epoch: str) -> bool:
    return ack.accepted and bool(engine_epoch) and ack.engine_epoch == engine_epoch


def _leader_problems(leader: str, lease_left_s: float) -> Iterator[str]:
    if not leader:
        yield "no coordinator has ever led this group"
    elif lease_left_s < -RESIGNED_S:
        yield f"no coordinator leads; {leader} gave up its lease: its log says why"
    elif lease_left_s <= 0:
        yield f"no coordinator leads; {leader} stopped {duration(-lease_left_s)} ago"


def _replica_problems(replicas: list[ReplicaView], min_ready: int, alive_s: float) -> Iterator[str]:
    ready = sum(replica.state == "ready" for replica in replicas)
    if ready < min_ready:
        yield f"{ready} replicas are ready, {min_ready} are needed"
    for replica in replicas:
        if replica.state not in ("ready", "draining"):
            yield f"{replica.replica} is {replica.state}: {replica.reason or 'no reason known'}"
        elif replica.age_s is None or replica.age_s > alive_s:
            yield f"{replica.replica} is silent" + (f" for {duration(replica.age_s)}" if replica.age_s else "")


def _router_problems(routers: list[RouterView], alive_s: float) -> Iterator[str]:
    if not any(router.age_s <= alive_s for router in routers):
        yield "no router reports"
    for router in routers:
        if router.age_s > alive_s:
            yield f"{router.router} is silent for {duration(router.age_s)}; retirement waits until it cannot serve"
    heard = [router for router in routers if router.age_s <= alive_s]
    lost = {(replica, version) for each in heard for replica, names in each.missing.items() for version in names}
    for replica, version in sorted(lost):
        yield f"{replica} did not know {version} when asked; not asked for it until its agent has confirmed it"


def _run_problem(run: RunView) -> str:
    return f"{run.current} is held by {run.replicas} of {run.ready} ready replicas"


def corrupt(records: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """What was found wrong with the stored bytes of versions, from the fields of their records."""
    return {
        version: record.get("verified_reason") or "no reason known"
        for version, record in records.items()
        if record.get("verified_ok") == "false"
    }


def _corrupt_problem(version: str, reason: str) -> str:
    return (
        f"stored {version} is corrupt or missing: {reason}; no replica can join while it is served: "
        "roll back, or publish again until it has left the window; once its files are mended, adaptersync verify"
    )


def _job_problem(job: JobFailure) -> str:
    about = f" of {job.about}" if job.about else ""
    return f"job {job.function}{about} failed: {job.reason}; it counts for a day, or until it is asked for again"


def _archive_problem(unarchived_s: float) -> str:
    return (
        f"nothing of the last {duration(unarchived_s)} is archived, and it fills the control server's memory: "
        "see that adaptersync worker runs, and what its jobs say (adaptersync jobs)"
    )


def versions(facts: list[Facts], fleet: Fleet) -> list[VersionView]:
    """One view a version, in the order given."""
    return [_version(each, fleet) for each in facts]


def _version(facts: Facts, fleet: Fleet) -> VersionView:
    manifest, record = facts.manifest, facts.record
    published_at = manifest.created_at if manifest else None
    promoted_at = float(record["current_at"]) if "current_at" in record else None
    state = record.get("state", "published")
    return VersionView(
        version=facts.version,
        run=facts.run,
        seq=facts.seq,
        state=state,
        reason=record.get("reason", ""),
        step=manifest.step if manifest else None,
        size=manifest.size if manifest else None,
        rank=manifest.shape.rank if manifest else None,
        noop=manifest.noop if manifest else "",
        age_s=fleet.now - published_at if published_at is not None else None,
        promoted_s=promoted_at - published_at if promoted_at is not None and published_at is not None else None,
        verified=record["verified_ok"] == "true" if "verified_ok" in record else None,
        acks={
            replica: AckView(accepted=ack.accepted, reason=ack.reason, phases=ack.phases)
            for replica, acks in sorted(fleet.acks.items())
            if (ack := acks.get(facts.version))
        },
    )


def count_rollouts(rows: Iterable[Row]) -> dict[str, RolloutCounts]:
    """By version."""
    by_version: dict[str, list[Row]] = {}
    for row in rows:
        by_version.setdefault(row.version, []).append(row)
    return {
        version: RolloutCounts(
            total=len(mine),
            ok=sum(row.outcome == SERVED for row in mine),
            unknown=sum(row.outcome == UNKNOWN for row in mine),
            voided=sum(row.voided for row in mine),
        )
        for version, mine in by_version.items()
    }


def tell(fields: Mapping[str, str]) -> tuple[str, str]:
    """(whom it concerns, what happened) of an event, from its stream fields; works for events not known yet."""
    rest = {name: value for name, value in fields.items() if name not in NOT_TOLD}
    subject = next((rest.pop(name) for name in ("version", "replica", "run", "coordinator") if name in rest), "")
    said = []
    if "accepted" in rest:
        said.append(f"{'accepted' if rest.pop('accepted') == 'true' else 'refused'} by {rest.pop('replica', '?')}")
    said += [rest.pop(name) for name in ("state", "reason") if name in rest]
    said += [_told(name, value) for name, value in rest.items()]
    return subject, "  ".join(each for each in said if each)


def _told(name: str, value: str) -> str:
    with contextlib.suppress(ValueError):  # no service wrote this
        if name.endswith("_s"):
            return f"{name[:-2]} {duration(float(value))}"
        if name == "size":
            return size(int(value))
    if value in ("true", "false"):
        return name if value == "true" else f"not {name}" if name == "ok" else ""
    return f"{name.replace('_', ' ')} {value}"


def duration(seconds: float) -> str:
    """As short as it can be read: 40 ms, 1.5 s, 12 s, 3 min, 2 h, 5 d."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    for limit, unit, size in ((300, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def size(count: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
