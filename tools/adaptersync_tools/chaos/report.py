"""What came of it: a document for programs, and a summary for people."""

from __future__ import annotations

import shlex
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.text import Text

from adaptersync_tools.audit.verify import Counts
from adaptersync_tools.chaos import strike
from adaptersync_tools.chaos.history import Violation
from adaptersync_tools.chaos.plan import KINDS, Fault, Kind
from adaptersync_tools.output import table

SHOWN = 20  # violations in the summary; the document has them all


class Struck(Struct, frozen=True, kw_only=True):
    """A fault as it happened; seconds count from the first moment of the run.

    `reached` is the event it waited for, if that came in time. `done`: it took effect. `recovered_s`: from the end of
    the last of those that struck together, until every replica was ready and every router served a newer version of
    each run.
    """

    fault: Fault
    at_s: float
    reached: str = ""
    done: bool = True
    ended_s: float | None = None
    recovered_s: float | None = None


class Report(Struct, frozen=True, kw_only=True):
    """`unrecorded` are answers without a ledger row; `crashes` are ends of services that nobody ordered.

    `audited` is what the ledger's audit looked at, by run; what it found is among the violations.
    `restored` counts how often a coordinator rebuilt Redis; `names` the versions whose digest was compared in events,
    ledger and store. `began_at` is wall time. `rest_s`: from the end of publishing until nothing was on its way.
    """

    seed: int
    seconds: float
    replicas: int
    slots: int
    began_at: float
    faults: list[Struck]
    answers: dict[str, int]
    versions: dict[str, int]
    restored: int
    probes: int
    names: int
    rows: int
    unrecorded: int
    audited: dict[str, Counts]
    crashes: dict[str, int]
    rest_s: float | None
    converge_bound_s: float
    violations: list[Violation]

    @property
    def sound(self) -> bool:
        return not self.violations

    def again(self) -> str:
        command = ["tools/chaos", "--seed", str(self.seed), "--seconds", f"{self.seconds:g}"]
        return shlex.join([*command, "--replicas", str(self.replicas), "--slots", str(self.slots)])


class KindView(Struct, frozen=True, kw_only=True):
    """Faults of one kind; `missed` ones found nothing to break. Recoveries are seconds.

    `violations` came to light between such a fault and the next recovery: other faults may be their cause.
    """

    kind: Kind
    count: int
    missed: int
    p50_s: float | None
    max_s: float | None
    violations: int


def told(struck: strike.Struck, began: float) -> Struck:
    """A fault as it was carried out, for the record."""
    ended, recovered_s = struck.ended, struck.recovered_s
    return Struck(
        fault=struck.fault,
        at_s=round(struck.at - began, 3),
        reached=struck.reached,
        done=struck.done,
        ended_s=None if ended is None else round(ended - began, 3),
        recovered_s=None if recovered_s is None else round(recovered_s, 3),
    )


def kinds(report: Report) -> list[KindView]:
    views = []
    for kind in KINDS:
        mine = [struck for struck in report.faults if struck.fault.kind == kind]
        took = [struck.recovered_s for struck in mine if struck.recovered_s is not None]
        views.append(
            KindView(
                kind=kind,
                count=len(mine),
                missed=sum(not struck.done for struck in mine),
                p50_s=statistics.median(took) if took else None,
                max_s=max(took, default=None),
                violations=sum(
                    any(_open(struck, violation.at - report.began_at) for struck in mine)
                    for violation in report.violations
                ),
            )
        )
    return views


def _open(struck: Struck, at_s: float) -> bool:
    """Whether a fault had struck by then, and was not recovered from."""
    if struck.ended_s is None or struck.recovered_s is None:
        return struck.at_s <= at_s
    return struck.at_s <= at_s <= struck.ended_s + struck.recovered_s


def document(report: Report) -> dict[str, object]:
    """For programs: the report, whether it is sound, how to repeat it, and the table."""
    return {"sound": report.sound, "again": report.again(), "kinds": kinds(report), **msgspec.to_builtins(report)}


def show(report: Report, out: Console) -> None:
    """For people."""
    rows = [
        (view.kind, view.count, view.missed or "", _s(view.p50_s), _s(view.max_s), view.violations, KINDS[view.kind])
        for view in kinds(report)
    ]
    columns = ("fault!", "count>", "missed>", "recovery p50, s>", "max, s>", "violations>", "")
    out.print(table(f"{len(report.faults)} faults in {report.seconds:g} s", columns, rows))
    for line in lines(report):
        out.print(Text(line, "bold red" if line.startswith("VIOLATION") else ""), soft_wrap=True)


def lines(report: Report) -> Iterator[str]:
    targets = Counter(f"{struck.fault.kind} {struck.fault.target}" for struck in report.faults)
    yield f"struck       {_counts(targets)}"
    yield f"answers      {_counts(report.answers)}"
    yield f"versions     {_counts(report.versions)}; Redis was rebuilt {report.restored} times"
    yield f"identity     {report.names} names, each with one digest in events, store and ledger"
    yield f"probes       {report.probes} questions past the router, all answered"
    yield f"ledger       {report.rows} rows; {report.unrecorded} answers without one"
    for run, of in report.audited.items():
        yield f"audit        {run}: {of.rollouts} rollouts of {of.versions} versions; {of.unproven} rest on lost events"
    rest = "not reached" if report.rest_s is None else f"{report.rest_s:.1f} s after the last publication"
    yield f"rest         {rest}; bound of this and of every recovery: {report.converge_bound_s:g} s"
    alike: dict[tuple[str, str], list[Violation]] = {}
    for violation in report.violations:  # what stands in brackets says of which request, the rest is one and the same
        alike.setdefault((violation.kind, violation.what.partition(" (")[0]), []).append(violation)
    for (kind, _), (first, *others) in list(alike.items())[:SHOWN]:
        more = f", and {len(others)} like it" if others else ""
        yield f"VIOLATION    {first.at - report.began_at:.1f} s  {kind}: {first.what}{more}"
    if len(alike) > SHOWN:
        yield f"             and {len(alike) - SHOWN} of other kinds, see the report"
    yield f"again        {report.again()}"
    yield "every promise held" if report.sound else f"{len(report.violations)} promises were broken"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "none"


def _s(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f}"
