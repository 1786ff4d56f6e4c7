"""How a run goes while it goes: one line that changes on a terminal, a line each few seconds elsewhere."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from adaptersync.coordinator.observer import look
from adaptersync.coordinator.views import StatusView
from adaptersync_core.config import Config
from adaptersync_core.errors import ControlError
from adaptersync_core.registry import Registry
from adaptersync_core.rollouts import Ended
from adaptersync_tools.cli.common import visit
from adaptersync_tools.screen import standing

PLAIN_S = 10.0  # between lines where there is no terminal


class Live:
    """Follows the trainer's step lines and the fleet's table. A context manager."""

    def __init__(self, console: Console, config: Config, *, run: str, steps: int, lines: Path) -> None:
        self._console = console
        self._config = config
        self._run = run
        self._lines = lines
        self._offset = 0
        self._last: dict[str, Any] = {}
        self._told_at = time.monotonic()
        self._ended = Ended()
        columns = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, TextColumn("{task.fields[figures]}"), console=console, transient=True)
        self._task = self._bar.add_task("training", total=steps, figures="")
        self._steps = steps

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def look(self) -> int:
        """Read what is new and show it; the trainer's last step, 0 before the first."""
        fresh = self._read()
        figures = "  ".join([*self._trainer(), *self._fleet()])
        step = int(self._last.get("step", 0))
        self._bar.update(self._task, completed=step, figures=figures)
        now = time.monotonic()
        if not self._console.is_terminal and (fresh and now - self._told_at > PLAIN_S):
            self._told_at = now
            self._console.print(f"step {step}/{self._steps}  {figures}")
        return step

    def _read(self) -> bool:
        if not self._lines.exists():
            return False
        with self._lines.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        if not newline:
            return False
        self._offset += len(whole) + 1
        self._last = orjson.loads(whole.splitlines()[-1])
        return True

    def _trainer(self) -> list[str]:
        shown = (("reward", "reward {:.2f}"), ("ratio", "ratio {:.3f}"), ("behind", "behind {}"))
        return [form.format(self._last[name]) for name, form in shown if name in self._last]

    def _fleet(self) -> list[str]:
        async def read(registry: Registry) -> tuple[StatusView, int]:
            _, status = await look(registry, self._config)
            return status, await self._ended.read(registry)

        try:
            status, rollouts = visit(self._config, read)
        except ControlError:
            return ["(control server does not answer)"]
        return [*standing(status, self._run), f"rollouts {rollouts}"]
