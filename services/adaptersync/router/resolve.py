"""From the name a client asked for to the version it gets, or why it gets none. Pure: no clock, no Redis.

Names: an adapter id; `{run}` or `{run}@current` for the run's current version; `{run}@v{seq}` for one by number; the
base model only by its own name, never as a substitute.
"""

from __future__ import annotations

import re

from msgspec import Struct

from adaptersync_core.errors import NameInvalid, Unroutable
from adaptersync_core.identity import NAME, parse_adapter_id
from adaptersync_core.table import ROUTABLE, Table

RETRY_S = 1.0  # when to come back for what is on its way
REFUSED = frozenset({"superseded", "rolled_back"})  # never served, never will be
GONE = frozenset({"retiring", "retired", "voided"})  # was served, will not be again
FINAL = REFUSED | GONE

_BY_SEQ = re.compile(rf"(?P<run>{NAME})@v(?P<seq>[1-9][0-9]{{0,17}})")
_POINTER = re.compile(rf"(?P<run>{NAME})(?:@current)?")


class Wanted(Struct, frozen=True, kw_only=True):
    """A name taken apart: a version by id, a version by number, or, with neither, the current one of a run."""

    run: str
    adapter_id: str = ""
    seq: int = 0


class Target(Struct, frozen=True, kw_only=True):
    """What a replica is asked for. `run` and `digest` are empty for the base model."""

    model: str
    run: str = ""
    digest: str = ""


class Hold(Struct, frozen=True, kw_only=True):
    """Wait for the table to change: it is about to be served. With `otherwise` it may be, or else that is so."""

    reason: str
    otherwise: Unroutable | None = None


class Fate(Struct, frozen=True, kw_only=True):
    """What the records say of a name. `state` is empty when they do not know it either."""

    state: str = ""
    adapter_id: str = ""
    reason: str = ""


class Ask(Struct, frozen=True, kw_only=True):
    """The table does not say enough: the records must be read once. `otherwise` is the answer if they cannot be."""

    wanted: Wanted
    otherwise: Fate | None = None


def parse(name: str) -> Wanted:
    """Take an asked name apart; Unroutable 404 when it has no form we serve."""
    try:
        return Wanted(run=parse_adapter_id(name).run, adapter_id=name)
    except NameInvalid:
        if found := _BY_SEQ.fullmatch(name):
            return Wanted(run=found["run"], seq=int(found["seq"]))
        if found := _POINTER.fullmatch(name):
            return Wanted(run=found["run"])
    raise Unroutable(
        "model does not exist", status=404, next_step="ask for an adapter id, a run or the base model", model=name[:96]
    )


def resolve(
    table: Table, name: str, *, base_model: str, fate: Fate | None = None, gate: bool = False
) -> Target | Hold | Ask:
    """What to do about a request for `name`; Unroutable with status and reason when it cannot be served.

    `fate` is what the records said of this name, if they were asked. `gate`: whoever asks may have what waits at it.
    """
    if name == base_model:
        return Target(model=name)
    wanted = parse(name)
    adapter_id = _locate(table, wanted)
    if adapter_id:
        version = table.versions[adapter_id]
        if version.state in ROUTABLE or (gate and version.state == "ready"):
            return Target(model=adapter_id, run=version.run, digest=version.digest)
        if version.state == "retiring":
            # given up, and still in the engines; why, only its record says
            known = Fate(state="retiring" if version.fate == "retired" else version.fate, adapter_id=adapter_id)
            if fate is None:
                return Ask(wanted=Wanted(run=version.run, adapter_id=adapter_id), otherwise=known)
            raise _refusal(name, fate if fate.state in FINAL else known)
        return Hold(reason=f"version is {version.state}, not yet current")
    if not wanted.adapter_id and not wanted.seq and wanted.run in table.runs:
        if table.runs[wanted.run].ended_at and table.candidate(wanted.run) is None:
            raise Unroutable(
                f"run {wanted.run} has ended, and its versions gave up their room",
                status=410,
                next_step="publish to the run again, or ask for another: see GET /v1/models",
                model=name,
            )
        return Hold(reason="run has no current version yet")
    if fate is None:
        return Ask(wanted=wanted)
    if not fate.state:
        unknown = Unroutable(
            "model does not exist: neither a version nor a run of this group",
            status=404,
            next_step="see GET /v1/models",
            model=name,
        )
        if _is_unheard_of(table, wanted):
            return Hold(reason="version is newer than all that is known of its run", otherwise=unknown)
        raise unknown
    if fate.state in FINAL:
        raise _refusal(name, fate)
    # the records are ahead of the table: it will say so in a moment
    return Hold(reason=f"version is {fate.state}, not yet current")


def _locate(table: Table, wanted: Wanted) -> str:
    if wanted.adapter_id:
        return wanted.adapter_id if wanted.adapter_id in table.versions else ""
    if wanted.seq:
        for adapter_id, version in table.versions.items():
            if version.run == wanted.run and version.seq == wanted.seq:
                return adapter_id
        return ""
    run = table.runs.get(wanted.run)
    current = run.current if run else None
    return current if current and current in table.versions else ""


def _is_unheard_of(table: Table, wanted: Wanted) -> bool:
    """Whether its number is beyond all that was considered of its run: where Redis was set back, it comes to be."""
    seq = parse_adapter_id(wanted.adapter_id).seq if wanted.adapter_id else wanted.seq
    run = table.runs.get(wanted.run)
    return run is not None and seq > run.considered


def _refusal(name: str, fate: Fate) -> Unroutable:
    said = f"version is {fate.state}" + (f": {fate.reason}" if fate.reason else "")
    status = 409 if fate.state in REFUSED else 410
    return Unroutable(
        said,
        status=status,
        next_step="ask for the run's current version",
        model=name,
        version=fate.adapter_id if fate.adapter_id != name else None,
    )
