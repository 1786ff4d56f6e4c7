"""Before it runs, and where it does not: is this host fit for it, and how large must everything be."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import click
from rich.text import Text

from adaptersync_tools.cli.common import config_option, json_option, settings
from adaptersync_tools.output import console, print_json


@click.command()
@config_option
@click.option(
    "--role",
    "roles",
    multiple=True,
    type=click.Choice(["trainer", "agent", "coordinator", "router", "worker"]),
    help="What runs on this host; may be given several times.  [default: all]",
)
@json_option
def doctor(config_path: Path | None, roles: tuple[str, ...], as_json: bool) -> int:
    """Look for what is wrong with this host, and say how to mend it.

    Run it as the user that the services run as. Exit status 0 when nothing is wrong (warnings aside), else 1.

    \b
    Examples:
      adaptersync doctor
      adaptersync doctor --role agent
      adaptersync doctor --json | jq -r '.findings[].fix'
    """
    from adaptersync_tools.doctor import ROLES, Role, examine

    chosen = frozenset(cast("tuple[Role, ...]", roles) or ROLES)
    verdict = asyncio.run(examine(settings(config_path), chosen))
    if as_json:
        print_json({"well": verdict.well, "looked": len(verdict.looked), "findings": verdict.findings})
        return 0 if verdict.well else 1
    out = console()
    for finding in verdict.findings:
        style = "red" if finding.level == "error" else "yellow"
        line = Text.assemble((finding.level, style), f" {finding.about}: {finding.what}; ", (finding.fix, "bold"))
        out.print(line, soft_wrap=True)
    warnings = sum(finding.level == "warning" for finding in verdict.findings)
    errors = len(verdict.findings) - warnings
    said = f"{len(verdict.looked)} looks: {errors} errors, {warnings} warnings"
    out.print(Text(said if verdict.findings else f"{len(verdict.looked)} looks, nothing found", "dim"))
    return 0 if verdict.well else 1


COMMANDS = (doctor,)
