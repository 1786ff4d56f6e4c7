"""Commands about routing: recorded traffic by other rules. They change nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import click
import msgspec

from adaptersync.router.policy import Policy
from adaptersync_core.errors import NameInvalid
from adaptersync_core.registry import Registry
from adaptersync_core.rollouts import Row, pages
from adaptersync_tools.cli.common import config_option, json_option, settings, visit
from adaptersync_tools.output import console, print_json, table
from adaptersync_tools.replay import RECORDED, Presence, Replay, damage

READ_S = 3600.0  # for a ledger of any length


@click.group()
def route() -> None:
    """See what other routing would have made of recorded traffic.

    \b
    Example:
      adaptersync route replay my-run
    """


@route.command()
@click.argument("ledger")
@config_option
@json_option
@click.option(
    "--policy", "policies", type=click.Choice(get_args(Policy)), multiple=True, help="Again for more.  [default: all]"
)
@click.option("--spill", type=click.IntRange(min=0), help="As in router.spill.  [default: what is set]")
def replay(
    ledger: str, config_path: Path | None, as_json: bool, policies: tuple[Policy, ...], spill: int | None
) -> None:
    """Route LEDGER again: a run of the control server, or a file that `export` has written.

    \b
    warm: of the blocks of all prompts, those expected to be cached where they went.
    elsewhere: requests that would have gone to another replica, each as things stood when it came.
    Examples:
      adaptersync route replay my-run
      adaptersync route replay rollouts.jsonl --policy threshold --spill 4 --json
    """
    config = settings(config_path)
    presence = Presence()
    # a name that may be a run's, unless a file is called so
    read = _of_file(Path(ledger)) if Path(ledger).is_file() else _of_run(config_path, ledger)
    read(presence.read)
    made = Replay(presence, policies or get_args(Policy), spill=config.router.spill if spill is None else spill)
    read(made.read)
    found = made.figures()
    if as_json:
        print_json(found)
        return
    rows = [
        (
            each.policy if each.spill is None else f"{each.policy}, spill {each.spill}",
            f"{each.warm_percent:.2f}",
            each.largest,
            f"{each.imbalance:.2f}",
            each.spilled,
            "" if each.policy == RECORDED else each.elsewhere,
        )
        for each in found
    ]
    columns = ("policy", "warm, %>", "in flight at one>", "imbalance>", "spilled>", "elsewhere>")
    console().print(table(f"{ledger}  ({found[0].requests} requests)", columns, rows))
    for each in found:
        if each.tokens_per_s is not None:
            rate = f"{each.tokens_per_s} tokens a second"
            console().print(f"{each.policy}: every replica taken to prefill {rate}; a ledger does not say")


@route.command()
@click.argument("run")
@config_option
def export(run: str, config_path: Path | None) -> None:
    """Write the ledger of RUN as it stands: a row a line, some opened first and ended later.

    \b
    Example:
      adaptersync route export my-run > rollouts.jsonl
    """
    write = sys.stdout.buffer.write
    _of_run(config_path, run)(lambda row: write(msgspec.json.encode(row) + b"\n"))
    sys.stdout.buffer.flush()


Reading = Callable[[Callable[[Row], object]], None]


def _of_run(config_path: Path | None, run: str) -> Reading:
    config = settings(config_path)

    def read(take: Callable[[Row], object]) -> None:
        async def call(registry: Registry) -> None:
            known = await registry.runs()
            if run not in known:
                raise NameInvalid("no such run, and no such file", next_step=f"known runs: {', '.join(known)}", run=run)
            async for _, page in pages(registry):
                for row in page:
                    if row.run == run:
                        take(row)

        visit(config, call, timeout_s=READ_S)

    return read


def _of_file(path: Path) -> Reading:
    def read(take: Callable[[Row], object]) -> None:
        for row in _rows(path):
            take(row)

    return read


def _rows(path: Path) -> Iterator[Row]:
    decoder = msgspec.json.Decoder(Row)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = decoder.decode(line)
            except msgspec.DecodeError as error:
                raise NameInvalid(f"line {number} is no row of a ledger: {error}", file=str(path)) from error
            if wrong := damage(row):
                raise NameInvalid(f"line {number} is no row of a ledger: {wrong}", file=str(path))
            yield row


COMMANDS = (route,)
