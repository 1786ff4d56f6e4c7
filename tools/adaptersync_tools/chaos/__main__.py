"""The command: `python -m adaptersync_tools.chaos`. Ends by itself; its status says whether every promise held."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

import click
import msgspec

from adaptersync_tools.chaos import drive, report
from adaptersync_tools.cli.common import run_command
from adaptersync_tools.cli.local import workplace
from adaptersync_tools.output import console, print_json


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--seconds", type=click.FloatRange(5, 36_000), default=600.0, show_default=True, help="How long it breaks."
)
@click.option("--seed", type=int, help="What breaks, in which order.  [default: a new one, and the report says which]")
@click.option("--replicas", type=click.IntRange(1, 16), default=3, show_default=True, help="Simulated engines.")
@click.option("--slots", type=click.IntRange(8, 256), default=64, show_default=True, help="Adapters an engine holds.")
@click.option("--json", "as_json", is_flag=True, help="For programs: the whole report as JSON on standard output.")
@click.option(
    "--report",
    "report_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where to write the same JSON, beside the summary.",
)
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    help="Empty directory for the fleet's data and logs; kept.",
)
def chaos(
    seconds: float,
    seed: int | None,
    replicas: int,
    slots: int,
    as_json: bool,
    report_path: Path | None,
    keep: Path | None,
) -> int:
    """Break a simulated fleet under traffic for a while, and watch whether its promises hold.

    Coordinators, agents, routers, trainers, engines and both Redis servers are killed and frozen at random steps of the
    protocol; Redis is emptied and set back. After most faults the fleet is left alone until it has recovered, within a
    bound. Ends by itself some minutes after --seconds at the latest; exit status 1 when a promise was broken.
    """
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise click.BadParameter("must be empty: another fleet's events would be judged, too", param_hint="--keep")
    chosen = secrets.randbelow(1 << 31) if seed is None else seed
    screen = console(stderr=True)
    with workplace("chaos", keep, screen=screen) as (directory, narrator):
        made = drive.run(
            seed=chosen, seconds=seconds, replicas=replicas, slots=slots, directory=directory, progress=narrator
        )
    document = report.document(made)
    if as_json:
        print_json(document)
    else:
        report.show(made, screen)
    if report_path is not None:
        report_path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))
    return 0 if made.sound else 1


if __name__ == "__main__":
    sys.exit(run_command(chaos, None, "chaos"))
