"""What the training bench has to tell beside the common table: its curves, and both ways side by side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from adaptersync_tools.bench.training import WAYS, Told, TrainingResult
from adaptersync_tools.curves import can_draw_pictures, drawn, write_picture
from adaptersync_tools.output import console, milliseconds, table

PARTS = ("steps", *(f"{way}>" for way in WAYS), "difference>", "± error>", "in errors>", "would be seen>")


def _count(value: int | None) -> str:
    return "nobody looks" if value is None else str(value)


_ROWS: tuple[tuple[str, Callable[[Told], str]], ...] = (
    ("ratio, mean", lambda side: f"{side.ratio.mean:.4f}"),
    ("ratio, lowest and highest", lambda side: f"{side.ratio.low:.4f}, {side.ratio.high:.4f}"),
    ("step, ms", lambda side: milliseconds(side.step_s)),
    ("trainer blocked by its sync, ms", lambda side: milliseconds(side.sync_s)),
    ("of which the save, ms", lambda side: milliseconds(side.save_s)),
    ("each over its save, median", lambda side: f"{side.saves:.2f}"),
    ("beside its save, ms", lambda side: milliseconds(side.other_s)),
    ("of that waiting for the fleet, ms", lambda side: milliseconds(side.promotion_wait_s) or "pause, load, resume"),
    ("pauses", lambda side: f"{side.pauses} in {side.syncs} syncs"),
    ("servers paused, ms", lambda side: milliseconds(side.paused_s)),
    ("samples' age, syncs", lambda side: "" if side.staleness is None else f"{side.staleness:.2f}"),
    ("samples dropped as too old", lambda side: str(side.dropped)),
    ("answers", lambda side: _count(side.answers)),
    ("answers of another version", lambda side: _count(side.wrong_version)),
    ("answers substituted", lambda side: _count(side.substituted)),
    ("requests without a version's number", lambda side: _count(side.unnumbered)),
)


def show_more(result: TrainingResult) -> None:
    """Print it."""
    out = console()
    repeats = result.settings["repeats"]
    out.print()
    out.print(drawn(f"Reward by step, mean of {repeats} run{'s' if repeats != 1 else ''} each", result.curves()))
    parts = [
        (
            *(f"{part.first} to {part.last}", f"{part.ours:.3f}", f"{part.theirs:.3f}"),
            *(f"{part.ours - part.theirs:+.3f}", f"{part.error:.3f}", f"{part.errors:+.1f}", f"{part.visible:.3f}"),
        )
        for part in result.parts
    ]
    out.print()
    out.print(table("reward  (error: the larger of the scatter of steps and that of runs)", PARTS, parts))
    sides = [result.told[way] for way in WAYS]
    rows = [(name, *(form(side) for side in sides)) for name, form in _ROWS]
    out.print(table("both ways, means of a step", ("", *(f"{way}>" for way in WAYS)), rows))


def draw(result: TrainingResult, path: Path) -> bool:
    """The picture of both curves, where one can be drawn."""
    if not can_draw_pictures():
        return False
    title = f"The same training, {result.settings['repeats']} × each, {result.began_at[:10]}"
    write_picture(path, title, result.curves(), unit="reward")
    return True
