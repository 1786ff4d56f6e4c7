"""Commands about jobs and what they keep: jobs, retire, remove, export."""

from __future__ import annotations

from pathlib import Path

import click
from rich.text import Text

from adaptersync_core.config import JobsSection
from adaptersync_core.errors import ControlError, NameInvalid
from adaptersync_core.identity import parse_adapter_id
from adaptersync_core.job_records import job_failures, round_states
from adaptersync_core.queue import ROUNDS, Jobs
from adaptersync_core.records import Request
from adaptersync_core.registry import Registry
from adaptersync_tools.cli.changing import ask
from adaptersync_tools.cli.common import (
    VISIT_S,
    config_option,
    json_option,
    reason_option,
    settings,
    timeout_option,
    visit,
)
from adaptersync_tools.output import console, print_json, seconds, table

REMOVED = "removed"  # what the job says when it has


@click.command()
@config_option
@json_option
@click.option("--ask", "wanted", type=click.Choice(tuple(ROUNDS)), help="Ask for this one now, and wait for its end.")
@timeout_option(120.0)
def jobs(config_path: Path | None, as_json: bool, wanted: str | None, timeout_s: float) -> int:
    """Show what workers do by the clock, and which jobs failed. Exit status 1 when one did.

    verify asks for every served version to be read again, retention removes what store.keep_last and its like let go,
    tidy what killed publishers left; ledger archives rollouts and events. `rq info` of the control server shows the
    queue and its workers.

    \b
    Example:
      adaptersync jobs --ask retention
    """
    config = settings(config_path)
    if wanted:
        with Jobs(config) as queue:
            ended = queue.wait(queue.round(wanted), timeout_s=timeout_s)
        if not ended.ok:
            raise ControlError(f"job failed: {ended.said}", next_step="see the worker's log", job=wanted)
        console().print(Text.assemble((wanted, "bold"), ": ", ended.said))
        return 0
    group = config.group.name
    states = visit(config, lambda registry: round_states(registry.client, group))
    failed = visit(config, lambda registry: job_failures(registry.client, group))
    if as_json:
        print_json({"rounds": states, "failed": failed})
        return 1 if failed else 0
    out = console()
    rows = [(each.name, _when(config.jobs, each.name), seconds(each.asked_s), each.state) for each in states]
    out.print(table("By the clock", ("job!", "when", "asked for>", "state!"), rows))
    if failed:
        failures = [(each.function, each.about, each.at, Text(each.reason, "red")) for each in failed]
        out.print(table("Failed", ("job!", "about", "at", "why"), failures))
    return 1 if failed else 0


def _when(settings: JobsSection, name: str) -> str:
    if name == "ledger":
        return f"every {settings.ledger_s:g} s" if settings.ledger_s else "never"
    return getattr(settings, f"{name}_cron") or "never"


@click.command()
@click.argument("run")
@config_option
@reason_option("Why; the records of its versions say it.")
@timeout_option(30.0)
def retire(run: str, config_path: Path | None, reason: str, timeout_s: float) -> None:
    """Give up what a run that has ended still serves.

    Its versions leave the fleet once their last requests have ended; then adaptersync remove may take their files.

    \b
    Example:
      adaptersync retire my-run --reason "its model was replaced"
    """

    def done(event: dict[str, str]) -> bool:
        return event.get("type") == "version.retiring" and parse_adapter_id(event["version"]).run == run

    async def call(registry: Registry) -> dict[str, str]:
        known = (await registry.table()).runs
        if run not in known:
            raise NameInvalid("no such run", next_step=f"known runs: {', '.join(known) or 'none'}", run=run)
        request = Request(kind="retire", run=run, reason=reason)
        return await ask(registry, request, done, about="", timeout_s=timeout_s)

    visit(settings(config_path), call, timeout_s=timeout_s + VISIT_S)
    console().print(Text.assemble("run ", (run, "bold"), " serves nothing any more"))


@click.command()
@click.argument("version")
@config_option
@timeout_option(120.0)
def remove(version: str, config_path: Path | None, timeout_s: float) -> None:
    """Take a stored version out of the store, for good.

    A worker does it, unless the version is served, on its way, or not yet considered: of a run that has ended,
    adaptersync retire comes first.

    \b
    Example:
      adaptersync remove my-run-v7-0123456789ab
    """
    parse_adapter_id(version)
    with Jobs(settings(config_path)) as queue:
        ended = queue.wait(queue.removal(version), timeout_s=timeout_s)
    if ended.said != REMOVED:
        raise ControlError(f"version stays: {ended.said}", version=version)
    console().print(Text.assemble((version, "bold"), " is removed from the store"))


@click.command()
@click.argument("version")
@config_option
@click.option("--hub", is_flag=True, help="To the Hub, below jobs.hub_namespace, rather than to jobs.export_path.")
@timeout_option(600.0)
def export(version: str, config_path: Path | None, hub: bool, timeout_s: float) -> None:
    """Copy a stored version to a directory, or to the Hub, where workers are told to.

    \b
    Example:
      adaptersync export my-run-v7-0123456789ab
    """
    parse_adapter_id(version)
    with Jobs(settings(config_path)) as queue:
        job = queue.export(version, "hub" if hub else "directory")
        ended = queue.wait(job, timeout_s=timeout_s)
    if not ended.ok:
        raise ControlError(f"export failed: {ended.said}", version=version)
    console().print(Text.assemble((version, "bold"), " is at ", ended.said))


COMMANDS = (jobs, retire, remove, export)
