"""What is printed of names and reasons that others wrote."""

from __future__ import annotations

import io
import logging

import orjson
import pytest
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from adaptersync.coordinator.views import StatusView
from adaptersync_core.errors import ControlError
from adaptersync_tools import output
from adaptersync_tools.cli import reading
from adaptersync_tools.cli.common import run_command
from adaptersync_tools.output import HarmlessConsole, OneLine, one_line, state, table

# a title, a colour, a bell, a line over this one, what C1 calls an escape, text that runs backwards, half a character
HOSTILE = "a\x1b]0;title\x1b\\b\x1b[31m\x07\rc\x9b2J\u202ed\ud800\x7f"
OBEYED = frozenset("\x1b\x07\r\x9b\u202e\ud800\x7f")


def shown(*what: object, **options: bool) -> str:
    out = io.StringIO()
    HarmlessConsole(file=out, width=200, **options).print(*what)  # type: ignore[arg-type]
    return out.getvalue()


@pytest.mark.parametrize(
    "what",
    [
        HOSTILE,
        Text(HOSTILE, "bold"),
        Text.assemble("it is ", (HOSTILE, "red")),
        Panel(Text(HOSTILE)),
        table("Rows", ("what!", "why"), [(HOSTILE, Text(HOSTILE))]),
        state(HOSTILE),
    ],
    ids=["str", "text", "parts", "in another", "table", "state"],
)
def test_nothing_that_is_printed_is_obeyed(what: object) -> None:
    text = shown(what)
    assert not OBEYED & set(text)
    assert "]0;title" in text
    text.encode()


def test_colours_of_ours_are_left() -> None:
    text = shown(Text(f"red{HOSTILE}", "red"), force_terminal=True)
    assert text.startswith("\x1b[31mred")
    assert text.count("\x1b") == 2


def test_what_is_written_over_is_harmless_too() -> None:
    out = io.StringIO()
    with Live(Text(HOSTILE), console=HarmlessConsole(file=out, width=200, force_terminal=True), auto_refresh=False):
        pass
    assert "]0;title" in out.getvalue()
    assert "\x1b]0" not in out.getvalue()


def test_text_of_others_is_one_line() -> None:
    assert one_line("a\nb\r\nc\x85d\u2028e") == "a b c d e"
    assert one_line("a\x1b[2Jb") == "a\ufffd[2Jb"
    rows = shown(table("Rows", ("what!", "why"), [("a\nforged", "b\nforged")]))
    assert len([line for line in rows.splitlines() if "forged" in line]) == 1


def test_an_event_and_a_problem_are_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    """Agents and trainers write events, and reasons that become problems."""
    forged = "a\n  ! forged"
    reading._printer(False)(("1-0", {"type": forged, "replica": forged, "reason": forged, "more": forged}))
    told = capsys.readouterr().out
    assert len(told.splitlines()) == 1
    assert told.count("forged") == 4
    view = StatusView(
        group="default", healthy=False, problems=[forged], generation=1, leader=forged, lease_left_s=1.0, replicas=[],
        runs=[], routers=[],
    )  # fmt: skip
    reading._print_status(view)
    assert not [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ! forged")]


def test_errors_and_warnings_are_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    import click

    @click.command()
    def fails() -> None:
        raise ControlError(f"refused: {HOSTILE}")

    assert run_command(fails, [], "adaptersync") == 1
    error = capsys.readouterr().err
    assert error.startswith("adaptersync: error: refused: a")
    assert not OBEYED & set(error)
    record = logging.LogRecord("x", logging.WARNING, "", 0, "record of %s", (HOSTILE + "\nforged",), None)
    assert not (OBEYED | {"\n"}) & set(OneLine().format(record))
    assert logging.lastResort is not None
    assert isinstance(logging.lastResort.formatter, OneLine)


def test_programs_get_it_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    said = {"reason": "a\x1b[31m\nb"}
    output.print_json(said)
    assert orjson.loads(capsys.readouterr().out) == said
