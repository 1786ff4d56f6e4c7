"""From retained to gone, and back from a bad version. Pure.

A version that retires is sent nothing new; once every router that may still serve has said so and has none of its
requests in flight, agents unload it; once no replica holds it, it is gone. Files are deleted by nobody before that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from msgspec import Struct
from msgspec.structs import replace

from adaptersync.coordinator import gate
from adaptersync.coordinator.draft import Draft
from adaptersync.coordinator.membership import accepted, alive, can_spare
from adaptersync_core.config import Config
from adaptersync_core.events import RequestRefused, VersionRetired, VersionRolledBack, VersionVoided
from adaptersync_core.keys import ROUTER_TTL_S
from adaptersync_core.records import Fleet, Request
from adaptersync_core.table import Table


class Wait(Struct, frozen=True, kw_only=True):
    """What holds a version up; it is waited for at most `left_s` longer, None: for as long as it takes."""

    what: str
    left_s: float | None


def drain(fleet: Fleet, config: Config) -> Draft | None:
    """Let agents unload what no router sends to any more."""
    draft = Draft(fleet)
    for name, version in fleet.table.versions.items():
        if version.state == "retiring" and not version.drained and not still_used(fleet, config, name):
            draft.versions[name] = replace(version, drained=True, since=fleet.now)
    return draft if draft.versions != fleet.table.versions else None


def still_used(fleet: Fleet, config: Config, name: str) -> list[Wait]:
    """Who may still send to a retiring version, or wait for its answer; nobody, once it has drained for `drain_s`.

    A router that serves the table of another incarnation has not heard of this one. After Redis was lost, one that is
    cut off may serve its last table without being known here, until it is too old to be served.
    """
    table, version = fleet.table, fleet.table.versions[name]
    left_s = config.coordinator.drain_s - (fleet.now - version.since)
    if left_s < 0:
        return []
    waits = []
    unsettled_s = ROUTER_TTL_S - (fleet.now - table.restored_at)
    if unsettled_s >= 0:
        waits.append(Wait(what="routers that a rebuilt Redis may not know of", left_s=min(unsettled_s, left_s)))
    for router, seen in fleet.routers.items():
        report = seen.report
        if not seen.may_serve:  # one that is cut off serves its last table for a time; past it, nothing, wherever it is
            continue
        if report.incarnation != table.incarnation or report.generation < version.changed_in:
            what = f"the acknowledgement of router {router}"
            waits.append(Wait(what=what, left_s=min(seen.serves_s, left_s)))
        elif count := report.inflight.get(name):
            waits.append(Wait(what=f"{count} requests in flight at router {router}", left_s=left_s))
    return waits


def forget(fleet: Fleet, config: Config) -> Draft | None:
    """Drop what every live replica has unloaded. One that is silent holds nothing up: it reconciles when it is back.

    A replica that cannot unload in time is sent nothing until it has, and holds nothing up either.
    """
    draft = Draft(fleet)
    for name, version in fleet.table.versions.items():
        if not version.drained:
            continue
        held_by = holders(fleet, config, name)
        if fleet.now - version.since > config.coordinator.unload_s:
            for replica in held_by:
                member = draft.members.get(replica)
                if member is not None and member.state == "ready" and can_spare(draft, config, 1):
                    draft.member(replica, "ejected", f"has not unloaded {name}", member)
            held_by = [replica for replica in held_by if _counts(draft, replica)]
        if not held_by:
            draft.forget(name)
            draft.events.append(VersionRetired(version=name, generation=draft.generation))
    return draft if draft.events else None


def holders(fleet: Fleet, config: Config, name: str) -> list[str]:
    """Live replicas that have a version loaded.

    A report may be older than a load; the ack of that load is not, and agents take it back once they have unloaded.
    """
    return [
        replica
        for replica, seen in fleet.replicas.items()
        if alive(fleet, config, replica)
        and (name in seen.report.loaded or accepted(fleet, replica, name, seen.report.engine_epoch))
    ]


def _counts(draft: Draft, replica: str) -> bool:
    member = draft.members.get(replica)
    return member is not None and member.state == "ready"


def spare(table: Table) -> str | None:
    """The version that goes first when another run needs room: of the run that ended first, its current one last."""
    for behind in (True, False):
        for _, run in sorted((entry.ended_at, run) for run, entry in table.runs.items() if entry.ended_at):
            window = [name for name in table.window(run) if (name != table.runs[run].current) is behind]
            if window:
                return window[-1]
    return None


def requests(fleet: Fleet, config: Config) -> Draft | None:
    """Answer the first open request of an operator; before it, all at once, those that nobody can answer."""
    draft = Draft(fleet)
    for request_id, request in sorted(fleet.requests.items()):
        if request.kind not in ANSWERS:
            draft.answered.append(request_id)
            reason = f"there is no request of kind {request.kind}"
            draft.events.append(RequestRefused(request=request_id, reason=reason))
    if draft.answered:
        return draft
    for request_id, request in sorted(fleet.requests.items()):
        draft.answered.append(request_id)
        if refusal := ANSWERS[request.kind](fleet, config, draft, request):
            draft.events.append(RequestRefused(request=request_id, reason=refusal))
        return draft
    return None


def _roll_back(fleet: Fleet, config: Config, draft: Draft, request: Request) -> str:
    """Go back to an earlier version of a run, or give up its candidate; returns why that cannot be done."""
    table = fleet.table
    entry = table.runs.get(request.run)
    if entry is None:
        return f"there is no run {request.run}"
    reason = request.reason or "asked by an operator"
    candidate = table.candidate(request.run)
    if candidate is not None and request.version == candidate:
        draft.give_up(candidate, reason, fate="rolled_back")
        draft.events.append(VersionRolledBack(version=candidate, generation=draft.generation, reason=reason))
        return ""
    if request.current is not None and request.current != (entry.current or ""):
        return f"{entry.current or 'no version'} is current by now; this was asked about {request.current or 'none'}"
    earlier = [name for name in table.window(request.run) if name != entry.current]
    target = request.version or (earlier[0] if earlier else "")
    if target not in earlier or entry.current is None:
        retained = " ".join(earlier) or "none; a stored version is served again when its directory is published again"
        return f"{target or 'an earlier version'} is not retained; retained: {retained}"
    bad = [name for name in table.window(request.run) if table.versions[name].seq > table.versions[target].seq]
    for name in bad:
        draft.retire(name, reason, fate="voided")
        draft.events.append(VersionVoided(version=name, generation=draft.generation, reason=reason, current=target))
    draft.enter(target, "current")
    draft.runs[request.run] = replace(entry, current=target)
    return ""


def _admit(fleet: Fleet, config: Config, draft: Draft, request: Request) -> str:
    """Let a version through the gate; it becomes current when its acks, looked at once more, still allow it."""
    if refusal := gate.not_there(fleet, request):
        return refusal
    draft.versions[request.version] = replace(fleet.table.versions[request.version], admitted=True)
    return ""


def _refuse(fleet: Fleet, config: Config, draft: Draft, request: Request) -> str:
    if refusal := gate.not_there(fleet, request):
        return refusal
    gate.refuse(draft, request.version, request.reason or "refused at the gate")
    return ""


def _inconclusive(fleet: Fleet, config: Config, draft: Draft, request: Request) -> str:
    if refusal := gate.not_there(fleet, request):
        return refusal
    gate.inconclusive(draft, config, request.version, request.reason or "no reason given")
    return ""


def _retire(fleet: Fleet, config: Config, draft: Draft, request: Request) -> str:
    """Give up what a run that has ended still serves: its files may be wanted out of the store."""
    table, run = fleet.table, request.run
    if run not in table.runs:
        return f"there is no run {run}"
    if not table.runs[run].ended_at:
        return f"run {run} has not ended: adaptersync end"
    window = table.window(run)
    if candidate := table.candidate(run):
        return f"{candidate} is on its way"
    if not window:
        return f"run {run} serves nothing any more"
    for name in window:
        draft.retire(name, request.reason or "asked by an operator")
    return ""


ANSWERS: Mapping[str, Callable[[Fleet, Config, Draft, Request], str]] = MappingProxyType(
    {"rollback": _roll_back, "admit": _admit, "refuse": _refuse, "inconclusive": _inconclusive, "retire": _retire}
)
