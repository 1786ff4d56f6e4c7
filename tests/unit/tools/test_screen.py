"""The fleet on a terminal: cut to its size, what is amiss first."""

from __future__ import annotations

import io
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from adaptersync.coordinator import views
from adaptersync.coordinator.overview import Cell, Column, Line, Overview
from adaptersync.coordinator.phases import Span
from adaptersync.coordinator.recent import SERIES, Promotion
from adaptersync_core.records import CacheReport, Traffic
from adaptersync_tools import screen
from support.tables import version_name

SIZES = [(40, 12), (80, 24), (110, 30), (150, 45), (220, 60)]


def replica(number: int, state: str = "ready") -> views.ReplicaView:
    return views.ReplicaView(
        replica=f"replica-{number}", state=state, reason="no heartbeat for 9 s" if state != "ready" else "", age_s=0.2,
        since_s=60.0, holds=1, wanted=1, slots=8, url="http://a", engine="vllm", engine_epoch="e", cache=CacheReport(),
    )  # fmt: skip


def way(seq: int, outcome: str = "promoted") -> Promotion:
    spans = [Span(phase="step", start_s=-60.0, seconds=59.0), Span(phase="loaded", start_s=0.1, seconds=0.4)]
    return Promotion(
        version=version_name(seq), run="run-a", at=1.0, outcome=outcome, reason="", step=seq, promoted_s=0.5,
        slowest="replica-1", accepted=4, refused=0, spans=spans,
    )  # fmt: skip


def view(replicas: int = 4, versions: int = 3, *, silent: int = 0, **more: Any) -> Overview:
    names = [version_name(seq) for seq in range(versions, 0, -1)]
    states = ["current", *["retained"] * (versions - 1)]
    states_of = ["ready"] * (replicas - silent) + ["ejected"] * silent
    made = Overview(
        group="default", healthy=not silent, problems=[f"replica-{n} is ejected" for n in range(silent)], generation=7,
        leader="coordinator-0", lease_left_s=3.0, replicas=[replica(n, state) for n, state in enumerate(states_of)],
        runs=[], routers=[], waits=[], at=1000.0, told_by="",
        versions=[
            Column(version=name, run="run-a", seq=versions - place, state=state, since_s=1.0)
            for place, (name, state) in enumerate(zip(names, states, strict=True))
        ],
        matrix={f"replica-{n}": [Cell(state="held")] * versions for n in range(replicas)},
        traffic=Traffic(routed={"affinity": 3, "cold": 1}, at={"replica-0": 2}), imbalance=4.0,
        promotions=[way(seq) for seq in range(versions, 0, -1)],
        events=[
            Line(id=f"{n}-0", at=float(n), type="version.promoted", subject=version_name(1), text="1 s", bad=False)
            for n in range(100)
        ],
        series={name: [None, 1.0, 2.0] for name in SERIES},
    )  # fmt: skip
    return replace(made, **more)


def shown(seen: Overview, width: int = 150, height: int = 45, **more: Any) -> list[str]:
    out = Console(file=io.StringIO(), width=width, height=height, highlight=False)
    out.print(screen.whole(seen, out, width=width, height=height, **more))
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue().splitlines()


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("replicas", [0, 1, 4, 200])
def test_it_fits_any_terminal(width: int, height: int, replicas: int) -> None:
    for silent in (0, min(replicas, 150)):
        lines = shown(view(replicas, silent=silent), width, height)
        assert max(map(len, lines)) <= width
        if (width, height) != (40, 12):  # where not even the beginning has room, the terminal cuts
            assert len(lines) <= height, "\n".join(lines)


def test_who_is_not_ready_is_seen_though_not_all_are() -> None:
    lines = shown(view(200, silent=1), 80, 24)
    assert any("replica-199" in line and "ejected" in line for line in lines)
    assert any("are not shown" in line for line in lines)
    assert any("! replica-0 is ejected" in line for line in lines)


def test_of_many_versions_the_current_one_is_shown_and_the_rest_counted() -> None:
    lines = shown(view(versions=40), 80, 24)
    assert any("current" in line for line in lines)
    assert any("more versions" in line for line in lines)


def test_figures_are_the_latest_that_are_known() -> None:
    text = "\n".join(shown(view(series={name: [5.0, 7.5, None] for name in SERIES})))
    assert "requests/s 7.50" in text
    assert "affinity 75%" in text
    assert "in flight 2" in text


def test_a_step_leaves_room_for_the_rest() -> None:
    (line,) = [line for line in shown(view(versions=1)) if version_name(1) in line and "accepted" in line]
    assert line.count("█") > 20


def test_what_was_last_seen_is_said_to_be_that() -> None:
    assert any("! Redis cannot be reached" in line for line in shown(view(), notice="Redis cannot be reached"))


def test_names_are_no_markup() -> None:
    odd = "[bold red]x[/] [link=file:///etc]"
    text = "\n".join(shown(view(problems=[odd], healthy=False)))
    assert odd in text


def test_a_line_of_figures() -> None:
    assert screen.spark([0.0, 1.0, 2.0, None, 4.0], 8) == "   ▁▃▅ █"
    assert screen.spark([0.0, 0.0], 2) == "▁▁"
    assert screen.spark([float(n) for n in range(99)], 3) == "███"


def test_how_a_run_stands() -> None:
    assert screen.standing(view(), "run-a") == ["current none", "replicas 4/4"]
    run = views.RunView(
        run="run-a", epoch=1, current=version_name(3), since_s=1.0, candidate="", window=[], waiting=0, replicas=4,
        ready=4, trainer="alive", heard_s=1.0,
    )  # fmt: skip
    assert screen.standing(view(silent=1, runs=[run]), "run-a") == ["current v3", "replicas 3/4"]
