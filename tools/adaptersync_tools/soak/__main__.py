"""The command: `python -m adaptersync_tools.soak`. Ends by itself; its status says whether every bound held."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

import click
import msgspec

from adaptersync_tools.cli.common import run_command
from adaptersync_tools.cli.local import workplace
from adaptersync_tools.output import console
from adaptersync_tools.soak import drive, report


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--minutes", type=click.FloatRange(0.25, 1440), default=30.0, show_default=True, help="How long it works."
)
@click.option(
    "--versions",
    type=click.IntRange(3, 100_000),
    default=200,
    show_default=True,
    help="How many our trainer publishes, evenly; one in 1.5 s at most. Two others publish half as many each.",
)
@click.option(
    "--seed", type=int, help="Prompts, and who is restarted.  [default: a new one, and the report says which]"
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where to write all of it, with the course of every process.",
)
def soak(minutes: float, versions: int, seed: int | None, json_path: Path | None) -> int:
    """Leave a simulated fleet alone with steady work, and see whether anything grows.

    A trainer submits, a TRL loads through a relay, what a third one writes is watched; clients ask in every form,
    replicas are restarted now and then. Every process, both Redis servers, the engines and the store are measured every
    few seconds, and judged once a third of the time has passed. Ends by itself some minutes after --minutes at the
    latest; exit status 1 when something grew beyond its bound, a request failed, or a version was rolled back.
    """
    if versions * 1.5 > minutes * 60:
        raise click.BadParameter("more than one in 1.5 s", param_hint="--versions")
    chosen = secrets.randbelow(1 << 31) if seed is None else seed
    screen = console(stderr=True)
    with workplace("soak", screen=screen) as (directory, narrator):
        made = drive.run(seed=chosen, seconds=minutes * 60, versions=versions, directory=directory, progress=narrator)
    report.show(made, screen)
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(report.document(made)), indent=1))
    return 0 if made.sound else 1


if __name__ == "__main__":
    sys.exit(run_command(soak, None, "soak"))
