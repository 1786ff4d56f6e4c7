"""`adaptersync bench`: one command a bench. Each imports what it measures with when it is called."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click

from adaptersync_tools.bench.result import show
from adaptersync_tools.cli.common import json_option
from adaptersync_tools.cli.local import interrupt_on_sigterm
from adaptersync_tools.output import Narrator, console

keep_option = click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for the fleet's settings, data and logs; kept.  [default: a scratch one]",
)


@click.group()
def bench() -> None:
    """Measure what the project promises, on a fleet of its own.

    Each bench starts what it needs, ends by itself and leaves no process behind. Exit status 0 when all it measured
    keeps what is promised, else 1.

    \b
    Examples:
      adaptersync bench promotion
      adaptersync bench decision --json | jq .targets
    """


@contextlib.contextmanager
def workplace(keep: Path | None) -> Iterator[tuple[Path, Narrator]]:
    """Where a bench works and how it tells how far it is; SIGTERM ends it as Ctrl-C does."""
    interrupt_on_sigterm()
    narrator = Narrator(console(stderr=True))
    with tempfile.TemporaryDirectory(prefix="adaptersync-bench-") as scratch:
        directory = (keep or Path(scratch)).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        try:
            yield directory, narrator
        finally:
            narrator.quiet()


@bench.command()
@json_option
@click.option(
    "--publications", type=click.IntRange(1, 1000), default=5, show_default=True, help="How many, by each way."
)
@click.option("--replicas", type=click.IntRange(1, 16), default=4, show_default=True, help="Simulated replicas.")
@click.option(
    "--visible",
    type=click.FloatRange(0, 60),
    default=3.0,
    show_default=True,
    help="Seconds until the mount shows a new directory.",
)
@click.option(
    "--blind",
    type=click.FloatRange(0, 120),
    multiple=True,
    default=(30.0, 1.0),
    show_default=True,
    help="Seconds for which the mount hides what was looked for too early; each given is measured.",
)
@keep_option
def promotion(
    as_json: bool, publications: int, replicas: int, visible: float, blind: tuple[float, ...], keep: Path | None
) -> int:
    """Measure from published to current on a mount that lags.

    An adapter of 8 MB goes to a fleet of simulated replicas by three ways, in turn: with the fast lane, by the mount
    alone, and as the published Hugging Face proxy does it (pause, try every 0.5 s until each replica loads, resume).

    \b
    Examples:
      adaptersync bench promotion                     # about five minutes
      adaptersync bench promotion --blind 1 --publications 20 --json
    """
    from adaptersync_tools.bench import promotion as measured

    settings = measured.Settings(publications=publications, replicas=replicas, visible_s=visible, blind_s=blind)
    with workplace(keep) as (directory, narrator):
        result = measured.run(settings, directory, narrator)
    return show(result, as_json=as_json)


@bench.command()
@json_option
@click.option(
    "--replicas",
    type=click.IntRange(1, 512),
    multiple=True,
    default=(4, 16, 64, 256),
    show_default=True,
    help="Sizes of the fleet; each given is measured.",
)
@click.option("--promotions", type=click.IntRange(1, 1000), default=10, show_default=True, help="Per size and round.")
@click.option(
    "--rounds", type=click.IntRange(1, 100), default=2, show_default=True, help="How often all sizes are gone through."
)
@keep_option
def decision(as_json: bool, replicas: tuple[int, ...], promotions: int, rounds: int, keep: Path | None) -> int:
    """Measure from the last replica's ack to every router serving the version.

    A real coordinator, two real routers and real Redis servers decide for fleets of light replicas, which only say
    what agents say. The promise is about how that time grows with the fleet.

    \b
    Examples:
      adaptersync bench decision                      # about three minutes
      adaptersync bench decision --replicas 4 --replicas 64 --promotions 30 --json
    """
    from adaptersync_tools.bench import decision as measured

    settings = measured.Settings(replicas=replicas, promotions=promotions, rounds=rounds)
    with workplace(keep) as (directory, narrator):
        result = measured.run(settings, directory, narrator)
    return show(result, as_json=as_json)


COMMANDS = (bench,)
