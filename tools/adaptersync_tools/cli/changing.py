"""Commands that ask the fleet for something: rollback, gate, end, verify; they wait for the outcome."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
from rich.text import Text

from adaptersync_core.errors import AdapterInvalid, ControlError, ControlUnavailable, NameInvalid, PublicationFailed
from adaptersync_core.identity import parse_adapter_id
from adaptersync_core.keys import TRAINER_ALIVE_S
from adaptersync_core.queue import Jobs
from adaptersync_core.records import Request
from adaptersync_core.registry import Registry
from adaptersync_core.table import RunEntry, Table
from adaptersync_tools.cli.common import (
    VISIT_S,
    config_option,
    json_option,
    reason_option,
    settings,
    timeout_option,
    visit,
)
from adaptersync_tools.output import console, print_json, state

LOOK_S = 0.1
PAGE = 256


@click.command()
@click.argument("run")
@config_option
@click.option(
    "--to",
    "version",
    default="",
    help="The version to go back to, or the one on its way in that shall not be served.  [default: the one before]",
)
@reason_option("Why; it is written into the record of the voided version.")
@timeout_option(30.0)
def rollback(run: str, config_path: Path | None, version: str, reason: str, timeout_s: float) -> None:
    """Void the current version and serve an earlier one.

    Requests in flight on the voided version finish; no new ones are admitted to it. A version that is on its way in,
    named with --to, is given up instead, and nothing else changes. It is about the version that is current when it is
    asked for: once another is current it is refused, so a repeat voids nothing more.

    \b
    Example:
      adaptersync rollback my-run --reason "answers in the wrong language"
    """
    if version:
        parse_adapter_id(version)

    async def call(registry: Registry) -> dict[str, str]:
        table = await registry.table()
        current = _entry(table, run).current or ""
        about = version if version and version == table.candidate(run) else current
        request = Request(kind="rollback", run=run, version=version, reason=reason, current=current)
        return await ask(registry, request, partial(rolled_back, about=about), about=about, timeout_s=timeout_s)

    console().print(rollback_told(visit(settings(config_path), call, timeout_s=timeout_s + VISIT_S)))


def rolled_back(event: dict[str, str], *, about: str) -> bool:
    """Whether an event says that a rollback was done: the version it is about was voided, or given up."""
    return event.get("type") in ("version.voided", "version.rolled_back") and event["version"] == about


def rollback_told(event: dict[str, str]) -> Text:
    if event["type"] == "version.rolled_back":
        return Text.assemble("gave up ", (event["version"], "bold"))
    current = event.get("current", "")
    return Text.assemble("voided ", (event["version"], "bold"), "; ", (current, "bold green"), " is current")


@click.command()
@click.argument("run")
@config_option
@reason_option("Why; a trainer of the run that still lives is told.")
@click.option("--force", is_flag=True, help="Even if its trainer lives: it can publish no more.")
def end(run: str, config_path: Path | None, reason: str, force: bool) -> None:
    """End a run whose trainer died without saying so.

    What it promoted stays while nobody needs the room, as when a trainer ends its run itself. The trainer that began it
    is refused from here on; another may begin it again.

    \b
    Example:
      adaptersync end my-run --reason "node lost"
    """
    alive_s = 0 if force else TRAINER_ALIVE_S
    news = visit(settings(config_path), lambda registry: registry.close_run(run, reason=reason, alive_s=alive_s))
    console().print(Text.assemble("run ", (run, "bold"), " is ended" if news else " had ended before"))


@click.command()
@click.argument("verdict", type=click.Choice(["admit", "refuse"]))
@click.argument("run")
@click.argument("version")
@config_option
@click.option("--reason", default="", help="Why; a refused version's record says it.")
@timeout_option(30.0)
def gate(verdict: str, run: str, version: str, config_path: Path | None, reason: str, timeout_s: float) -> None:
    """Let a version through the gate, or refuse it.

    With coordinator.gate set, a version that every replica proved is ready, and waits. Until it is admitted only
    requests with router.gate_token are served by it. Where coordinator.gate_function answers, an operator may, too.

    \b
    Example:
      adaptersync gate admit my-run my-run-v7-0123456789ab
    """
    parse_adapter_id(version)
    ends = {"version.promoted": "current", "version.rolled_back": "rolled_back", "version.superseded": "superseded"}

    def done(fields: dict[str, str]) -> bool:
        return fields.get("type") in ends and fields["version"] == version

    async def call(registry: Registry) -> dict[str, str]:
        _entry(await registry.table(), run)
        request = Request(kind=verdict, run=run, version=version, reason=reason)
        return await ask(registry, request, done, about=version, timeout_s=timeout_s)

    told = visit(settings(config_path), call, timeout_s=timeout_s + VISIT_S)
    end = ends[told["type"]]
    if (end == "current") != (verdict == "admit"):
        raise ControlError(f"version is {end}: {told.get('reason', '')}", version=version)
    console().print(Text.assemble((version, "bold"), " is ", state(end)))


def _entry(table: Table, run: str) -> RunEntry:
    if run not in table.runs:
        raise NameInvalid("no such run", next_step=f"known runs: {', '.join(table.runs) or 'none'}", run=run)
    return table.runs[run]


async def ask(
    registry: Registry, request: Request, done: Callable[[dict[str, str]], bool], *, about: str, timeout_s: float
) -> dict[str, str]:
    """Ask the coordinator, and return the event that says it is done; `about` is the version that is in question."""
    newest = await registry.client.command("XREVRANGE", registry.keys.events, "+", "-", "COUNT", 1)
    after = newest[0][0] if newest else "0"
    request_id = await registry.request(request)
    try:
        async with asyncio.timeout(timeout_s):
            return await answer(registry, done, after=after, run=request.run, request=request_id)
    except TimeoutError:
        raise ControlUnavailable(
            "no coordinator answered in time",
            next_step=f"see adaptersync status; the request stays queued, and is about {about or 'no version'} only",
            run=request.run,
            request=request_id,
        ) from None


async def answer(
    registry: Registry, done: Callable[[dict[str, str]], bool], *, after: str, run: str, request: str
) -> dict[str, str]:
    """The first event later than `after` of which `done` is true; ControlError when the request was refused."""
    while True:
        for entry_id, fields in await registry.client.read_stream(registry.keys.events, after, count=PAGE):
            after = entry_id
            if fields.get("type") == "request.refused" and fields.get("request") == request:
                raise ControlError(f"coordinator refused: {fields.get('reason', '')}", run=run)
            if done(fields):
                return fields
        await asyncio.sleep(LOOK_S)


@click.command()
@click.argument("version")
@config_option
@json_option
@timeout_option(120.0)
def verify(version: str, config_path: Path | None, as_json: bool, timeout_s: float) -> None:
    """Check every byte of a stored version.

    A worker reads it again and compares it with what was announced.

    \b
    Example:
      adaptersync verify my-run-v7-0123456789ab
    """
    parse_adapter_id(version)
    config = settings(config_path)

    async def look(registry: Registry) -> tuple[float, dict[str, str]]:
        ((manifest, record),) = await registry.records([version])
        if manifest is None:
            raise NameInvalid("no such version", next_step="see adaptersync versions", version=version)
        return float(record.get("verified_at", 0)), record

    before, _ = visit(config, look)
    with Jobs(config) as jobs:
        jobs.verify(version)

    async def wait(registry: Registry) -> dict[str, str]:
        deadline = time.monotonic() + timeout_s
        while True:
            at, record = await look(registry)
            if at > before:
                return record
            if time.monotonic() > deadline:
                raise PublicationFailed(
                    "no verdict in time", next_step="check that adaptersync worker runs", version=version
                )
            await asyncio.sleep(LOOK_S)

    record = visit(config, wait, timeout_s=timeout_s + 5)
    ok = record["verified_ok"] == "true"
    if as_json:
        print_json({"version": version, "ok": ok, "reason": record.get("verified_reason", "")})
    elif ok:
        console().print(Text.assemble((version, "bold"), " is ", ("verified", "green"), ": every byte as announced"))
    if not ok:
        raise AdapterInvalid(f"stored version is corrupt: {record.get('verified_reason')}", version=version)


COMMANDS = (rollback, gate, end, verify)
