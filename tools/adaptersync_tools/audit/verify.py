"""Everything that the ledger says of a run, held against everything else that is known of it.

A line is a contradiction: two things that cannot both be true. What an event would prove that Redis lost, or that was
never archived, is `unproven`, and counted. Clocks: what is ordered is ordered by entries, which one server dated; a
router's own clock only ever excuses.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

from msgspec import Struct

from adaptersync_core.archive import Archive
from adaptersync_core.archived import TABLES
from adaptersync_core.chain import ROW_LATE_S, place
from adaptersync_core.errors import NameInvalid, StoreError
from adaptersync_core.fates import TRAINED
from adaptersync_core.identity import parse_adapter_id
from adaptersync_core.keys import ROUTER_TTL_S
from adaptersync_core.rollouts import SERVED, UNKNOWN, Row
from adaptersync_core.store import ArtifactStore
from adaptersync_tools.audit import chain
from adaptersync_tools.audit.evidence import Evidence, Version, read_evidence
from adaptersync_tools.audit.rollouts import Rollout, read_rollouts

GAPS = 20  # told of one router process; of more their number


class Counts(Struct, kw_only=True):
    """What was looked at. `unproven` rows rest on events that are not in the archive, `unfinished` files on no link."""

    links: int = 0
    files: int = 0
    unfinished: int = 0
    rollouts: int = 0
    rows: int = 0
    unknown: int = 0
    voided: int = 0
    unproven: int = 0
    trained: int = 0
    dropped: int = 0
    versions: int = 0
    heads: dict[str, str] = {}


class Audit:
    """`counts` fills as `contradictions` is read."""

    def __init__(self, store: Path, group: str, run: str, noted: Mapping[str, Mapping[int, str]] | None = None) -> None:
        self.counts = Counts(heads={})
        self._store = ArtifactStore(store)
        self._run = run
        self._noted = noted or {}
        self._archives = {name: Archive(store, group, name) for name in TABLES}
        self._settled_ms = 0  # what is told of until then has its row by now

    def contradictions(self) -> Iterator[str]:
        """One line each; NameInvalid when nothing is known of such a run."""
        count = 0
        ends = chain.Ends()
        for archive in self._archives.values():
            yield from chain.contradictions(archive, self._noted.get(archive.root.name, {}), ends)
            with contextlib.suppress(StoreError):  # that is told, and other tables have more to tell
                self._count(archive)
        yield from ends.beside(self._archives["events"].root.parent)
        yield from ends.contradictions()
        self._settle(ends)
        evidence = read_evidence(self._archives["events"], self._store, self._run, lenient=True)
        yield from evidence.contradictions
        self.counts.versions = len(evidence.versions)
        rollouts_of = (self._archives["rollouts"], self._archives["fates"], self._run, evidence)
        for rollouts in read_rollouts(*rollouts_of, lenient=True):  # the chain's contradictions tell of the rest
            for rollout in rollouts:
                count += 1
                for what in self._rollout(rollout, evidence):
                    yield f"{rollout.request_id}: {what}"
        if not count and not evidence.known:
            next_step = "see the directories run=... below .ledger in the store"
            raise NameInvalid("nothing is archived of such a run", next_step=next_step, run=self._run)
        yield from self._gaps()

    def _count(self, archive: Archive) -> None:
        head, counts = archive.head(), self.counts
        if head:
            counts.links += head.link.number
            counts.heads[archive.root.name] = f"{head.link.number}:{head.sha256}"
        pending = archive.pending()  # first: what a note tells of no more, the chain does
        files = archive.files(lenient=True)
        counts.files += len(files)
        counts.unfinished += sum(os.path.exists(archive.root / path) for path in pending.difference(files))

    def _rollout(self, rollout: Rollout, evidence: Evidence) -> Iterator[str]:
        counts, row = self.counts, rollout.row
        if row is None:
            if rollout.told_at and rollout.told_at[0] < self._settled_ms:
                yield f"its trainer says {rollout.fate}, and no row tells of it"
            return
        counts.rollouts += 1
        counts.rows += rollout.entries
        counts.unknown += row.outcome == UNKNOWN
        counts.voided += row.voided
        counts.trained += rollout.fate == TRAINED
        counts.dropped += rollout.fate == "dropped"
        for entry in rollout.repeated:
            yield f"entry {entry} is archived twice"
        if len(rollout.ends) > 1:
            told = " and ".join(f"{end.outcome} by {end.version or 'nobody'} at {end.replica}" for end in rollout.ends)
            yield f"rows differ in how it ended: {told}"
        if rollout.fate == TRAINED and row.outcome not in (SERVED, UNKNOWN):
            yield f"trained on, and its outcome is {row.outcome}"
        if row.version:
            yield from self._version(row, rollout, evidence)

    def _version(self, row: Row, rollout: Rollout, evidence: Evidence) -> Iterator[str]:
        try:
            name = parse_adapter_id(row.version)
        except NameInvalid:
            yield f"served by {row.version}, which cannot name a version"
            return
        if name.run != row.run:
            yield f"served by {row.version}, which is not of run {row.run}"
            return
        version = evidence.versions.get(row.version, Version())
        for digest, whose in ((version.digest, "announced"), (version.stored, "in the store")):
            if digest and row.digest != digest:
                yield f"has digest {row.digest or 'none'}, {whose} is {digest}"
        if not row.digest.startswith(name.digest12):
            yield f"has digest {row.digest or 'none'} and was served by {row.version}"
        for gone, what in ((version.retired, "retired"), (version.voided, "voided")):
            if gone is not None and began_after(row, rollout, gone[0]):
                yield f"was admitted to {row.version} after that was {what}"
        if row.outcome != SERVED:
            return
        proven = True
        if not served_from(version, row, rollout):
            proven = False
            if evidence.complete(row.version):
                yield (
                    f"was served by {row.version} before that was promoted"
                    if not row.gated
                    else (f"was served by {row.version} before that was ready")
                )
        load = version.load(row.replica, row.engine_epoch, rollout.last)
        where = f"{row.replica} in the life {row.engine_epoch} of its engine"
        if load is not None and not load.accepted:
            yield f"was served by {row.version} at {where}, which had refused it"
        elif load is None:
            proven = False
            if evidence.complete(row.version):
                yield f"was served by {row.version} at {where}, which never said that it holds it"
        self.counts.unproven += not proven

    def _settle(self, ends: chain.Ends) -> None:
        """By the rollouts themselves, and by what other tables say of them: the end of theirs may have been cut off."""
        last_ms = 0
        with contextlib.suppress(StoreError):  # that is told
            head = self._archives["rollouts"].head()
            last_ms = place(head.link.highest)[0] if head else 0
        self._settled_ms = max(last_ms, ends.settled_ms["rollouts"]) - int(ROW_LATE_S * 1000)

    def _gaps(self) -> Iterator[str]:
        """Of all runs: a router numbers its rollouts, whichever run they are of, and garbage is of none.

        From 1, so the first ones are missed, too; but not where the stream had lost entries before it was archived.
        """
        archive = self._archives["rollouts"]
        first = next(archive.places(), None)
        if first is None:
            return
        clipped = True
        with contextlib.suppress(StoreError):  # that is told
            clipped = archive.at(int(first.name)).link.clipped
        before = [] if clipped else [0]
        numbers: dict[str, array[int]] = {}
        latest: dict[str, int] = {}
        for table in archive.tables("", ["entry", "request_id", "unread"], lenient=True):
            for batch in table.to_batches(max_chunksize=65_536):
                for entry, name, unread in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    if unread is not None:
                        yield f"rollouts: entry {entry} is no row that can be read"
                    life, number = _number(name)
                    if number:
                        numbers.setdefault(life, array("Q")).append(number)
                        if place(entry)[0] <= self._settled_ms:
                            latest[life] = max(latest.get(life, 0), number)
        for life, found in sorted(numbers.items()):
            settled = {number for number in found if number <= latest.get(life, 0)}
            yield from _holes(life, [*before, *sorted(settled)])


def _holes(life: str, numbers: list[int]) -> Iterator[str]:
    holes = [(low + 1, high - 1) for low, high in pairwise(numbers) if high > low + 1]
    for low, high in holes[:GAPS]:
        which = f"{life}-{low:x}" if low == high else f"{life}-{low:x} to {life}-{high:x}"
        yield f"{which}: a router gave {'this number' if low == high else 'these numbers'}, and no row tells of it"
    if len(holes) > GAPS:
        more = sum(high - low + 1 for low, high in holes[GAPS:])
        yield f"{life}: {more} more rollouts of this router's process have no row"


def _number(name: str | None) -> tuple[str, int]:
    """0 where it is none of a rollout that a router numbered."""
    life, _, number = (name or "").rpartition("-")
    try:
        return life, int(number, 16) if life and len(number) <= 15 else 0
    except ValueError:
        return life, 0


def served_from(version: Version, row: Row, rollout: Rollout) -> bool:
    """Whether the version was promoted, or at the gate for who may ask there, before the row was written."""
    since = version.promoted
    if row.gated and version.ready is not None:
        since = min(version.ready, since or version.ready)
    return since is not None and since[0] <= rollout.last[0]


def began_after(row: Row, rollout: Rollout, milliseconds: int) -> bool:
    """By the server's clock, less what it took, and by the router's own: it was written late, or a clock is wrong."""
    entry_s = rollout.first[0] / 1000
    began_s = entry_s if row.outcome == UNKNOWN else entry_s - (row.total_s or 0.0)
    return min(began_s, row.started_at) > milliseconds / 1000 + ROUTER_TTL_S
