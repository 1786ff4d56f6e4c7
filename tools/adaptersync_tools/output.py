"""How commands speak: tables and colours on a terminal, plain text into a pipe, JSON for programs.

Names and reasons are what others wrote to Redis. So nothing of them reaches a terminal that it would obey, whichever
command shows it, nor a line's end that would let them write lines of ours; programs get them as they are.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import orjson
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from adaptersync.coordinator import views
from adaptersync_tools.up import Progress

# what a terminal obeys, what turns text round, and half characters, which cannot be written at all
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
PIPE_WIDTH = 200  # columns, where there is no terminal to ask
STATE_STYLES = {
    "ready": "green",
    "current": "bold green",
    "promoted": "bold green",
    "retained": "green",
    "staging": "yellow",
    "joining": "yellow",
    "published": "yellow",
    "retiring": "dim",
    "retired": "dim",
    "superseded": "dim",
    "draining": "yellow",
    "ejected": "bold red",
    "rolled_back": "bold red",
    "voided": "bold red",
    "alive": "green",
    "silent": "red",
    "ended": "dim",
}
EVENT_STYLES = {
    "version.promoted": "bold green",
    "version.rolled_back": "bold red",
    "version.voided": "bold red",
    "request.refused": "red",
    "adapter.published": "cyan",
    "version.staging": "yellow",
    "run.began": "bold cyan",
    "coordinator.elected": "magenta",
    "replica.state": "blue",
}


class HarmlessConsole(Console):
    """Colours, and where the cursor stands, are its own doing; no text brings them with it."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control or not _OBEYED.search(text) else Segment(_OBEYED.sub("�", text), style)


def one_line(text: str) -> str:
    """Text of others that shall be no more than a line, and show what else is in it."""
    return _OBEYED.sub("�", " ".join(text.splitlines()))


class OneLine(logging.Formatter):
    """For warnings, which name what is in Redis."""

    def format(self, record: logging.LogRecord) -> str:
        return one_line(super().format(record))


def console(*, stderr: bool = False) -> Console:
    """Colours only where somebody sees them; a pipe gets whole lines."""
    stream = sys.stderr if stderr else sys.stdout
    return HarmlessConsole(file=stream, highlight=False, soft_wrap=False, width=None if stream.isatty() else PIPE_WIDTH)


def print_json(document: Any) -> None:
    """One document, on one line when nobody reads it."""
    option = orjson.OPT_INDENT_2 if sys.stdout.isatty() else 0
    text = orjson.dumps(document, option=option, default=msgspec.to_builtins)
    sys.stdout.write(text.decode() + "\n")
    sys.stdout.flush()


def state(name: str) -> Text:
    return Text(one_line(name), style=STATE_STYLES.get(name, ""))


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, dense: bool = False) -> Table:
    """Columns ending in ">" are numbers and stand right; those ending in "!" are never broken. Dense: without rules."""
    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    if dense:
        made.box, made.padding, made.header_style = None, (0, 2, 0, 0), "dim"
    made.show_header = any(columns)
    for column in columns:
        number = column.endswith(">")
        whole = number or column.endswith("!")
        made.add_column(column.rstrip(">!"), justify="right" if number else "left", no_wrap=whole, overflow="fold")
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else _cell(cell) for cell in row))
    return made


def seconds(value: float | None) -> str:
    return "" if value is None else views.duration(value)


def milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value * 1000:.0f}"


def _cell(value: Any) -> Text:
    return Text("" if value is None else one_line(str(value)))


class ConsoleLog(logging.Handler):
    """Warnings of our own process, between what else is on the screen."""

    def __init__(self, to: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = to

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(Text(f"! {record.getMessage()}", "yellow"), soft_wrap=True)


class Narrator(Progress):
    """Tells what is waited for: a spinner on a terminal, a line each elsewhere."""

    def __init__(self, to: Console) -> None:
        logging.getLogger().addHandler(ConsoleLog(to))
        self._console = to
        self._status = to.status("") if to.is_terminal else None

    def waiting(self, what: str) -> None:
        if self._status is None:
            self._console.print(f"waiting for {what}")
        else:
            self._status.update(f"waiting for {what} …")
            self._status.start()

    def done(self, what: str, seconds: float) -> None:
        self.quiet()
        self._console.print(Text.assemble(("✓ ", "green"), f"{what}  ", (views.duration(seconds), "dim")))

    def detail(self, what: str) -> None:
        """How far what is waited for has come; only where it can be written over."""
        if self._status is not None:
            self._status.update(f"waiting for {what} …")

    def quiet(self) -> None:
        """No spinner, before something else is printed or the program ends."""
        if self._status is not None:
            self._status.stop()
