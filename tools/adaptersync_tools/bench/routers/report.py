"""What the bench found, as tables."""

from __future__ import annotations

from rich.text import Text

from adaptersync_tools.bench.routers.cases import CASES, Case
from adaptersync_tools.bench.routers.run import Outcome, Result
from adaptersync_tools.output import console, print_json, table


def show(result: Result, *, as_json: bool) -> int:
    """Print it; the exit status is 0 when every promise that could be judged was kept, else 1."""
    if as_json:
        print_json(result)
        return 0 if result.kept else 1
    out = console()
    machine = result.machine
    out.print(f"router  ({result.began_at[:10]}, {machine.cores} cores, load {machine.load:g} before)")
    for peer in result.peers:
        out.print(Text.assemble(f"{peer.name}  ", (" ".join((peer.program, peer.version, peer.note)).strip(), "dim")))
    for case in CASES:
        if outcomes := [each for each in result.outcomes if each.case == case.name]:
            columns = ("", *(f"{heading}>" for _, heading, _ in case.shown))
            out.print(table(f"{case.name}: {case.title}", columns, [_row(case, each) for each in outcomes]))
    for target in result.targets:
        mark, style = ("✓", "green") if target.kept else ("✗", "bold red")
        value, bound = f"{target.value:.4g} {target.unit}", f"{target.kind} {target.bound:g}"
        out.print(Text.assemble((f"{mark} ", style), f"{target.name}  ", (value, "bold"), (f"  ({bound})", "dim")))
    for outcome in result.outcomes:
        if outcome.failed and outcome.failed != "missing":
            out.print(Text.assemble(("! ", "yellow"), f"{outcome.case}: {outcome.party}: {outcome.failed}"))
    for promise in result.unjudged:
        out.print(Text.assemble(("? ", "yellow"), promise))
    return 0 if result.kept else 1


def _row(case: Case, outcome: Outcome) -> tuple[str, ...]:
    if not outcome.samples:
        return (outcome.party, outcome.failed.partition(":")[0], *[""] * (len(case.shown) - 1))
    cells = (outcome.medians.get(name) for name, _, _ in case.shown)
    formats = (how for _, _, how in case.shown)
    return (
        outcome.party,
        *("" if value is None else how.format(value) for value, how in zip(cells, formats, strict=True)),
    )
