"""`adaptersync top`: the fleet while it works."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import click

from adaptersync_tools import top as screenful
from adaptersync_tools.cli.common import config_option, json_option, settings, visit
from adaptersync_tools.output import console, print_json
from adaptersync_tools.screen import whole

LINES = 1000  # where nobody's screen ends


@click.command()
@config_option
@json_option
@click.option("--once", is_flag=True, help="Show it once, and end; so it does where there is no terminal.")
@click.option(
    "--interval", "interval_s", type=click.FloatRange(0.2, 60.0), default=1.0, show_default=True,
    help="Seconds between two looks.",
)  # fmt: skip
def top(config_path: Path | None, as_json: bool, once: bool, interval_s: float) -> None:
    """Watch the fleet: who holds what, promotions, routers, throughput, alarms. Ends with q.

    \b
    ● held  ◌ awaited  ✕ refused  ○ loaded and not to be
    Examples:
      adaptersync top
      adaptersync top --json | jq .series.requests_s
    """
    config = settings(config_path)
    out = console()
    if not (once or as_json or not out.is_terminal):
        logging.getLogger().addHandler(logging.NullHandler())  # what goes wrong is said on the screen
        asyncio.run(screenful.watch(config, out, interval_s=interval_s))
        return
    view = visit(config, lambda registry: screenful.glance(registry, config))
    if as_json:
        print_json(view)
    else:
        out.print(whole(view, out, width=out.width, height=out.height if out.is_terminal else LINES))


COMMANDS = (top,)
