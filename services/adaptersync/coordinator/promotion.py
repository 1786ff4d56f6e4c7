"""From published to current, or not. Pure.

One version of a run is on its way in at a time. It becomes current when every ready replica, and at least `min_ready`,
accepted it in the present life of its engine; the same is checked again where the decision is committed. If half of
those that could judge it refuse, it is rolled back; a replica that could not, by its own fault, has no vote and goes.
Where there is a gate, it waits there as `ready` until it is admitted (`gate.py`), and its acks are then looked at once
more.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from adaptersync.coordinator import retirement
from adaptersync.coordinator.draft import Draft
from adaptersync.coordinator.membership import alive, answer, can_spare, slots_of
from adaptersync_core.config import Config
from adaptersync_core.events import VersionPromoted, VersionReady, VersionRolledBack, VersionStaging, VersionSuperseded
from adaptersync_core.manifest import Manifest
from adaptersync_core.records import Ack, Fleet, Want
from adaptersync_core.registry import PUBLICATIONS_AT_ONCE
from adaptersync_core.table import ROUTABLE, LiveVersion, RunEntry

MORE_ROOM = "end a run with adaptersync end, or raise --max-loras"


def runs(fleet: Fleet, config: Config) -> Draft | None:
    """Take in runs that began, and trainers that took over: what an older one had on its way in is superseded.

    A run has ended once all that was published before its end is considered: until then more of it may be served.
    """
    draft = Draft(fleet)
    for name, record in fleet.runs.items():
        entry = fleet.table.runs.get(name, RunEntry(epoch=0, max_staleness=0))
        waiting = any(manifest.seq > entry.considered for manifest in fleet.published.get(name, ()))
        ended_at = 0.0 if waiting else record.ended_at
        draft.runs[name] = replace(entry, epoch=record.epoch, max_staleness=record.max_staleness, ended_at=ended_at)
        candidate = fleet.table.candidate(name)
        if candidate is not None and fleet.table.versions[candidate].epoch != record.epoch:
            _supersede(draft, candidate, f"trainer epoch {record.epoch} began", live=True)
    return draft if draft.runs != fleet.table.runs else None


def take_up(fleet: Fleet, config: Config) -> Draft | None:
    """Ask the fleet to load the newest publication of a run; older ones are passed over."""
    table = fleet.table
    ready = table.ready()
    slots = _slots(fleet)
    for run, entry in table.runs.items():
        newer = unconsidered(fleet, run)
        if not newer or held_back(fleet, config, run):
            continue
        if len(newer) > PUBLICATIONS_AT_ONCE:
            return _pass_over(fleet, run, newer[:PUBLICATIONS_AT_ONCE], newer[-1])
        if _full(fleet, run, newer[-1], slots):
            held = len(table.versions)
            return (
                _end_window(fleet, run)
                or _make_room(fleet, run, newer[-1].adapter_id, slots)
                or _refuse(
                    fleet,
                    run,
                    newer,
                    f"capacity: {held} of {slots} adapters that replicas can hold are current versions; {MORE_ROOM}",
                )
            )
        draft = Draft(fleet)
        newest = next((one for one in reversed(newer) if one.adapter_id not in fleet.fates), None)
        draft.runs[run] = replace(entry, considered=newer[-1].seq)
        for manifest in newer:
            if newest is None or manifest.adapter_id in fleet.fates:  # Redis lost that it was decided before
                fate = fleet.fates[manifest.adapter_id]
                draft.record(manifest.adapter_id, fate.state, fate.reason, fate.want)
            elif manifest.epoch != entry.epoch:
                reason = f"published by trainer epoch {manifest.epoch}, which {entry.epoch} replaced"
                _supersede(draft, manifest.adapter_id, reason)
            elif manifest is not newest:
                _supersede(draft, manifest.adapter_id, f"{newest.adapter_id} came before it was staged")
            else:
                draft.take_up(
                    manifest.adapter_id,
                    LiveVersion(
                        run=run,
                        seq=manifest.seq,
                        epoch=manifest.epoch,
                        digest=manifest.digest,
                        state="staging",
                        published_at=manifest.created_at,
                        since=fleet.now,
                        changed_in=draft.generation,
                    ),
                )
                draft.events.append(
                    VersionStaging(version=manifest.adapter_id, generation=draft.generation, replicas=" ".join(ready))
                )
        return draft
    return None


def held_back(fleet: Fleet, config: Config, run: str) -> str:
    """Why what a run published is not taken up now; nothing, when it is."""
    table, newer = fleet.table, unconsidered(fleet, run)
    if few := too_few(fleet, config):
        return few  # an empty fleet promotes nothing
    candidate = table.candidate(run)
    if candidate is not None:
        return f"{candidate}, which is on its way"
    slots = _slots(fleet)
    if newer and len(newer) <= PUBLICATIONS_AT_ONCE and _full(fleet, run, newer[-1], slots):
        moving = [name for name, version in table.versions.items() if version.state not in ROUTABLE]
        if moving:  # on its way, in or out: that makes room
            return f"capacity: {len(table.versions)} of {slots} adapters are held, {', '.join(moving)} among them"
    return ""


def too_few(fleet: Fleet, config: Config) -> str:
    """What is missing while fewer replicas are ready than a promotion needs."""
    ready, needed = len(fleet.table.ready()), config.coordinator.min_ready
    return "" if ready >= needed else f"{needed} replicas to be ready, {ready} are"


def unconsidered(fleet: Fleet, run: str) -> list[Manifest]:
    """What a run published that was not yet considered, oldest first."""
    considered = fleet.table.runs[run].considered
    return [manifest for manifest in fleet.published.get(run, ()) if manifest.seq > considered]


def _slots(fleet: Fleet) -> int:
    """What every ready replica can hold; 0 when none says."""
    ready = [name for name in fleet.table.ready() if name in fleet.replicas]
    return min(filter(None, (slots_of(fleet.replicas[name].report) for name in ready)), default=0)


def _full(fleet: Fleet, run: str, newest: Manifest, slots: int) -> bool:
    """Whether a load would evict something live. What a former trainer published needs no room to be passed over."""
    entry = fleet.table.runs[run]
    room = slots if entry.current else slots - 1  # a new run leaves one for the candidates of all
    return bool(slots) and len(fleet.table.versions) >= room and newest.epoch == entry.epoch


def _pass_over(fleet: Fleet, run: str, older: Sequence[Manifest], newest: Manifest) -> Draft:
    """A part of what piled up while nobody decided, or no replica was ready; what follows is read next."""
    draft = Draft(fleet)
    draft.runs[run] = replace(fleet.table.runs[run], considered=older[-1].seq)
    for manifest in older:
        _supersede(draft, manifest.adapter_id, f"{newest.adapter_id} came before it was staged")
    return draft


def _end_window(fleet: Fleet, run: str) -> Draft | None:
    """Take a version of a run that has ended; nobody waits for it."""
    spare = retirement.spare(fleet.table)
    if spare is None:
        return None
    draft = Draft(fleet)
    draft.retire(spare, f"capacity: its run has ended, and {run} needs the room")
    return draft


def _make_room(fleet: Fleet, run: str, newest: str, slots: int) -> Draft | None:
    """Take the oldest version from the longest window, of equals from the run's own; None when all are down to one.

    Otherwise runs that filled the slots together would keep each other, and themselves, from ever promoting again.
    """
    table = fleet.table
    windows = {name: table.window(name) for name in table.runs}
    longest = max(windows, key=lambda name: (len(windows[name]), name == run))
    spare = [name for name in windows[longest] if name != table.runs[longest].current]
    if not spare:
        return None
    draft = Draft(fleet)
    draft.retire(spare[-1], f"capacity: {newest} needs one of the {slots} adapters that replicas can hold")
    return draft


def _refuse(fleet: Fleet, run: str, newer: list[Manifest], reason: str) -> Draft:
    """Nothing at rest will make room for what was published."""
    draft = Draft(fleet)
    draft.runs[run] = replace(fleet.table.runs[run], considered=newer[-1].seq)
    for manifest in newer:
        draft.record(manifest.adapter_id, "rolled_back", reason, "room")
        draft.events.append(VersionRolledBack(version=manifest.adapter_id, generation=draft.generation, reason=reason))
    return draft


def conclude(fleet: Fleet, config: Config) -> Draft | None:
    """Promote, roll back, or eject who stands alone, for the first candidate whose answers allow it."""
    table = fleet.table
    ready = table.ready()
    if too_few(fleet, config):
        return None  # not the version's fault: it waits for the fleet
    for run in table.runs:
        candidate = table.candidate(run)
        if candidate is None:
            continue
        answers = _answers(fleet, config, candidate)
        against = {name: ack for name, ack in answers.items() if ack is not None and not ack.accepted}
        refused = {name: ack.reason for name, ack in against.items() if ack.fault == "version"}
        unable = {name: ack.reason for name, ack in against.items() if name not in refused}
        silent = [name for name, ack in answers.items() if ack is None]
        if not against and not silent:
            version = table.versions[candidate]
            if not config.coordinator.gate or version.admitted:
                return _promote(fleet, run, candidate, ready)
            if version.state == "ready":
                continue
            return _to_the_gate(fleet, candidate, ready)
        if refused and len(refused) * 2 >= len(ready) - len(unable):
            return _roll_back(fleet, candidate, "; ".join(f"{name}: {why}" for name, why in refused.items()))
        deadline_s = config.coordinator.deadline_s
        if any(_left_s(fleet, config, candidate, name) >= 0 for name in silent):
            continue
        # what is left stands against replicas that accepted, or kept silent too long
        odd = {name: f"refused {candidate}: {why}" for name, why in refused.items()}
        odd |= {name: f"cannot take {candidate}: {why}" for name, why in unable.items()}
        odd |= {name: f"no ack of {candidate} in {deadline_s:g} s" for name in silent}
        draft = Draft(fleet)
        if len(odd) == len(ready) or not can_spare(draft, config, len(odd)):
            why = "; ".join(f"{name}: {why}" for name, why in odd.items())
            return _roll_back(fleet, candidate, why, want="" if refused else "time")
        for name, why in odd.items():
            draft.member(name, "ejected", why, table.members[name])
        return draft
    return None


def unanswered(fleet: Fleet, config: Config, candidate: str) -> dict[str, float]:
    """Ready replicas whose word on a candidate is waited for, and for how many seconds more."""
    silent = [name for name, ack in _answers(fleet, config, candidate).items() if ack is None]
    return {name: max(0.0, _left_s(fleet, config, candidate, name)) for name in silent}


def _answers(fleet: Fleet, config: Config, candidate: str) -> dict[str, Ack | None]:
    """The word of each ready replica; that of one that fell silent is not taken."""
    return {
        name: answer(fleet, name, candidate, fleet.table.members[name].engine_epoch)
        if alive(fleet, config, name)
        else None
        for name in fleet.table.ready()
    }


def _left_s(fleet: Fleet, config: Config, candidate: str, replica: str) -> float:
    """Until its deadline, which counts from when it was asked: at staging, or when it became ready later."""
    asked = max(fleet.table.versions[candidate].since, fleet.table.members[replica].since)
    return config.coordinator.deadline_s - (fleet.now - asked)


def _to_the_gate(fleet: Fleet, candidate: str, ready: list[str]) -> Draft:
    draft = Draft(fleet)
    for name in ready:
        draft.need_acks(name, fleet.table.members[name].engine_epoch, [candidate])
    draft.enter(candidate, "ready")
    draft.events.append(VersionReady(version=candidate, generation=draft.generation, replicas=" ".join(ready)))
    return draft


def _promote(fleet: Fleet, run: str, candidate: str, ready: list[str]) -> Draft:
    draft = Draft(fleet)
    table = fleet.table
    entry = table.runs[run]
    version = table.versions[candidate]
    for name in ready:
        draft.need_acks(name, table.members[name].engine_epoch, [candidate])
    draft.enter(candidate, "current")
    previous = entry.current
    if previous in draft.versions and previous is not None:
        draft.enter(previous, "retained")
    draft.runs[run] = replace(entry, current=candidate)
    draft.events.append(
        VersionPromoted(
            version=candidate,
            generation=draft.generation,
            replicas=" ".join(ready),
            previous=previous or "",
            waited_s=max(0.0, fleet.now - version.published_at),
        )
    )
    # the window: promotions of this epoch, the newest max_staleness beside the current one
    behind = [name for name in table.window(run) if table.versions[name].epoch == version.epoch]
    for name in table.window(run):
        if name not in behind:
            draft.retire(name, f"of trainer epoch {table.versions[name].epoch}, which {version.epoch} replaced")
        elif name not in behind[: entry.max_staleness]:
            draft.retire(name, f"beyond the window of {candidate}")
    return draft


def _roll_back(fleet: Fleet, candidate: str, reason: str, *, want: Want = "") -> Draft:
    draft = Draft(fleet)
    draft.give_up(candidate, reason, fate="rolled_back", want=want)
    draft.events.append(VersionRolledBack(version=candidate, generation=draft.generation, reason=reason))
    return draft


def _supersede(draft: Draft, name: str, reason: str, *, live: bool = False) -> None:
    if live:
        draft.give_up(name, reason, fate="superseded")
    else:
        draft.record(name, "superseded", reason)
    draft.events.append(VersionSuperseded(version=name, generation=draft.generation, reason=reason))
