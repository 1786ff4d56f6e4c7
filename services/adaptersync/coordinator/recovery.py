"""Whether Redis lost what was decided, and what it is rebuilt from."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping

import msgspec
from msgspec.structs import replace

from adaptersync.coordinator.journal import Recollection
from adaptersync_core.errors import StoreError
from adaptersync_core.events import VersionRolledBack, VersionVoided
from adaptersync_core.identity import parse_adapter_id
from adaptersync_core.manifest import Manifest
from adaptersync_core.records import Decision, Fleet, Leadership, RunRecord, VersionRecord
from adaptersync_core.store import ArtifactStore
from adaptersync_core.table import Fate, LiveState, Table

VERSIONS = 256  # stored versions of a run that are announced again, the latest

log = logging.getLogger(__name__)


def lost(lease: Leadership, table: Table, journaled: Table) -> bool:
    """Redis was emptied, wholly or in part, put in place anew, or set back to an older state than the journal's.

    `lease` was read after `table`, in a term in which nobody else decides: unless something was lost they agree.
    """
    return (
        table.generation != lease.generation
        or table.generation < journaled.generation
        or (table.generation == journaled.generation and table.incarnation != journaled.incarnation)
    )


def restored(known: Recollection, present: Table, *, incarnation: str, now: float) -> Table:
    """The table to go on from, in a generation and an incarnation of its own, without what was about to be refused.

    A promotion that was committed and not journaled is lost: its version is a candidate again, marked as one that
    routers may know. Everybody has time to be heard of again.
    """
    generation = max(known.table.generation, present.generation) + 1
    table = _without(exposed(known.table), known.fates, generation, now)
    members = {name: replace(member, since=now) for name, member in table.members.items()}
    return replace(table, incarnation=incarnation, restored_at=now, members=members)


def restored_records(table: Table, fates: Mapping[str, VersionRecord]) -> dict[str, VersionRecord]:
    """What is written of each version: of one in the restored table what it is there, else the fate that is known."""
    live = {
        name: VersionRecord(
            state=version.fate if version.state == "retiring" and version.fate != "retired" else version.state,
            generation=version.changed_in,
            at=version.since,
        )
        for name, version in table.versions.items()
    }
    return live | dict(fates)


def renewed(fleet: Fleet, fates: Mapping[str, VersionRecord]) -> Decision:
    """A term's first decision when there is no other: whoever saw a table that was lost takes this for the newer.

    It carries out the refusals that a former leader was about to commit, or had, when Redis lost that.
    """
    records = {name: fates[name] for name in refused(fleet.table, fates)}
    table = _without(fleet.table, records, fleet.table.generation + 1, fleet.now)
    events = [
        VersionVoided(version=name, generation=table.generation, reason=record.reason, current=_current(table, name))
        if record.state == "voided"
        else VersionRolledBack(version=name, generation=table.generation, reason=record.reason)
        for name, record in records.items()
    ]
    return Decision(table=table, records=records, events=tuple(events))


def refused(table: Table, fates: Mapping[str, VersionRecord]) -> list[str]:
    """Versions that the table serves, or may, although they were about to be refused after it was written."""
    return [name for name, version in table.versions.items() if name in fates and version.state != "retiring"]


def _without(table: Table, fates: Mapping[str, VersionRecord], generation: int, now: float) -> Table:
    versions, runs = dict(table.versions), dict(table.runs)
    for name in refused(table, fates):
        state: LiveState = "retiring"
        versions[name] = replace(versions[name], state=state, fate=_fate(fates[name]), since=now, changed_in=generation)
    for run, entry in table.runs.items():
        if entry.current and versions[entry.current].state == "retiring":
            left = replace(table, versions=versions).window(run)
            runs[run] = replace(entry, current=left[0] if left else None)
            if left:
                versions[left[0]] = replace(versions[left[0]], state="current", since=now, changed_in=generation)
    return replace(table, generation=generation, written_at=now, runs=runs, versions=versions)


def _fate(record: VersionRecord) -> Fate:
    fate: Fate = msgspec.convert(record.state, Fate)
    return fate


def _current(table: Table, name: str) -> str:
    return table.runs[table.versions[name].run].current or ""


def exposed(table: Table) -> Table:
    """The table with its candidates marked: what a former leader committed last may have promoted them, and be lost."""
    marked = {
        name: replace(version, exposed=True)
        for name, version in table.versions.items()
        if version.state in ("staging", "ready")
    }
    return replace(table, versions=table.versions | marked)


def stored_manifests(store: ArtifactStore) -> list[Manifest]:
    """Manifests of the latest stored versions of each run; one that cannot be read is left out, and said."""
    latest: defaultdict[str, deque[str]] = defaultdict(lambda: deque(maxlen=VERSIONS))
    for name in store.versions():
        latest[parse_adapter_id(name).run].append(name)
    manifests = []
    for name in (name for names in latest.values() for name in names):
        try:
            manifests.append(store.read_manifest(name))
        except StoreError as error:
            log.warning("not announced again: %s", error)
    return manifests


def highest_numbers(known: Mapping[str, RunRecord], manifests: Iterable[Manifest]) -> dict[str, RunRecord]:
    """The highest epoch and sequence number of each run that either the journal or the store has seen."""
    runs = dict(known)
    for manifest in manifests:
        run = runs.get(manifest.run, RunRecord(epoch=0, seq=0, max_staleness=0))
        runs[manifest.run] = replace(run, epoch=max(run.epoch, manifest.epoch), seq=max(run.seq, manifest.seq))
    return runs
