"""What came of it: a document for programs, tables and courses of memory for people."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.text import Text

from adaptersync.coordinator import views
from adaptersync_tools.output import table
from adaptersync_tools.soak.look import EVENTS, JOBS, LEDGER, RECORDS, Sample
from adaptersync_tools.soak.processes import KEEPER
from adaptersync_tools.soak.restarts import Restart
from adaptersync_tools.soak.traffic import Failure
from adaptersync_tools.soak.trend import POINTS, sparkline, thin
from adaptersync_tools.soak.verdicts import CONTROL, Check, Life

WIDTH = 32  # of a course
LEAST_MB = 4.0  # what varies by less looks flat


class Report(Struct, frozen=True, kw_only=True):
    """`first` and `last` are samples, the last one at rest. `minutes` is how long it took, `versions` what our trainer
    was to publish."""

    seed: int
    minutes: float
    versions: int
    replicas: int
    routers: int
    checks: list[Check]
    lives: list[Life]
    asked: dict[str, int]
    failures: list[Failure]
    restarts: list[Restart]
    first: Sample
    last: Sample

    @property
    def sound(self) -> bool:
        return all(check.holds for check in self.checks)

    def again(self) -> str:
        options = ["--minutes", f"{self.minutes:.3g}", "--versions", str(self.versions), "--seed", str(self.seed)]
        return shlex.join(["tools/soak", *options])


def document(report: Report) -> dict[str, object]:
    """For programs; courses with as many points as the slopes were made from."""
    lives = [msgspec.structs.replace(life, points=thin(life.points, POINTS)) for life in report.lives]
    return {
        "sound": report.sound,
        "again": report.again(),
        **msgspec.to_builtins(msgspec.structs.replace(report, lives=lives)),
    }


def show(report: Report, out: Console) -> None:
    """For people: every process that was judged, and of keepers, which are all alike, the one that grew most."""
    keepers = [life for life in report.lives if life.role == KEEPER and life.grows is not None]
    shown = [life for life in report.lives if life.role != KEEPER and life.grows is not None]
    most = max(keepers, key=lambda life: life.grows or 0.0, default=None)
    rows = [_row(life, life.name) for life in shown]
    if most is not None:
        rows.append(_row(most, f"most of {len(keepers)} keepers"))
    columns = ("process!", "MB>", "grew, MB>", "in 100 versions>", "files>", "threads>", "course!")
    out.print(table(f"memory in {report.minutes:.3g} minutes", columns, rows))
    checks = [
        (Text("holds", "green") if each.holds else Text("BROKEN", "bold red"), each.what, each.figure, each.bound)
        for each in report.checks
    ]
    out.print(table(f"{report.last.published} versions", ("!", "what!", "figure", "bound"), checks))
    for line in lines(report):
        out.print(line, soft_wrap=True)


def _row(life: Life, name: str) -> tuple[object, ...]:
    course = sparkline(life.points, width=WIDTH, least=LEAST_MB)
    return (
        name,
        f"{life.memory:.1f}",
        f"{life.grows:+.2f}",
        f"{life.grows_100:+.2f}",
        life.files[1],
        life.threads[1],
        course if life.holds else Text(course, "bold red"),
    )


def lines(report: Report) -> Iterator[str]:
    streams = {EVENTS: 0, LEDGER: 0} | report.last.servers[CONTROL].apart
    asked, published = sum(report.asked.values()), max(report.last.published, 1)
    records, jobs = (sum(streams.get(f"{kind}*", 0) for kind in kinds) for kinds in (RECORDS, JOBS))
    yield (
        f"streams      keep an hour: ledger {views.size(streams[LEDGER])}, "
        f"{streams[LEDGER] // max(asked, 1)} bytes a request; events {views.size(streams[EVENTS])}, "
        f"{streams[EVENTS] // published} bytes a version"
    )
    yield f"records      kept for thirty days: {views.size(records)}, {records // published} bytes a version"
    yield f"jobs         finished ones keep an hour: {views.size(jobs)}, {jobs // published} bytes a version"
    yield f"disk         {', '.join(f'{name} {views.size(size)}' for name, size in sorted(report.last.disk.items()))}"
    yield f"asked        {', '.join(f'{count} {kind}' for kind, count in sorted(report.asked.items()))}"
    yield f"restarts     {', '.join(f'{each.kind} {each.number}' for each in report.restarts) or 'none'}"
    for failure in report.failures:
        yield f"FAILED       {failure.kind}: {failure.what}"
    yield f"again        {report.again()}"
    yield "nothing grew" if report.sound else "bounds were broken"
