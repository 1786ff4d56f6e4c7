"""The tables of the ledger's archive: which columns each has, and the rows that an entry of its stream becomes.

`rollouts` has a row an entry, `events` too; `fates` has one for each request that an entry tells of. What cannot be
read, or has a number that no column holds, is kept as it is, in `unread`: whatever an entry is, it ends no archive.
Pure.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from adaptersync_core.entries import written_ms
from adaptersync_core.errors import NameInvalid
from adaptersync_core.fates import read_fates
from adaptersync_core.identity import parse_adapter_id
from adaptersync_core.rollouts import Row, decode

Fields = Mapping[str, str]

_KINDS = {str: "text", int: "int", float: "float", bool: "bool"}


class Record(Struct, frozen=True):
    """One row, and of which entry and run it is."""

    entry: str
    run: str
    values: dict[str, Any]


class ArchiveTable(Struct, frozen=True, kw_only=True):
    """`columns` by name, each with its kind; the first ones are of every table."""

    columns: Mapping[str, str]
    records: Callable[[str, Fields], list[Record]]


_OF_EVERY = {"entry": "text", "written_at": "time"}


def _kind(annotation: Any) -> str:
    if isinstance(annotation, types.UnionType):
        annotation = next(each for each in annotation.__args__ if each is not types.NoneType)
    return _KINDS[annotation]


_ROW = {name: _kind(annotation) for name, annotation in typing.get_type_hints(Row).items()}


def _head(entry: str) -> dict[str, Any]:
    return {"entry": entry, "written_at": written_ms(entry)}


def _unread(entry: str, fields: Fields) -> list[Record]:
    return [Record(entry, "", {**_head(entry), "unread": msgspec.json.encode(fields).decode()})]


def _fit(values: Mapping[str, Any]) -> bool:
    """Whether a column holds each, which has 64 bits for a number."""
    return all(-(1 << 63) <= value < 1 << 63 for value in values.values() if isinstance(value, int))


def _rollout(entry: str, fields: Fields) -> list[Record]:
    row = decode(fields)
    if row is None or not _fit(msgspec.structs.asdict(row)):
        return _unread(entry, fields)
    return [Record(entry, row.run, {**_head(entry), **msgspec.structs.asdict(row)})]


def _fates(entry: str, fields: Fields) -> list[Record]:
    fates = read_fates(fields)
    if fates is None or not _fit({"epoch": fates.epoch, "step": fates.step}):
        return _unread(entry, fields)
    head = {**_head(entry), "run": fates.run, "epoch": fates.epoch, "step": fates.step}
    return [
        Record(entry, fates.run, {**head, "request_id": name, "fate": fates.fate, "reason": fates.reason})
        for name in fates.requests
    ]


EVENT_COLUMNS = ("type", "run", "version", "replica", "engine_epoch", "reason")


def _event(entry: str, fields: Fields) -> list[Record]:
    """With all its fields as JSON beside those that are asked for most."""
    run = fields.get("run", "")
    if not run:
        try:
            run = parse_adapter_id(fields.get("version", "")).run
        except NameInvalid:
            run = ""
    values = {name: fields.get(name, "") for name in EVENT_COLUMNS} | {"run": run}
    return [Record(entry, run, {**_head(entry), **values, "fields": msgspec.json.encode(fields).decode()})]


TABLES: Mapping[str, ArchiveTable] = {
    "fates": ArchiveTable(
        columns={
            **_OF_EVERY,
            "run": "text",
            "request_id": "text",
            "fate": "text",
            "reason": "text",
            "epoch": "int",
            "step": "int",
            "unread": "text",
        },
        records=_fates,
    ),
    "rollouts": ArchiveTable(columns={**_OF_EVERY, **_ROW, "unread": "text"}, records=_rollout),
    "events": ArchiveTable(
        columns={**_OF_EVERY, **dict.fromkeys(EVENT_COLUMNS, "text"), "fields": "text"},
        records=_event,
    ),
}
