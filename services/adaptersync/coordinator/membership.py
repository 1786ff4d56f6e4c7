"""Who belongs to the fleet, and who may be sent requests. Pure.

A replica is `ready` only with acks, in this life of its engine, for everything that is served. It stops being ready
when its engine restarts (at once: it holds nothing), when it falls silent or is ejected (never below `min_ready`), or
when it drains. A silent one that the floor keeps is marked, so that routers ask it last.
"""

from __future__ import annotations

from msgspec.structs import replace

from adaptersync.coordinator.draft import Draft
from adaptersync_core.config import Config
from adaptersync_core.records import Ack, Fleet, ReplicaReport
from adaptersync_core.table import Member, Table

WHOLE = "holds all that is served"


def accepted(fleet: Fleet, replica: str, version: str, engine_epoch: str) -> bool:
    ack = answer(fleet, replica, version, engine_epoch)
    return ack is not None and ack.accepted


def answer(fleet: Fleet, replica: str, version: str, engine_epoch: str) -> Ack | None:
    """A replica's word on a version in this life of its engine."""
    ack = fleet.acks.get(replica, {}).get(version)
    return ack if ack is not None and ack.engine_epoch == engine_epoch else None


def alive(fleet: Fleet, config: Config, replica: str) -> bool:
    """Whether a replica's last heartbeat is young enough for its word to count."""
    seen = fleet.replicas.get(replica)
    return seen is not None and seen.age_s <= config.coordinator.alive_s


def served(table: Table) -> list[str]:
    """All routable versions, of all runs."""
    return sorted(name for name in table.versions if table.routable(name))


def members(fleet: Fleet, config: Config) -> Draft | None:
    """Take in what replicas report: who is new, restarted, silent, back, ready or gone."""
    draft = Draft(fleet)
    joining = any(member.state == "joining" for member in draft.members.values())
    needed = _slots_needed(fleet, config) if joining else 0
    for name, seen in fleet.replicas.items():
        if alive(fleet, config, name):
            _alive(draft, fleet, config, name, seen.report, needed)
    for name, member in fleet.table.members.items():
        if not alive(fleet, config, name):
            gone = fleet.replicas.get(name)
            _silent(draft, config, name, member, None if gone is None else gone.age_s)
    return draft if draft.events or draft.members != fleet.table.members else None


def _alive(draft: Draft, fleet: Fleet, config: Config, name: str, report: ReplicaReport, needed: int) -> None:
    fresh = Member(
        state="joining",
        url=report.url,
        engine_epoch=report.engine_epoch,
        since=fleet.now,
        block_size=report.block_size,
        ranks=report.ranks,
    )
    member = draft.members.get(name)
    if member is not None and member.state == "ready" and member.silent:
        member = draft.members[name] = replace(member, reason=WHOLE, silent=False)
    if member is None:
        draft.member(name, "joining", "new", fresh)
    elif member.engine_epoch != report.engine_epoch:
        draft.member(name, "joining", "engine restarted; it holds nothing", fresh)
    elif report.draining:
        if member.state != "draining":
            draft.member(name, "draining", "asked by its agent", member)
    elif member.state == "draining":
        draft.member(name, "joining", "no longer draining", fresh)
    elif member.state == "ejected":
        if fleet.now - member.since >= config.coordinator.eject_s:
            draft.member(name, "joining", "back after it was ejected", fresh)
    elif member.state == "joining":
        missing = _missing(fleet, config, name, report, needed)
        if not missing:
            draft.need_acks(name, report.engine_epoch, served(fleet.table))
            draft.member(name, "ready", WHOLE, fresh)
        elif missing != member.reason:
            draft.members[name] = replace(member, reason=missing)  # no event: it is still joining
    elif (member.url, member.block_size, member.ranks) != (report.url, report.block_size, report.ranks):
        draft.members[name] = replace(member, url=report.url, block_size=report.block_size, ranks=report.ranks)


def _missing(fleet: Fleet, config: Config, name: str, report: ReplicaReport, needed: int) -> str:
    """Why a replica may not be ready, or nothing; `needed` is how many adapters it has to hold."""
    if report.base_model != config.group.base_model:
        return f"serves base model {report.base_model}, the group serves {config.group.base_model}"
    slots = slots_of(report)
    if slots and slots < needed:
        return f"capacity: holds {slots} adapters, {needed} are needed; raise --max-loras and --max-cpu-loras"
    left = [version for version in report.loaded if version not in fleet.table.wanted()]
    if left:
        return f"has yet to unload {left[0]}"
    for version in served(fleet.table):
        ack = answer(fleet, name, version, report.engine_epoch)
        if ack is None:
            return f"has yet to load {version}"
        if not ack.accepted:
            return f"refused {version}: {ack.reason}"
    return ""


def _slots_needed(fleet: Fleet, config: Config) -> int:
    """What is served, and the widest window with its candidate as far as any replica could hold it.

    A run that asks for more than the whole fleet has gets a shorter window; it does not keep replicas out.
    """
    going = [entry for entry in fleet.table.runs.values() if not entry.ended_at]
    widest = max((entry.max_staleness + 2 for entry in going), default=2)
    slots = (slots_of(seen.report) for name, seen in fleet.replicas.items() if alive(fleet, config, name))
    best = max(slots, default=0)
    return max(2, len(served(fleet.table)), min(widest, best))


def slots_of(report: ReplicaReport) -> int:
    """How many adapters an engine holds without evicting one; 0 when it does not say."""
    return max(report.max_loras, report.max_cpu_loras)


def _silent(draft: Draft, config: Config, name: str, member: Member, age_s: float | None) -> None:
    said = "its record expired" if age_s is None else f"no heartbeat for {age_s:.1f} s"
    if member.state == "ready":
        # one that became ready a moment ago, or that Redis lost a moment ago, has time to speak
        if draft.now - member.since <= config.coordinator.alive_s:
            return
        if can_spare(draft, config, 1):
            draft.member(name, "ejected", f"silent: {said}", replace(member, silent=True))
        elif not member.silent:  # no event: it is still ready
            kept = f"silent: {said}; kept, since no fewer than {config.coordinator.min_ready} are to be ready"
            draft.members[name] = replace(member, reason=kept, silent=True)
    elif member.state != "ejected" or age_s is None:
        draft.gone(name, f"it drained: {said}" if member.state == "draining" else said)
    elif not member.silent:  # ejected for something else, when it still answered
        draft.members[name] = replace(member, reason=f"{member.reason}; silent since: {said}", silent=True)


def can_spare(draft: Draft, config: Config, count: int) -> bool:
    """Whether `count` ready replicas may be taken out without going below the floor."""
    ready = sum(member.state == "ready" for member in draft.members.values())
    return ready - count >= config.coordinator.min_ready
