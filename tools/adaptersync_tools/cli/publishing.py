"""Commands that publish adapters for a trainer that does not do it itself: publish one, or watch what it writes."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import click
import msgspec
from rich.text import Text

from adaptersync.trainer.arrivals import PRESETS, Layout
from adaptersync.trainer.publisher import AdapterPublisher
from adaptersync.trainer.watch import News, Watch
from adaptersync_core.base_model import base_shapes
from adaptersync_core.errors import AdapterInvalid, ConfigError, PublicationFailed
from adaptersync_core.fitness import Finding, examine
from adaptersync_core.identity import check_run
from adaptersync_core.manifest import AdapterShape
from adaptersync_core.registry import Registry
from adaptersync_core.telemetry import configure_logging
from adaptersync_tools.cli.common import config_option, json_option, settings, timeout_option, visit
from adaptersync_tools.output import console, print_json, state

SHELL = "shell"  # the incarnation of every trainer that is `publish`
STYLES = {
    "error": "bold red",
    "warning": "yellow",
    "published": "bold cyan",
    "bad": "bold red",
    "trouble": "red",
    "waiting": "yellow",
    "repeated": "dim",
    "passed": "dim",
}

directory_argument = click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
base_option = click.option(
    "--base-model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory of the base model: every tensor must fit a weight of it.",
)


@click.command()
@directory_argument
@config_option
@json_option
@click.option("--run", default="", help="The run it belongs to; a new name begins a new run.")
@click.option("--step", type=int, help="The trainer's step, for the record.")
@base_option
@click.option("--check", is_flag=True, help="Publish nothing: say all that is wrong with it, and what to do about it.")
@click.option("--offline", is_flag=True, help="With --check: ask no fleet, and look at the files alone.")
@click.option(
    "--wait/--no-wait", default=True, help="Wait until it is current, or is not going to be.  [default: wait]"
)
@timeout_option(120.0)
def publish(
    directory: Path,
    config_path: Path | None,
    as_json: bool,
    run: str,
    step: int | None,
    base_model: Path | None,
    check: bool,
    offline: bool,
    wait: bool,
    timeout_s: float,
) -> int:
    """Publish a PEFT adapter as the next version.

    What the fleet could not serve is refused before it is announced: DoRA, modules_to_save, trained embeddings and
    biases, names that vLLM would ignore, a rank above the limit of half of the ready replicas. --check lists all of it.

    Once it is not refused, a trainer of the run that is still going can publish no more. What this command publishes,
    call after call, shares a window: `adaptersync rollback` finds the version before. Exit status 0 when the version
    became current (with --no-wait: when it is announced), 1 when it did not. With --check: 0 when the fleet can serve
    it, 65 when not.

    \b
    Examples:
      adaptersync publish out/checkpoint-100 --run my-run
      adaptersync publish out/checkpoint-100 --check --base-model ~/models/qwen
      adaptersync publish out/checkpoint-100 --check --offline
    """
    if offline and not check:
        raise click.UsageError("--offline is for --check: nothing can be published without Redis")
    if check:
        return _check(directory, config_path, as_json=as_json, base_model=base_model, offline=offline)
    if not run:
        raise click.UsageError("Missing option '--run'")
    out = console()
    config = settings(config_path)
    check_run(run, base_model=config.group.base_model)
    # before there is a publisher, which takes the run from its trainer
    reports, base = visit(config, Registry.ready), _weights(base_model)
    _, findings = examine(directory, base=base, reports=reports)
    for finding in findings:
        if finding.level == "error":
            raise finding.refusal()
    with AdapterPublisher(config, run=run, incarnation=SHELL) as publisher:
        publication = publisher.publish(directory, step=step)
        if not as_json:
            out.print(Text.assemble("published ", (publication.adapter_id, "bold")))
        if not wait:
            if as_json:
                print_json({"version": publication.adapter_id, "state": "published", "reason": ""})
            return 0
        outcome = publication.wait(timeout_s)
    if as_json:
        print_json({"version": publication.adapter_id, "state": outcome.state, "reason": outcome.reason})
    else:
        out.print(Text.assemble("it is ", state(outcome.state), f": {outcome.reason}" if outcome.reason else ""))
    return 0 if outcome.state == "current" else 1


def _check(directory: Path, config_path: Path | None, *, as_json: bool, base_model: Path | None, offline: bool) -> int:
    reports = {} if offline else visit(settings(config_path), Registry.ready)
    base = _weights(base_model)
    shape, findings = examine(directory, base=base, reports=reports)
    fit = all(finding.level != "error" for finding in findings)
    if as_json:
        print_json({"ok": fit, "replicas": len(reports), "findings": findings, "adapter": _summary(shape)})
    else:
        _show(directory, shape, findings)
        fleet = "no fleet was asked" if offline else f"asked {len(reports)} ready replicas"
        weights = f"compared with {len(base)} weights of the base model" if base else "not compared with a base model"
        verdict = ("can be served", "bold green") if fit else ("cannot be served", "bold red")
        console().print(Text.assemble(verdict, f"; {fleet}, {weights}"))
    return 0 if fit else AdapterInvalid.exit_code


def _weights(base_model: Path | None) -> dict[str, tuple[int, ...]]:
    if base_model is None:
        return {}
    if not (shapes := base_shapes(base_model.absolute())):
        raise ConfigError("no weights of a base model are there", next_step="give its directory", path=str(base_model))
    return shapes


def _summary(shape: AdapterShape | None) -> dict[str, object] | None:
    if shape is None:
        return None
    names = ("rank", "alpha", "target_modules", "base_model", "dtype", "noop")
    return {name: getattr(shape, name) for name in names} | {"tensors": len(shape.tensors)}


def _show(directory: Path, shape: AdapterShape | None, findings: list[Finding]) -> None:
    out = console()
    if shape is not None:
        modules = " ".join(shape.target_modules)
        about = f"rank {shape.rank}, alpha {shape.alpha:g}, {len(shape.tensors)} tensors of {shape.dtype}: {modules}"
        out.print(Text.assemble((str(directory), "bold"), f"  {about}"))
    for finding in findings:
        out.print(Text.assemble((f"{finding.level:9}", STYLES[finding.level]), finding.what))
        out.print(f"{'':9}{finding.fix}")


@click.command()
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@config_option
@json_option
@click.option("--run", required=True, help="The run it is published into; a new name begins a new run.")
@click.option("--preset", type=click.Choice(list(PRESETS)), help="Pattern and mark as this trainer has them.")
@click.option("--pattern", help="Where adapters are below DIRECTORY, with {step} for the number: step_{step}/adapter.")
@click.option("--complete", help="A file of the step's directory that the trainer writes last. Without: see --settle.")
@click.option(
    "--settle", "settle_s", type=click.FloatRange(min=0), default=5.0, show_default=True,
    help="Seconds without a change after which a directory without a mark is complete, or a bad one is given up.",
)  # fmt: skip
@click.option(
    "--interval", "interval_s", type=click.FloatRange(min=0.01), default=1.0, show_default=True,
    help="Seconds between two looks.",
)  # fmt: skip
@click.option(
    "--all", "everything", is_flag=True, help="Of what is there at the start publish all, not the newest only."
)
@click.option("--once", is_flag=True, help="Publish what is there, wait for what becomes of it, and end.")
@timeout_option(120.0)
def watch(
    directory: Path,
    config_path: Path | None,
    as_json: bool,
    run: str,
    preset: str | None,
    pattern: str | None,
    complete: str | None,
    settle_s: float,
    interval_s: float,
    everything: bool,
    once: bool,
    timeout_s: float,
) -> int:
    """Publish what another trainer writes, as it is written.

    Directories come in the order of their steps, each once it is complete: when it has its mark, or has not changed for
    a while. Of what is there at the start only the newest is published. A directory that cannot be served is told with
    its reason, once, and passed over; one that is written again, or by a trainer that went back to an earlier step, is
    published again. What was published before a restart is not, and directories may be deleted at any time.

    Runs until SIGTERM or Ctrl-C. With --once it ends when nothing is left to do (--timeout bounds that): with status 0,
    or 1 when a directory was bad or a version was refused. One that gave way to a newer one was not.

    \b
    Examples:
      adaptersync watch outputs/run_default/broadcasts --preset prime-rl --run my-run
      adaptersync watch out --preset trl --run my-run
      adaptersync watch out --pattern 'epoch-{step}/lora' --complete DONE --run my-run
      adaptersync watch out --pattern 'step_{step}' --run my-run --once --all
    """
    layout = _layout(preset, pattern, complete)
    if once and not directory.is_dir():
        raise ConfigError("directory is not there", next_step="without --once it is waited for", path=str(directory))
    config = settings(config_path)
    configure_logging("watch", run)
    logging.getLogger().setLevel(logging.WARNING)  # the rest is told on standard output
    told = _Told(as_json=as_json)
    with (
        _stop_on_signals() as stop,
        AdapterPublisher(config, run=run, incarnation=_place(directory, layout)) as publisher,
    ):
        watched = Watch(publisher, directory, layout, told, settle_s=settle_s, everything=everything)
        if not once:
            told.say(f"watching {directory} for {layout.pattern}", f"{layout.complete or 'no mark'}; run {run}")
            watched.run(stop, interval_s=interval_s)
            told.say("stopped", "what is on its way goes on without this")
            return 0
        deadline = time.monotonic() + timeout_s
        watched.look(stop)
        while watched.busy and not stop.wait(min(interval_s, 0.2)):
            if time.monotonic() > deadline:
                next_step = "see adaptersync status, or raise --timeout"
                raise PublicationFailed(f"not done in {timeout_s:g} s", next_step=next_step, run=run)
            watched.look(stop)
    return 1 if told.failed else 0


def _layout(preset: str | None, pattern: str | None, complete: str | None) -> Layout:
    layout = PRESETS[preset] if preset else None
    if layout is None and pattern is None:
        raise click.UsageError("nothing says what the trainer's directories are called: give --preset or --pattern")
    if layout is None:
        return Layout(pattern=pattern or "", complete=complete or "")
    mark = layout.complete if complete is None else complete
    return Layout(pattern=layout.pattern if pattern is None else pattern, complete=mark)


def _place(directory: Path, layout: Layout) -> str:
    """The incarnation of a trainer that is watched: a restart goes on in its epoch, and its window."""
    return "watch-" + hashlib.sha256(f"{directory.absolute()}/{layout.pattern}".encode()).hexdigest()[:24]


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[threading.Event]:
    """An event that is set by the first signal to end; a second one interrupts what is being done."""
    stop = threading.Event()

    def end(_number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Told:
    """Says what happens: a line each, or a line of JSON. `failed` once something did that should not."""

    def __init__(self, *, as_json: bool) -> None:
        self.failed = False
        self._as_json = as_json
        self._out = console()

    def __call__(self, news: News) -> None:
        self.failed |= news.what in ("bad", "rolled_back", "voided")
        if self._as_json:
            sys.stdout.write(msgspec.json.encode(news).decode() + "\n")
            sys.stdout.flush()
            return
        style = STYLES.get(news.what) or state(news.what).style
        step = "" if news.step is None else f"step {news.step}"
        more = f" and {news.count - 1} more" if news.count > 1 else ""
        about = ": ".join(part for part in ((news.version or news.directory) + more, news.reason) if part)
        line = Text.assemble((time.strftime("%H:%M:%S  "), "dim"), f"{step:12}", (f"{news.what:12}", style), about)
        self._out.print(line, soft_wrap=True)
        if news.fix:
            self._out.print(f"{'':34}{news.fix}", soft_wrap=True)

    def say(self, what: str, about: str) -> None:
        """To a person only."""
        if not self._as_json:
            self._out.print(Text.assemble((f"{what}  ", "bold"), (about, "dim")), soft_wrap=True)


COMMANDS = (publish, watch)
