"""Curves of a run: in a terminal, and as a picture where matplotlib is installed. Knows no run.

A terminal tells curves apart by their marks, not only by colour: what is piped into a file is as readable.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from msgspec import Struct
from rich.text import Text

WIDTH, HEIGHT = 72, 12  # of the plot itself, in characters
LEAST_SPAN = 0.1  # of the values shown: less would make a drama of noise
GRID = 0.05  # bounds are multiples of it
SMOOTH = 7  # steps of the running mean in the picture
MARKS = (("●", "cyan"), ("○", "yellow"), ("×", "magenta"))
SEVERAL = "◉"
COLOURS = ("#0072b2", "#d55e00", "#009e73")  # told apart by the colour-blind, too


class Curve(Struct, frozen=True, kw_only=True):
    """A value for each step from the first on. `runs` are those that it is the mean of, where they are several."""

    name: str
    values: tuple[float, ...]
    runs: tuple[tuple[float, ...], ...] = ()


def mean_curve(name: str, runs: Sequence[Sequence[float]]) -> Curve:
    """As long as the shortest of the runs."""
    values = tuple(fmean(each) for each in zip(*runs, strict=False))
    return Curve(name=name, values=values, runs=tuple(tuple(run) for run in runs) if len(runs) > 1 else ())


def bounds(curves: Sequence[Curve], also: Sequence[float] = ()) -> tuple[float, float]:
    """What the axis spans: everything that is shown, outward to the grid."""
    values = [value for curve in curves for value in curve.values] + list(also)
    low, high = min(values), max(values)
    missing = LEAST_SPAN - (high - low)
    if missing > 0:
        low, high = low - missing / 2, high + missing / 2
    low = math.floor(round(low / GRID, 6)) * GRID
    return low, max(math.ceil(round(high / GRID, 6)) * GRID, low + GRID)


def stretched(values: Sequence[float], width: int) -> list[float]:
    """A value a column: means where steps are more than columns, else points of the lines between them."""
    count = len(values)
    if count >= width:
        return [fmean(values[column * count // width : (column + 1) * count // width]) for column in range(width)]
    if count == 1:
        return [values[0]] * width
    found = []
    for column in range(width):
        place = column * (count - 1) / (width - 1)
        before = min(int(place), count - 2)
        found.append(values[before] + (place - before) * (values[before + 1] - values[before]))
    return found


def drawn(title: str, curves: Sequence[Curve], *, width: int = WIDTH, height: int = HEIGHT) -> Text:
    """The curves for a terminal; `width` and `height` of the plot. Every curve has at least one step."""
    low, high = bounds(curves)
    cells: dict[tuple[int, int], set[int]] = {}
    for number, curve in enumerate(curves):
        for column, value in enumerate(stretched(curve.values, width)):
            row = round((high - value) / (high - low) * (height - 1))
            cells.setdefault((row, column), set()).add(number)
    text = Text(f"{title}\n", "bold")
    for row in range(height):
        labelled = row in (0, height // 2, height - 1)
        label = f"{high - (high - low) * row / (height - 1):6.2f} ┤" if labelled else " " * 7 + "│"
        text.append(label, "dim")
        for column in range(width):
            mark, style = _mark(cells.get((row, column), set()))
            text.append(mark, style)
        text.append("\n")
    last = f"step {max(len(curve.values) for curve in curves)}"
    text.append(" " * 7 + "└" + "─" * width + "\n", "dim")
    text.append(" " * 8 + "1" + last.rjust(width - 1) + "\n", "dim")
    text.append(" " * 8)
    for number, curve in enumerate(curves):
        text.append(MARKS[number][0], MARKS[number][1])
        text.append(f" {curve.name}   ")
    if len(curves) > 1:
        text.append(f"{SEVERAL} both" if len(curves) == 2 else f"{SEVERAL} several")
    text.rstrip()
    return text


def _mark(there: set[int]) -> tuple[str, str]:
    if not there:
        return " ", ""
    return (SEVERAL, "bold") if len(there) > 1 else MARKS[next(iter(there))]


def can_draw_pictures() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def write_picture(
    path: Path, title: str, curves: Sequence[Curve], *, unit: str, levels: Mapping[str, float] | None = None
) -> None:
    """A PNG: every step faintly, a running mean of each curve, and horizontal lines at `levels`. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for curve, colour in zip(curves, COLOURS, strict=False):
        for run in curve.runs or (curve.values,):
            axes.plot(range(1, len(run) + 1), run, color=colour, alpha=0.3, linewidth=0.8)
        smooth = smoothed(curve.values)
        axes.plot(range(1, len(smooth) + 1), smooth, color=colour, linewidth=2, label=curve.name)
    for name, level in (levels or {}).items():
        axes.axhline(level, color="black", linestyle="dotted", linewidth=1)
        axes.annotate(name, (1, level), xytext=(2, 3), textcoords="offset points", fontsize=8)
    axes.set_ylim(*bounds(curves, list((levels or {}).values())))
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def smoothed(values: Sequence[float], steps: int = SMOOTH) -> list[float]:
    """Centred running mean over `steps`, over fewer at the ends."""
    reach = steps // 2
    return [fmean(values[max(0, place - reach) : place + reach + 1]) for place in range(len(values))]
