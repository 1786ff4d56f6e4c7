"""Before it runs, and where it does not: is this host fit for it, and how large must everything be."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import click
from rich.text import Text

from adaptersync_core.config import CONFIG
from adaptersync_tools.cli.common import config_option, json_option, settings, settings_named
from adaptersync_tools.engines import LINEAR
from adaptersync_tools.output import console, print_json, table


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
    if not verdict.well and not settings_named(config_path):
        what = "no settings file is named, so this was a look at the built-in defaults and the environment"
        verdict.check("settings", False, what, f"name it by --config or {CONFIG}", level="warning")
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


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--rank", type=click.IntRange(min=1), default=16, show_default=True, help="LoRA rank.")
@click.option(
    "--window",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    help="Versions before the current one that still serve (trainer.max_staleness).",
)
@click.option("--runs", type=click.IntRange(min=1), default=1, show_default=True, help="Runs that share the fleet.")
@click.option("--replicas", type=click.IntRange(min=1), default=2, show_default=True, help="vLLM servers.")
@click.option("--targets", default=",".join(LINEAR), show_default=True, help="Modules that adapters change.")
@click.option(
    "--dtype", type=click.Choice(["F32", "F16", "BF16"]), default="F32", show_default=True, help="Of saved adapters."
)
@click.option(
    "--step",
    "step_s",
    type=click.FloatRange(min=0.1),
    default=60.0,
    show_default=True,
    help="Seconds from one publication of a run to the next.",
)
@click.option("--rollouts", type=click.IntRange(min=1), default=256, show_default=True, help="Of one step of a run.")
@click.option(
    "--days", type=click.FloatRange(min=0.01), default=30.0, show_default=True, help="How long versions are kept."
)
@json_option
def plan(
    model: Path, rank: int, window: int, runs: int, replicas: int, targets: str, dtype: str, step_s: float,
    rollouts: int, days: float, as_json: bool,
) -> None:  # fmt: skip
    """Say how large a deployment must be for a base model, and why.

    MODEL is a directory with its config.json; nothing else of it is read.

    \b
    Examples:
      adaptersync plan ~/models/qwen --rank 32 --replicas 8
      adaptersync plan ~/models/qwen --runs 3 --window 1 --json | jq .flags
    """
    from adaptersync_tools import plan as planning

    modules = tuple(part.strip() for part in targets.split(",") if part.strip())
    wanted = planning.Wanted(
        rank=rank,
        window=window,
        runs=runs,
        replicas=replicas,
        targets=modules,
        dtype=dtype,
        step_s=step_s,
        rollouts=rollouts,
        days=days,
    )
    made = planning.plan(planning.base_model(model), wanted)
    if as_json:
        print_json(made)
        return
    out = console()
    rows = [(number.name, _written(number.value, number.unit), number.why) for number in made.numbers]
    out.print(table("Plan", ("what!", "how much>!", "why"), rows))
    flags = " ".join(f"{flag} {value}" for flag, value in made.flags.items())
    out.print(Text.assemble(("vLLM: ", "dim"), (f"--enable-lora {flags}", "bold")), soft_wrap=True)


def _written(value: float, unit: str) -> str:
    if unit == "bytes":
        for name, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
            if value >= size:
                return f"{value / size:.1f} {name}"
        return f"{value:.0f} B"
    if unit == "share":
        return f"{value:.2%}"
    return f"{value:.2f} s" if unit == "s" else f"{value:g}"


COMMANDS = (plan, doctor)
