"""`adaptersync scale`: how many services a host is to run."""

from __future__ import annotations

import asyncio
import shlex
import shutil
import socket
import time
from pathlib import Path

import click
from msgspec.structs import replace
from rich.text import Text

from adaptersync.coordinator.hosts import HostView
from adaptersync.coordinator.observer import look
from adaptersync.coordinator.views import StatusView
from adaptersync_core import scaling
from adaptersync_core.config import Config
from adaptersync_core.errors import ControlError, ControlUnavailable
from adaptersync_core.registry import Registry
from adaptersync_core.scaling import MOST, SYSTEMD, Scale
from adaptersync_tools import screen
from adaptersync_tools.cli.common import VISIT_S, config_option, json_option, settings, timeout_option, visit
from adaptersync_tools.output import console, print_json
from adaptersync_tools.systemd.scale import commands, patience_s, run, running_units, units_of

LOOK_S = 0.3


@click.command()
@click.argument("replicas", required=False, type=click.IntRange(0, MOST["replicas"]))
@config_option
@click.option("--host", help="As `hostname` prints it there.  [default: this one]")
@click.option("--routers", type=click.IntRange(0, MOST["routers"]), help="Routers of the host.  [default: as before]")
@click.option(
    "--workers", type=click.IntRange(0, MOST["workers"]), help="rq workers of the host.  [default: as before]"
)
@click.option("--dry-run", is_flag=True, help="Print what would be run, and change nothing.")
@click.option("--ask-only", is_flag=True, help="Ask, and print what carries it out on the host; run nothing.")
@click.option("--forget", is_flag=True, help="The host is no longer to run anything in particular.")
@click.option("--force", is_flag=True, help="Even to fewer than coordinator.min_ready.")
@click.option("--no-wait", is_flag=True, help="Do not wait until the host runs what it is to run.")
@timeout_option(600.0)
@json_option
def scale(
    replicas: int | None,
    config_path: Path | None,
    host: str | None,
    routers: int | None,
    workers: int | None,
    dry_run: bool,
    ask_only: bool,
    forget: bool,
    force: bool,
    no_wait: bool,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Set how many REPLICAS, routers and workers a host runs; without any of them, show it.

    More are started, join, prove what is served, and serve. Fewer drain, the highest number first: what is in flight
    there ends before they do. Below `adaptersync up` that happens by itself, from whatever host it is asked; below
    systemd this is run on the host itself, as root, and is about units.

    \b
    Examples:
      adaptersync scale 4
      adaptersync scale 2 --routers 2 --workers 3
      adaptersync scale 4 --dry-run
    """
    config = settings(config_path)
    here = host is None or host == socket.gethostname()
    host = host or socket.gethostname()
    scales, view = visit(config, lambda registry: _read(registry, config))
    before = scales.get(host)
    if forget:
        visit(config, lambda registry: scaling.forget(registry.client, registry.keys, host))
        return
    if replicas is None and routers is None and workers is None:
        _show(view, as_json=as_json)
        return
    asked = wanted(before, replicas, routers, workers)
    scaling.check(host, asked)
    if not force:
        check_floor(view, host, asked, config.coordinator.min_ready)
    todo: list[tuple[str, ...]] = []
    if asked.keeper == SYSTEMD:
        told = here and not ask_only and shutil.which("systemctl") is not None
        units = running_units() if told else units_of(view.replicas, host)
        todo = commands(asked, units, engines=bool(config.engine.model))
    if dry_run:
        if as_json:
            print_json({"host": host, "asked": asked, "commands": todo})
        else:
            click.echo(
                "\n".join(map(shlex.join, todo)) or f"nothing to run: {asked.keeper} of {host} follows by itself"
            )
        return
    visit(config, lambda registry: scaling.ask(registry.client, registry.keys, host, asked))
    if ask_only or (todo and not here):
        if as_json:
            print_json({"host": host, "asked": asked, "commands": todo})
        elif ask_only:
            click.echo("\n".join(map(shlex.join, todo)))
        else:
            click.echo(f"asked; on {host}, as root, this carries it out: {shlex.join(said(asked, force=force))}")
        return
    for command in todo:
        run(command, limit_s=patience_s(config))
    if no_wait:
        _show(visit(config, lambda registry: look(registry, config))[1], as_json=as_json)
        return
    _show(visit(config, lambda registry: settled(registry, config, host, timeout_s), timeout_s=timeout_s + VISIT_S),
          as_json=as_json)  # fmt: skip


def wanted(before: Scale | None, replicas: int | None, routers: int | None, workers: int | None) -> Scale:
    """What is asked for: what was not named stays as it was asked for, or as it is."""
    given = {"replicas": replicas, "routers": routers, "workers": workers}
    return replace(before or Scale(), **{kind: count for kind, count in given.items() if count is not None})


def said(asked: Scale, *, force: bool = False) -> list[str]:
    """The command that asks for it."""
    counts = [] if asked.replicas is None else [str(asked.replicas)]
    options = {"--routers": asked.routers, "--workers": asked.workers}
    more = [word for name, count in options.items() if count is not None for word in (name, str(count))]
    return ["adaptersync", "scale", *counts, *more, *(["--force"] if force else [])]


def check_floor(view: StatusView, host: str, asked: Scale, min_ready: int) -> None:
    """ControlError where fewer replicas than the floor would be left in the whole group."""
    if asked.replicas is None:
        return
    mine = _host(view, host)
    fewer = mine is not None and asked.replicas < mine.ready
    left = asked.replicas + sum(each.ready for each in view.hosts if each.host != host)
    if fewer and left < min_ready:
        raise ControlError(
            f"{left} replicas would be left, coordinator.min_ready is {min_ready}",
            next_step="add some elsewhere first, or --force",
            host=host,
        )


async def settled(registry: Registry, config: Config, host: str, timeout_s: float) -> StatusView:
    """The fleet, once the host runs what it was asked to."""
    deadline = time.monotonic() + timeout_s
    while True:
        _, view = await look(registry, config)
        mine = _host(view, host)
        if mine is not None and mine.settled:
            return view
        if time.monotonic() > deadline:
            why = [f"{each.replica} is {each.state}: {each.reason}" for each in view.replicas if each.state != "ready"]
            raise ControlUnavailable(
                f"host does not run what it is to run: {'; '.join(why[:4]) or 'see adaptersync status'}",
                next_step="it stays asked for; look at the logs there",
                host=host,
                ready=mine.ready if mine else 0,
                desired=mine.desired if mine else None,
            )
        await asyncio.sleep(LOOK_S)


def _host(view: StatusView, host: str) -> HostView | None:
    return next((each for each in view.hosts if each.host == host), None)


async def _read(registry: Registry, config: Config) -> tuple[dict[str, Scale], StatusView]:
    return await scaling.asked(registry.client, registry.keys), (await look(registry, config))[1]


def _show(view: StatusView, *, as_json: bool) -> None:
    if as_json:
        print_json({"hosts": view.hosts})
    else:
        console().print(
            screen.hosts(view) or Text("no host was asked to run anything: adaptersync scale --help", "dim")
        )


COMMANDS = (scale,)
