"""The summary of a run as a person reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from adaptersync.coordinator.views import duration
from adaptersync_tools.curves import WIDTH, Curve, drawn
from adaptersync_tools.output import table
from adaptersync_tools.summary import CHANCE_ERRORS, CONTROL, Summary, held_out_gain

NARROW = 20  # columns of a plot, at least
NEXT = "source .venv/bin/activate && adaptersync up --simulated  (a fleet that stays; README.md, Use it)"
FEW = 6  # entries of a long list that are shown


def show(found: Summary, directory: Path, console: Console, curves: Sequence[Curve] = ()) -> None:
    console.print()
    if curves:
        width = max(NARROW, min(WIDTH, console.width - 9))
        console.print(drawn("Share of answers, by step", curves, width=width))
        console.print()
    console.print(table(_title(found), ("", ""), _rows(found)))
    phases = [(name, _ms(each.p50), _ms(each.max), each.count) for name, each in found.latency.items()]
    console.print(table("Latency, milliseconds", ("phase", "p50>", "max>", "count>"), phases))
    if found.reward_function == CONTROL:
        console.print(Text(control(found), "bold"))
    if found.sound:
        console.print(Text("✓ the run was sound", "bold green"))
    for objection in found.objections:
        console.print(Text(f"✗ {objection}", "bold red"))
    console.print(Text.assemble(("summary  ", "dim"), str(directory / "summary.json")))
    if (directory / "curve.png").exists():
        console.print(Text.assemble(("curve    ", "dim"), str(directory / "curve.png")))
    console.print(Text.assemble(("logs     ", "dim"), str(directory / "fleet" / "logs")))
    console.print(Text.assemble(("next     ", "dim"), NEXT), soft_wrap=True)


def _title(found: Summary) -> str:
    what = "synthetic trainer, simulated replicas" if found.mode == "simulated" else "TRL and vLLM"
    if found.lesson != "carry":
        what += f", {found.lesson}"
    control = ", a control" if found.reward_function == CONTROL else ""
    return f"{found.steps} steps on {found.replicas} replicas ({what}{control})"


def control(found: Summary) -> str:
    """What the control came to, in one sentence."""
    told = "This was a control: a coin decided which answers were rewarded. "
    gain = held_out_gain(found.held_out)
    if gain is None:
        return told + "Whether anything was learnt was not measured."
    before, after = found.held_out[0].sampled, found.held_out[-1].sampled
    what = "Nothing was learnt" if gain < CHANCE_ERRORS else "Yet something was learnt"
    shares = f"of the held-out answers {before:.0%} were right before and {after:.0%} after"
    return f"{told}{what}: {shares} ({gain:+.1f} standard errors)."


def _rows(found: Summary) -> list[tuple[str, str | Text]]:
    rows: list[tuple[str, str | Text]] = []
    right = None if found.reward_function == "exact" else found.right  # else it is what is rewarded
    for name, reward in (("reward", found.reward), ("right answers", right)):
        if reward is None:
            continue
        rows.append(
            (
                name,
                Text.assemble(
                    f"{reward.first:.3f} ± {reward.first_error:.3f} → ",
                    (f"{reward.last:.3f} ± {reward.last_error:.3f}", "bold"),
                    f"   first and last {reward.steps} steps, {reward.gain_errors:+.1f} standard errors",
                ),
            )
        )
    if found.held_out:
        shares = [
            f"{each.model} {each.greedy:.0%} greedy, {each.sampled:.0%} ± {each.error:.0%} sampled"
            for each in found.held_out
        ]
        rows.append(("held out", Text(" → ".join(shares), "bold")))
    if found.ratio:
        rows.append(("ratio", f"{found.ratio.mean:.4f} mean, {found.ratio.low:.4f} to {found.ratio.high:.4f}"))
    rows.append(("versions", ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in found.versions.items())))
    rollouts = found.rollouts
    given_up = f", {rollouts.given_up} given up by the trainer" if rollouts.given_up else ""
    marks = (("unknown", rollouts.unknown), ("voided", rollouts.voided), ("substituted", rollouts.substituted))
    marked = "".join(f", {count} {name}" for name, count in marks if count)
    rows.append(("rollouts", f"{rollouts.ok} served, {rollouts.failed} failed{given_up}{marked}"))
    rows.append(("by replica", _counts(rollouts.by_replica)))
    if answers := rollouts.by_version.values():
        rows.append(("by version", f"{len(answers)} versions, {min(answers)} to {max(answers)} each"))
    rows.append(("routing", _counts(rollouts.by_routing)))
    if rollouts.prompt_tokens:
        share = rollouts.cached_tokens / rollouts.prompt_tokens
        rows.append(("prefix cache", f"{share:.0%} of {rollouts.prompt_tokens} prompt tokens came from it"))
    cache = found.prefix_cache
    if cache:
        rows.append(
            (
                "kept apart",
                f"same prompt again, {cache.across_tokens} tokens cached in {cache.across_answers} answers of another "
                f"version, {cache.within_tokens} in {cache.within_answers} of the same",
            )
        )
    rows.append(("pauses", "not known" if found.pauses is None else f"{found.pauses} sent to engines"))
    if found.restarts:
        rows.append(("restarts", _counts(found.restarts)))
    rows.append(("time", ", ".join(f"{name} {duration(seconds)}" for name, seconds in found.durations.items())))
    return rows


def _counts(counts: Mapping[str, int]) -> str:
    shown = [f"{name} {count}" for name, count in list(counts.items())[:FEW]]
    more = len(counts) - len(shown)
    return ", ".join([*shown, *([f"and {more} more"] if more > 0 else [])])


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f}"
