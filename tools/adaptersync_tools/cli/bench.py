"""`adaptersync bench`: one command a bench. Each imports what it measures with when it is called."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click

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


COMMANDS = (bench,)
