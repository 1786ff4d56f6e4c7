"""`adaptersync install`: what a host needs to run services below systemd."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
from msgspec.structs import replace

from adaptersync_core.config import CONFIG
from adaptersync_core.errors import ConfigError
from adaptersync_tools.cli.common import config_option, json_option, settings
from adaptersync_tools.output import print_json
from adaptersync_tools.systemd.install import look, systemd_version, write
from adaptersync_tools.systemd.units import Host, check_visible, render

NEXT = """\
next, as root:
  systemd-sysusers && systemd-tmpfiles --create && systemctl daemon-reload
  systemctl enable adaptersync-{coordinator,router,worker}.service
  systemctl enable adaptersync-agent@0.service    # one a GPU; its engine comes with it
  systemctl enable --now adaptersync.target"""


@click.command()
@config_option
@click.option("--systemd", is_flag=True, required=True, help="Units, users and directories for systemd.")
@click.option("--dry-run", is_flag=True, help="Print the files and write nothing.")
@click.option(
    "--root",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write below this directory: / for this host, another for an image.",
)
@click.option("--settings", "settings_path", help="Where hosts have the settings file.  [default: that of --config]")
@click.option("--python", help="The interpreter that has adaptersync there.  [default: this one]")
@click.option("--systemd-version", "version", type=click.IntRange(min=1), help="  [default: that of this host]")
@json_option
def install(
    config_path: Path | None,
    systemd: bool,
    dry_run: bool,
    root: Path | None,
    settings_path: str | None,
    python: str | None,
    version: int | None,
    as_json: bool,
) -> None:
    """Render units from the settings and put them in place. Starts nothing.

    \b
    Examples:
      adaptersync install --systemd --dry-run --config /etc/adaptersync/adaptersync.toml
      sudo adaptersync install --systemd --root / --config /etc/adaptersync/adaptersync.toml
    """
    config = settings(config_path)
    named = os.environ.get(CONFIG)
    file = settings_path or (str((config_path or Path(named or "")).absolute()) if config_path or named else None)
    python = python or sys.executable
    host = Host(python=python, real_python=os.path.realpath(python), version=version or systemd_version())
    host = replace(host, settings=file) if file else host
    check_visible(config, host)
    files = render(config, host)
    if dry_run:
        show(files, look(files, root) if root else {}, as_json=as_json)
        return
    if root is None:
        raise ConfigError("nowhere to write", next_step="give --root DIRECTORY (/ for this host), or --dry-run")
    states = write(files, root)
    if as_json:
        print_json({"root": str(root), "states": states})
    else:
        for place, state in states.items():
            click.echo(f"{state:8}{root / place}")
        click.echo(NEXT)


def show(files: dict[str, str], states: dict[str, str], *, as_json: bool) -> None:
    if as_json:
        print_json({"files": files, "states": states})
    else:
        click.echo("\n".join(f"# --- /{place}\n{text}" for place, text in files.items()), nl=False)


COMMANDS = (install,)
