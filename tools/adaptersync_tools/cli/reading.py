"""Commands that look: status, versions, events, config. Each has --json, and none changes anything."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import click
import orjson
from msgspec.structs import replace
from rich.text import Text

from adaptersync.coordinator import views
from adaptersync.coordinator.observer import look
from adaptersync_core.bus import follow as follow_stream
from adaptersync_core.config import Config
from adaptersync_core.entries import moment, written_ms
from adaptersync_core.errors import ConfigError, NameInvalid
from adaptersync_core.events import PHASES
from adaptersync_core.keys import Keys
from adaptersync_core.redis import Entry
from adaptersync_core.registry import Registry
from adaptersync_core.rollouts import read_rollouts
from adaptersync_tools import explain, screen
from adaptersync_tools.cli.common import config_option, json_option, settings, visit
from adaptersync_tools.output import EVENT_STYLES, console, milliseconds, one_line, print_json, seconds, state, table

NARROW = 140  # columns of a terminal that does not hold all of a version's
PAGE = 500  # stream entries of one read
_AGE = re.compile(r"(\d+(?:\.\d+)?)(s|min|m|h|d)")
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}


@click.command()
@config_option
@json_option
def status(config_path: Path | None, as_json: bool) -> int:
    """Show replicas, runs and routers. Exit status 0 when all is well, else 1.

    \b
    Examples:
      adaptersync status
      adaptersync status --json | jq .problems
    """
    config = settings(config_path)

    _, view = visit(config, lambda registry: look(registry, config))
    if as_json:
        print_json(view)
    else:
        _print_status(view)
    return 0 if view.healthy else 1


def _print_status(view: views.StatusView) -> None:
    out = console()
    out.print(screen.heading(view))
    for problem in view.problems:
        out.print(Text(f"  ! {one_line(problem)}", "red"))
    out.print()
    for part in (
        screen.replicas(view),
        screen.hosts(view),
        screen.runs(view),
        screen.routers(view),
        screen.held(view),
    ):
        if part is not None:
            out.print(part)


@click.command()
@click.argument("run", required=False)
@config_option
@json_option
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Newest versions of each run.")
@click.option("--rollouts", "counted", is_flag=True, help="Count their rollouts too, those that Redis still has.")
def versions(run: str | None, config_path: Path | None, as_json: bool, limit: int, counted: bool) -> None:
    """Show versions of RUN or of all runs, newest first.

    \b
    waited: from publication to the first promotion.
    phases: visible, staged, verified, loaded and, where it is done, proved; milliseconds of the slowest replica.
    Example:
      adaptersync versions my-run --limit 5
    """
    config = settings(config_path)

    async def read(registry: Registry) -> list[views.VersionView]:
        known = await registry.runs()
        if run is not None and run not in known:
            raise NameInvalid("no such run", next_step=f"known runs: {', '.join(known) or 'none'}", run=run)
        facts = []
        for name in [run] if run else known:
            newest = (await registry.published(name))[-limit:][::-1]
            kept = await registry.records([adapter_id for adapter_id, _ in newest])
            facts += [
                views.Facts(version=adapter_id, run=name, seq=seq, manifest=manifest, record=record)
                for (adapter_id, seq), (manifest, record) in zip(newest, kept, strict=True)
            ]
        found = views.versions(facts, await registry.fleet())
        if not counted:
            return found
        counts = views.count_rollouts(await read_rollouts(registry))
        return [replace(each, rollouts=counts.get(each.version, views.RolloutCounts())) for each in found]

    found = visit(config, read)
    if as_json:
        print_json(found)
        return
    out = console()
    columns: tuple[str, ...] = (
        "version!",
        "state!",
        "step>",
        "age>",
        "replicas>",
        "waited>",
        "phases, ms>",
        "size>",
        "stored!",
        "why",
    )
    rows = [_version_row(view) for view in found]
    if out.width < NARROW:  # what can be done without, so that the rest stays whole
        columns, rows = (*columns[:7], columns[9]), [(*row[:7], row[9]) for row in rows]
    if counted:  # before the last column, which says why
        columns = (*columns[:-1], "rollouts>", columns[-1])
        rows = [(*row[:-1], _counts(view), row[-1]) for row, view in zip(rows, found, strict=True)]
    out.print(table("Versions", columns, rows) if rows else Text("no versions yet", "dim"))


def _version_row(view: views.VersionView) -> tuple[Any, ...]:
    accepted = sum(ack.accepted for ack in view.acks.values())
    refusals = [f"{replica}: {ack.reason}" for replica, ack in view.acks.items() if not ack.accepted]
    if view.verified is False:
        refusals.insert(0, "stored bytes are not what was announced")
    stored = {True: Text("verified", "green"), False: Text("CORRUPT", "bold red"), None: Text("")}[view.verified]
    return (
        view.version,
        state(view.state),
        "" if view.step is None else view.step,
        seconds(view.age_s),
        f"{accepted}/{len(view.acks)}" if view.acks else "",
        seconds(view.promoted_s),
        " ".join(milliseconds(spent) for phase in PHASES if (spent := view.phase(phase)) is not None),
        "" if view.size is None else views.size(view.size),
        stored,
        view.reason or "; ".join(refusals) or (f"changes nothing: {view.noop}" if view.noop else ""),
    )


def _counts(view: views.VersionView) -> str:
    counts = view.rollouts or views.RolloutCounts()
    marks = (("unknown", counts.unknown), ("voided", counts.voided))
    return ", ".join([str(counts.total), *(f"{count} {name}" for name, count in marks if count)])


@click.command()
@config_option
@json_option
@click.option("--follow", "-f", is_flag=True, help="Go on with what happens from now; ends with Ctrl-C.")
@click.option("--since", help="How far to look back: 30s, 10min, 2h, 1d, or a stream id.  [default: the last 50]")
def events(config_path: Path | None, as_json: bool, follow: bool, since: str | None) -> None:
    """Show what happened, oldest first.

    \b
    Examples:
      adaptersync events --since 10min
      adaptersync events --follow
      adaptersync events --since 1h --json | jq -r 'select(.type == "version.promoted") | .version'
    """
    config = settings(config_path)
    start = _stream_id(since) if since else None
    entries = visit(config, lambda registry: _past(registry, start))
    tell = _printer(as_json)
    for entry in entries:
        tell(entry)
    if not follow:
        return

    async def watch(stream: str) -> None:
        after = entries[-1][0] if entries else "$"
        batches: AsyncIterator[list[Entry]] = follow_stream(
            config.redis.control_url, stream, name="cli-events", after=after
        )
        async for batch in batches:
            for entry in batch:
                tell(entry)

    asyncio.run(watch(Keys(config.group.name).events))


async def _past(registry: Registry, start: str | None) -> list[Entry]:
    """Since `start`, or the last ones."""
    stream = registry.keys.events
    if start is None:
        newest = await registry.client.command("XREVRANGE", stream, "+", "-", "COUNT", 50)
        return [(entry_id, fields) for entry_id, fields in reversed(newest)]
    found: list[Entry] = []
    while page := await registry.client.command("XRANGE", stream, start, "+", "COUNT", PAGE):
        found += [(entry_id, fields) for entry_id, fields in page]
        start = f"({page[-1][0]}"
    return found


def _stream_id(since: str) -> str:
    if re.fullmatch(r"\d{10,}(-\d+)?", since):
        return since
    if found := _AGE.fullmatch(since):
        return str(max(0, int((time.time() - float(found[1]) * _UNITS[found[2]]) * 1000)))
    raise click.BadParameter("give a time such as 30s, 10min, 2h or 1d, or a stream id", param_hint="--since")


def _printer(as_json: bool) -> Callable[[Entry], None]:
    """Prints one event as a line, at once: who follows through a pipe wants it now."""
    out = console()

    def tell(entry: Entry) -> None:
        entry_id, fields = entry
        at = moment(written_ms(entry_id) / 1000)
        if as_json:
            sys.stdout.write(orjson.dumps({"id": entry_id, "at": at.isoformat(), **fields}).decode() + "\n")
        else:
            kind = one_line(fields.get("type", "?"))
            subject, text = map(one_line, views.tell(fields))
            bad = fields.get("accepted") == "false" or fields.get("ok") == "false"
            style = "bold red" if bad else EVENT_STYLES.get(kind, "")
            clock = at.astimezone().strftime("%H:%M:%S.%f")[:-3]
            line = Text.assemble((clock, "dim"), "  ", (f"{kind:<20}", style), " ", (subject, "bold"), "  ", text)
            out.print(line, soft_wrap=True)
        sys.stdout.flush()

    return tell


@click.command("config")
@config_option
@json_option
@click.option("--explain", "explained", is_flag=True, help="Every key with its meaning, default and variable.")
def show_config(config_path: Path | None, as_json: bool, explained: bool) -> None:
    """Show the settings in force.

    Defaults, then the file, then the environment; the last one wins. Secrets are shown as ***, which no setting may be:
    what was printed is a settings file again once they are put in, or named by redis.password_file and
    router.gate_token_file.

    \b
    Examples:
      adaptersync config > adaptersync.toml
      adaptersync config --explain
    """
    wrong = None
    try:
        config = settings(config_path)
    except ConfigError as error:
        if not explained:
            raise
        wrong, config = error, Config()  # what each key means is what whoever got one wrong looks for
    found = list(explain.keys(config))
    if as_json:
        print_json(found if explained else {key.name: key.value for key in found})
    elif explained:
        rows = [
            (key.name, key.default, Text(str(key.value), "bold") if key.value != key.default else "", key.meaning)
            for key in found
        ]
        out = console()
        out.print(table("Settings", ("key", "default", "value here", "meaning"), rows))
        out.print(Text(f"In the environment {found[0].name} is {found[0].variable}, and so on.", "dim"))
    else:
        click.echo(explain.to_toml({key.name: key.value for key in found}), nl=False)
    if wrong is not None:
        raise wrong


COMMANDS = (status, versions, events, show_config)
