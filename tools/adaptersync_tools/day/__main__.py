"""The command: `python -m adaptersync_tools.day`. Runs unattended; its status says whether the day went well."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
import msgspec
from rich.text import Text

from adaptersync_core.config import CONFIG, ENVIRONMENT
from adaptersync_tools.cli.common import run_command
from adaptersync_tools.cli.local import workplace
from adaptersync_tools.day.drive import Day, Report
from adaptersync_tools.output import console, print_json, table

SEPARATOR = "__"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--short", is_flag=True, help="Upgrade one service of each kind instead of all.")
@click.option("--loopback", is_flag=True, help="All on the loopback, as one host, even as root.")
@click.option("--clients", type=click.IntRange(1, 64), default=4, show_default=True, help="Asking at once.")
@click.option("--json", "as_json", is_flag=True, help="For programs: the report as JSON on standard output.")
@click.option(
    "--report",
    "report_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where to write the same JSON, beside the summary.",
)
@click.option(
    "--keep", type=click.Path(file_okay=False, path_type=Path), help="Empty directory for data and logs; kept."
)
def day(short: bool, loopback: bool, clients: int, as_json: bool, report_path: Path | None, keep: Path | None) -> int:
    """Rehearse an operator's day on simulated engines.

    Hosts are network namespaces on a bridge of their own (as root; else all is one host). Services are installed from
    one configuration, scaled 2, 4, 1 and 2, Redis is restarted and replaced, every service upgraded one by one, a
    version rolled back, and the ledger audited. Clients ask all the while; an error that one of them sees fails the
    day. Takes some minutes at most; exit status 1 when anything was not as it should be.
    """
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise click.BadParameter("must be empty", param_hint="--keep")
    for name in [name for name in os.environ if name.startswith(ENVIRONMENT) and (SEPARATOR in name or name == CONFIG)]:
        del os.environ[name]  # of another fleet: not this one's
    screen = console(stderr=True)
    with workplace("day", keep, screen=screen) as (directory, narrator):
        made = Day(directory, loopback=loopback, short=short, clients=clients, progress=narrator)
        screen.print(f"hosts: {', '.join(made.report.hosts)} ({made.report.network})")
        report = made.run()
    document = msgspec.to_builtins(report) | {"ok": report.ok}
    if as_json:
        print_json(document)
    else:
        show(report)
    if report_path is not None:
        report_path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))
    return 0 if report.ok else 1


def show(report: Report) -> None:
    out = console()
    rows = [
        (
            Text("✓", "green") if step.ok else Text("✗", "bold red"),
            step.name,
            f"{step.seconds:.1f}",
            step.answered,
            step.failed,
            step.detail,
        )
        for step in report.steps
    ]
    out.print(table("An operator's day", ("", "step!", "s>", "answers>", "errors>", "found"), rows))
    for error in report.errors:
        out.print(Text(f"  ! {error}", "red"))
    for name, count in report.restarts.items():
        out.print(Text(f"  ! {name} ended by itself, {count} times", "red"))
    verdict = Text("it went well", "bold green") if report.ok else Text("it did not go well", "bold red")
    out.print(
        Text.assemble(verdict, f", in {report.seconds:.0f} s; the slowest answer took {report.slowest_answer_s:.1f} s")
    )


if __name__ == "__main__":
    sys.exit(run_command(day, None, "operators-day"))
