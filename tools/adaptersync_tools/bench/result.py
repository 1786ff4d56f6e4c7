"""What a bench ends in: figures, what is promised of them, and where they were taken. Knows no bench."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Self

from msgspec import Struct
from rich.text import Text

from adaptersync_tools.engines import gpu_count
from adaptersync_tools.output import console, print_json, table

SECONDS = "s"
TIMES = "×"  # of a ratio


class Figure(Struct, frozen=True, kw_only=True):
    """One thing measured several times, in seconds. `ratio` is its median over that of the figure named `against`."""

    name: str
    samples_s: tuple[float, ...]
    p50_s: float
    max_s: float
    against: str = ""
    ratio: float | None = None

    @classmethod
    def of(cls, name: str, samples_s: Sequence[float], *, against: Figure | None = None) -> Self:
        """ValueError when nothing was measured."""
        p50_s = statistics.median(samples_s)
        return cls(
            name=name,
            samples_s=tuple(round(sample, 6) for sample in samples_s),
            p50_s=p50_s,
            max_s=max(samples_s),
            against=against.name if against else "",
            ratio=p50_s / against.p50_s if against else None,
        )


class Target(Struct, frozen=True, kw_only=True):
    """A promise about a figure or a ratio of two. Made by `at_least` or `at_most`, which say whether it is kept."""

    name: str
    value: float
    bound: float
    kind: str
    unit: str
    kept: bool

    @classmethod
    def at_least(cls, name: str, value: float, bound: float, *, unit: str = TIMES) -> Self:
        return cls(name=name, value=value, bound=bound, kind="at least", unit=unit, kept=value >= bound)

    @classmethod
    def at_most(cls, name: str, value: float, bound: float, *, unit: str = TIMES) -> Self:
        return cls(name=name, value=value, bound=bound, kind="at most", unit=unit, kept=value <= bound)


class Machine(Struct, frozen=True, kw_only=True):
    """Figures of two machines are not compared; this says which one it was, and how many programs wanted its cores."""

    system: str
    cores: int
    gpus: int
    load: float = 0.0

    @classmethod
    def here(cls) -> Self:
        return cls(
            system=platform.system(),
            cores=len(os.sched_getaffinity(0)),
            gpus=gpu_count(),
            load=round(os.getloadavg()[0], 1),
        )


class Result(Struct, frozen=True, kw_only=True):
    """`settings` are the options that shaped the run."""

    bench: str
    began_at: str
    machine: Machine
    settings: dict[str, int | float | str | list[int] | list[float]]
    figures: tuple[Figure, ...]
    targets: tuple[Target, ...]

    @property
    def kept(self) -> bool:
        return all(target.kept for target in self.targets)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def show(result: Result, *, as_json: bool) -> int:
    """Print it; the exit status is 0 when every target was kept, else 1."""
    if as_json:
        print_json(result)
        return 0 if result.kept else 1
    out = console()
    rows = [
        (figure.name, len(figure.samples_s), _ms(figure.p50_s), _ms(figure.max_s), _ratio(figure))
        for figure in result.figures
    ]
    columns = ("", "n>", "p50, ms>", "max, ms>", "ratio of medians")
    machine = result.machine
    where = f"{result.began_at[:10]}, {machine.cores} cores, {machine.gpus or 'no'} GPU, load {machine.load:g}"
    out.print(table(f"{result.bench}  ({where})", columns, rows))
    for target in result.targets:
        mark, style = ("✓", "green") if target.kept else ("✗", "bold red")
        value, bound = f"{target.value:.3g} {target.unit}", f"{target.kind} {target.bound:g}"
        out.print(Text.assemble((f"{mark} ", style), f"{target.name}  ", (value, "bold"), (f"  ({bound})", "dim")))
    return 0 if result.kept else 1


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f}"


def _ratio(figure: Figure) -> str:
    return "" if figure.ratio is None else f"{figure.ratio:.3g} of {figure.against}"
