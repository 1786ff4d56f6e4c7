"""What came of it: a document for programs, and some lines for people."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable

from msgspec import Struct

from adaptersync_tools.chaos.history import Violation
from adaptersync_tools.chaos.plan import Fault

SHOWN = 20  # violations in the summary; the document has them all


class Struck(Struct, frozen=True, kw_only=True):
    """A fault as it happened; `at_s` counts from the first moment of the run."""

    fault: Fault
    at_s: float
    reached: str = ""
    """The event it waited for, if that came in time."""


class Report(Struct, frozen=True, kw_only=True):
    """`unrecorded` are answers without a ledger row; `crashes` are ends of services that nobody ordered."""

    seed: int
    seconds: float
    replicas: int
    faults: list[Struck]
    answers: dict[str, int]
    versions: dict[str, int]
    probes: int
    rows: int
    unrecorded: int
    """Whether rows must survive the death of a router; if not, what is unrecorded is only counted."""
    crashes: dict[str, int]
    converged_s: float | None
    converge_bound_s: float
    violations: list[Violation]

    @property
    def sound(self) -> bool:
        return not self.violations

    def again(self) -> str:
        command = ["tools/chaos", "--seed", str(self.seed), "--minutes", f"{self.seconds / 60:g}"]
        return shlex.join([*command, "--replicas", str(self.replicas)])


def lines(report: Report) -> Iterable[str]:
    """For people."""
    kills = sum(struck.fault.kind == "kill" for struck in report.faults)
    yield f"seed         {report.seed}; again: {report.again()}"
    yield f"faults       {len(report.faults)}: {kills} killed, {len(report.faults) - kills} frozen"
    yield f"answers      {', '.join(f'{count} {kind}' for kind, count in sorted(report.answers.items()))}"
    yield f"versions     {', '.join(f'{count} {kind}' for kind, count in report.versions.items())}"
    yield f"probes       {report.probes} questions past the router, all answered"
    yield f"ledger       {report.rows} rows; {report.unrecorded} answers without one"
    if report.converged_s is None:
        yield f"convergence  not within {report.converge_bound_s:g} s"
    else:
        yield f"convergence  {report.converged_s:.1f} s after the last fault (bound: {report.converge_bound_s:g} s)"
    for violation in report.violations[:SHOWN]:
        yield f"VIOLATION    {violation.kind}: {violation.what}"
    if len(report.violations) > SHOWN:
        yield f"             and {len(report.violations) - SHOWN} more, see the report"
    yield "every promise held" if report.sound else f"{len(report.violations)} promises were broken"


def write(report: Report) -> None:
    for line in lines(report):
        print(line, file=sys.stderr)
