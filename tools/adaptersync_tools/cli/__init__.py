"""The operator's command line: `adaptersync COMMAND`.

Every error is one line on standard error and a status that says what kind of error it was; nothing here waits for ever.
"""

from __future__ import annotations

import click

from adaptersync_tools.cli import (
    auditing,
    bench,
    changing,
    installing,
    jobs,
    local,
    publishing,
    reading,
    route,
    scaling,
    securing,
    services,
    sizing,
    timing,
    watching,
)
from adaptersync_tools.cli.common import run_command


class Commands(click.Group):
    """Lists commands in the order in which one needs them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="adaptersync")
def adaptersync() -> None:
    """Adapter-only synchronization for RL training: publish adapters, see and steer the fleet that serves them.

    \b
    Start a fleet on this machine, and look at it from another terminal:
      adaptersync up --simulated
      export ADAPTERSYNC_CONFIG=runs/up/adaptersync.toml
      adaptersync status
      adaptersync events --follow
    """


for command in (
    *local.COMMANDS,
    *reading.COMMANDS,
    *watching.COMMANDS,
    *timing.COMMANDS,
    *route.COMMANDS,
    *publishing.COMMANDS,
    *changing.COMMANDS,
    *scaling.COMMANDS,
    *jobs.COMMANDS,
    *auditing.COMMANDS,
    *services.COMMANDS,
    *sizing.COMMANDS,
    *securing.COMMANDS,
    *installing.COMMANDS,
    *bench.COMMANDS,
):
    adaptersync.add_command(command)


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns its exit status."""
    return run_command(adaptersync, arguments, "adaptersync")
