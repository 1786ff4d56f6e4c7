"""A run's rollouts as the archive has them, one each: rows joined, with the proof of their load and their fate.

In passes, each over the rollouts whose ids fall to it, so that any ledger fits into memory: `ROWS` rows at a time.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from adaptersync_core.archive import Archive, partition
from adaptersync_core.chain import place
from adaptersync_core.fates import TRAINED, VOIDED
from adaptersync_core.rollouts import OPEN, UNKNOWN, Row, join
from adaptersync_tools.audit.evidence import Evidence, Place

ROWS = 50_000  # of one pass, some 150 MB

_FIELDS = frozenset(Row.__struct_fields__)


class Told(Struct, frozen=True):
    """What the trainer said became of a rollout. `at` is when."""

    fate: str
    reason: str
    step: int
    at: Place


class Rollout(Struct, kw_only=True):
    """`row` is None where only its trainer tells of it. `first` and `last` are the places of its entries.

    `repeated`: entries that are in the archive twice. `ends`: how it ended, where rows differ in that.
    """

    request_id: str
    row: Row | None
    first: Place
    last: Place
    entries: int = 0
    proof: str = ""
    fate: str = ""
    fate_reason: str = ""
    fate_step: int | None = None
    told_at: Place | None = None
    repeated: tuple[str, ...] = ()
    ends: tuple[Row, ...] = ()


def read_rollouts(
    rollouts: Archive, fates: Archive, run: str, evidence: Evidence, *, lenient: bool = False
) -> Iterator[list[Rollout]]:
    """A pass at a time. StoreError where a file is not what was archived; `lenient`: it is left out."""
    rows = sum(file.rows for path, file in rollouts.files(lenient=lenient).items() if path.startswith(_of(run)))
    passes = max(1, -(-rows // ROWS))
    for number in range(passes):
        found: dict[str, list[tuple[Place, Row]]] = {}
        for line in _lines(rollouts, run, number, passes, lenient=lenient):
            row = msgspec.convert({name: line[name] for name in _FIELDS if line.get(name) is not None}, Row)
            found.setdefault(row.request_id, []).append((place(line["entry"]), row))
        told: dict[str, Told] = {}
        for line in _lines(fates, run, number, passes, lenient=lenient):
            said = Told(line["fate"], line["reason"], line["step"] or 0, place(line["entry"]))
            before = told.get(line["request_id"])
            if before is None or (said.fate == TRAINED and before.fate != TRAINED):
                told[line["request_id"]] = said
        names = [*found, *(name for name in told if name not in found)]
        yield [_one(name, found.get(name, []), told.get(name), evidence) for name in names]


def _of(run: str) -> str:
    return f"run={partition(run)}/"


def _lines(archive: Archive, run: str, number: int, passes: int, *, lenient: bool) -> Iterator[dict[str, Any]]:
    for table in archive.tables(_of(run), lenient=lenient):
        for batch in table.to_batches(max_chunksize=4096):
            for line in batch.to_pylist():
                name = line.get("request_id")
                if line.get("run") == run and name and zlib.crc32(name.encode()) % passes == number:
                    yield line


def _one(name: str, written: list[tuple[Place, Row]], told: Told | None, evidence: Evidence) -> Rollout:
    written.sort(key=lambda each: each[0])
    fate = told.fate if told else ""
    rollout = Rollout(
        request_id=name,
        row=None,
        first=written[0][0] if written else (0, 0),
        last=written[-1][0] if written else (0, 0),
        entries=len(written),
        fate=fate,
        fate_reason=told.reason if told else "",
        fate_step=told.step if told else None,
        told_at=told.at if told else None,
    )
    if not written:
        return rollout
    seen: list[tuple[Place, Row]] = []
    repeated = []
    for each in written:
        if each in seen:
            repeated.append(f"{each[0][0]}-{each[0][1]}")
        seen.append(each)
    ends: list[Row] = []
    for _, row in written:
        if row.outcome not in (OPEN, UNKNOWN) and row not in ends:
            ends.append(row)
    voided = [row.version for _, row in written if evidence.versions.get(row.version) and _voided(evidence, row)]
    (row,) = join([row for _, row in written], voided=voided)
    rollout.row, rollout.repeated, rollout.ends = row, tuple(repeated), tuple(ends)
    version = evidence.versions.get(row.version)
    load = version.load(row.replica, row.engine_epoch, rollout.last) if version else None
    rollout.proof = load.proof if load else ""
    if not fate and row.voided:
        rollout.fate = VOIDED
    return rollout


def _voided(evidence: Evidence, row: Row) -> bool:
    return evidence.versions[row.version].voided is not None
