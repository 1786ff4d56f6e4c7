"""The fleet as a terminal shows it: parts of what `status` and `top` print, made from views. No I/O, no clock.

`whole` puts them together for a terminal of so many columns and lines: what needs somebody comes first, and what does
not fit is counted instead of shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from adaptersync.coordinator import views
from adaptersync.coordinator.overview import Cell, Column, Overview
from adaptersync.coordinator.phases import Span
from adaptersync.coordinator.recent import Promotion
from adaptersync_core.identity import parse_adapter_id
from adaptersync_tools.output import EVENT_STYLES, STATE_STYLES, one_line, seconds, state, table

NARROW = 110  # columns that do not hold what can be done without
SPARK = "▁▂▃▄▅▆▇█"
CELLS = {
    "held": Text("●", "green"),
    "awaited": Text("◌", "yellow"),
    "refused": Text("✕", "bold red"),
    "loaded": Text("○", "dim"),
    "": Text("·", "dim"),
}
# what a bar is drawn with, and in which colour
MARKS = {
    "noticed": ("·", "dim"),
    "visible": ("░", "yellow"),
    "staged": ("▒", "cyan"),
    "verified": ("▓", "blue"),
    "loaded": ("█", "green"),
    "proved": ("▚", "magenta"),
}
MARK = ("━", "bold")
FEWEST = 3  # lines of a list that is cut


def heading(view: views.StatusView) -> Text:
    health = ("healthy", "bold green") if view.healthy else ("needs attention", "bold red")
    leader = f"{one_line(view.leader)} leads" if view.leader else "nobody leads"
    return Text.assemble(
        ("group ", "dim"), view.group, "  ", health, "  ", (f"generation {view.generation}, {leader}", "dim")
    )


def standing(view: views.StatusView, run: str) -> list[str]:
    """How a run stands in the fleet, in a few words."""
    mine = next((each for each in view.runs if each.run == run), None)
    ready = sum(each.state == "ready" for each in view.replicas)
    version = f"v{parse_adapter_id(mine.current).seq}" if mine and mine.current else "none"
    return [f"current {version}", f"replicas {ready}/{len(view.replicas)}"]


def replicas(view: views.StatusView) -> RenderableType:
    rows = [
        (
            each.replica,
            state(each.state),
            seconds(each.since_s),
            f"{each.holds}/{each.wanted}",
            each.slots,
            seconds(each.age_s),
            views.followed(each.cache),
            each.engine,
            each.url,
            each.reason,
        )
        for each in view.replicas
    ]
    columns = (
        *("replica!", "state!", "for>", "holds>", "slots>", "heard>"),
        *("cache", "engine", "url", "why"),
    )
    return table("Replicas", columns, rows) if rows else Text("no replicas", "dim")


def runs(view: views.StatusView, *, dense: bool = False) -> RenderableType:
    rows = [
        (
            each.run,
            each.epoch,
            each.current,
            seconds(each.since_s),
            f"{each.replicas}/{each.ready}",
            len(each.window),
            each.candidate,
            each.waiting,
            Text.assemble(state(each.trainer), f" {seconds(each.heard_s)}" if each.trainer == "silent" else ""),
        )
        for each in view.runs
    ]
    columns = ("run!", "epoch>", "current!", "for>", "replicas>", "window>", "candidate", "waiting>", "trainer!")
    return table("Runs", columns, rows, dense=dense) if rows else Text("no runs yet: adaptersync publish --help", "dim")


def routers(view: views.StatusView, *, dense: bool = False) -> RenderableType:
    rows = [
        (each.router, each.url, each.generation, each.behind, each.inflight, seconds(each.age_s))
        for each in view.routers
    ]
    columns = ("router!", "url", "generation>", "behind>", "in flight>", "heard>")
    return table("Routers", columns, rows, dense=dense) if rows else Text("no routers", "dim")


def hosts(view: views.StatusView) -> RenderableType | None:
    """What hosts were asked to run beside what they run; None when nobody was asked anything."""
    if not any(each.keeper for each in view.hosts):
        return None
    rows = [
        (
            each.host,
            each.keeper,
            "" if each.desired is None else each.desired,
            each.joining,
            each.ready,
            each.draining,
            each.other,
            _of(each.routers, each.routers_desired),
            _of(each.workers, each.workers_desired),
        )
        for each in view.hosts
    ]
    columns = (
        *("host!", "kept by", "desired>", "joining>", "ready>", "draining>", "other>"),
        *("routers>", "workers>"),
    )
    return table("Hosts", columns, rows)


def _of(there: int | None, desired: int | None) -> str:
    """As many as there are, of as many as shall be."""
    count = "?" if there is None else str(there)
    return count if desired is None else f"{count}/{desired}"


def held(view: views.StatusView) -> RenderableType | None:
    """What waits; None when nothing does."""
    rows = [
        (each.version, state(each.state), each.waits_for, "" if each.left_s is None else seconds(each.left_s))
        for each in view.waits
    ]
    return table("Waiting", ("version!", "state!", "waits for", "at most>"), rows) if rows else None


def bar(spans: Sequence[Span], *, start: float, scale: float, columns: int) -> Text:
    """Phases on a line that begins at `start` and has `scale` columns a second."""
    text = Text()
    for part in sorted(spans, key=lambda part: part.start_s):
        mark, style = MARKS.get(part.phase, MARK)
        begin, end = round((part.start_s - start) * scale), round((part.end_s - start) * scale)
        text.append(" " * (min(begin, columns - 1) - len(text)))
        text.append(mark * max(end - max(begin, len(text)), 0 if part.seconds * scale < 0.5 else 1), style)
    return text


def whole(view: Overview, console: Console, *, width: int, height: int, notice: str = "") -> Group:
    """Everything, cut to the size of a terminal; `notice` is said at the top."""
    narrow = width < NARROW
    notices = _notices(view, notice, most=max(FEWEST, height // 5))
    parts: list[RenderableType] = [heading(view), *notices, _figures(view), _rates(view, width)]
    rest: list[RenderableType] = [
        _promotions(view, width, most=min(6, max(2, height // 8)), narrow=narrow),
        *([] if narrow else [runs(view, dense=True)]),
    ]
    if not narrow or height > 45:
        rest.append(_routers(view, narrow=narrow))
    left = height - 1 - sum(_lines(console, part, width) for part in parts)
    spare = left - sum(_lines(console, part, width) for part in rest) - FEWEST - 2
    matrix = _matrix(view, width, most=max(FEWEST, spare - 4), narrow=narrow)
    parts.append(matrix)
    left -= _lines(console, matrix, width)
    for part in rest:
        lines = _lines(console, part, width)
        if lines <= left:
            parts.append(part)
            left -= lines
    if left > 2:
        parts.append(_events(view, most=left - 2, narrow=narrow))
    return Group(*parts)


def _notices(view: Overview, notice: str, *, most: int) -> list[Text]:
    lines = [Text(f"  ! {one_line(notice)}", "bold yellow", no_wrap=True, overflow="ellipsis")] if notice else []
    lines += [Text(f"  ! {one_line(problem)}", "red", overflow="fold") for problem in view.problems[:most]]
    if len(view.problems) > most:
        lines.append(Text(f"  ! and {len(view.problems) - most} more: adaptersync status", "red"))
    return lines


def _figures(view: Overview) -> Text:
    """Of the last look: what a person watches."""

    def last(name: str) -> float | None:
        return next((value for value in reversed(view.series.get(name, [])) if value is not None), None)

    failed = last("failed_s")
    cached = last("cached")
    told: list[tuple[str, str, str]] = [
        ("requests/s", _number(last("requests_s")), ""),
        ("failed/s", _number(failed), "bold red" if failed else ""),
        ("tokens/s", _number(last("completion_tokens_s")), ""),
        ("cached", "–" if cached is None else f"{cached:.0%}", ""),
        ("in flight", _number(sum(view.traffic.at.values())), ""),
        ("imbalance", _number(view.imbalance), ""),
    ]
    return Text.assemble(
        *(part for name, value, style in told for part in ((f"{name} ", "dim"), (value, style or "bold"), "   "))
    )


def _rates(view: Overview, width: int) -> Text:
    """How requests a second went, and what routers did with them."""
    values = view.series.get("requests_s", [])
    routed = view.traffic.routed
    total = sum(routed.values())
    said = "  ".join(f"{name} {count / total:.0%}" for name, count in sorted(routed.items(), key=lambda one: -one[1]))
    line = Text.assemble(("requests ", "dim"), (spark(values, max(8, min(60, width - 50))), "cyan"), "  ")
    return Text.assemble(line, (said, "dim"), no_wrap=True, overflow="ellipsis")


def spark(values: Sequence[float | None], columns: int) -> str:
    """The latest values, one a column; a gap where one is not known."""
    latest = list(values)[-columns:]
    most = max((value for value in latest if value is not None), default=0.0)
    top = len(SPARK) - 1
    drawn = "".join(" " if value is None else SPARK[round(value / most * top) if most else 0] for value in latest)
    return drawn.rjust(columns)


def _matrix(view: Overview, width: int, *, most: int, narrow: bool) -> RenderableType:
    if not view.replicas:
        return Text("no replicas", "dim")
    first = max(len(each.replica) for each in view.replicas) + 26
    room = max(1, (width - first - (0 if narrow else 40)) // 9)
    served = sorted(view.versions, key=lambda one: one.state not in ("current", "staging", "ready"))[:room]
    columns = [each for each in view.versions if each in served]
    places = [view.versions.index(each) for each in columns]
    order = sorted(view.replicas, key=lambda each: each.state == "ready")  # what is amiss is seen first
    rows: list[tuple[Any, ...]] = []
    for each in order[:most]:
        cells = view.matrix.get(each.replica, [])
        at = view.traffic.at.get(each.replica, 0)
        marks = [CELLS.get((cells[place] if place < len(cells) else Cell()).state, CELLS[""]) for place in places]
        why = () if narrow else (views.followed(each.cache), each.reason)
        rows.append((each.replica, state(each.state), seconds(each.age_s), at, *marks, *why))
    left_out = len(view.versions) - len(columns)
    more = f", {left_out} more versions" if left_out else ""
    cut = f"  {len(order) - most} of {len(order)} are not shown" if len(order) > most else ""
    head = ("replica!", "state!", "heard>", "busy>", *(f"{_head(each)}!" for each in columns))
    title = f"Replicas × versions{more}{cut}"
    return table(title, head if narrow else (*head, "cache!", "why"), rows, dense=True)


def _head(column: Column) -> str:
    return f"{column.run[:8]}\nv{column.seq}\n{column.state[:8]}"


def _promotions(view: Overview, width: int, *, most: int, narrow: bool) -> RenderableType:
    if not view.promotions:
        return Text("nothing was published yet", "dim")
    shown = view.promotions[:most]
    drawn = [[span for span in each.spans if span.phase != "step"] for each in shown]
    begins = [min((span.start_s for span in spans), default=0.0) for spans in drawn]
    longest = max(
        max((span.end_s for span in spans), default=0.0) - begin for spans, begin in zip(drawn, begins, strict=True)
    )
    columns = max(12, width - max(len(each.version) for each in shown) - (34 if narrow else 66))
    rows: list[tuple[Any, ...]] = []
    for each, spans, begin in zip(shown, drawn, begins, strict=True):
        line = bar(spans, start=begin, scale=columns / max(longest, 1e-9), columns=columns)
        rest = () if narrow else (_answers(each),)
        rows.append((each.version, state(each.outcome), seconds(each.promoted_s), line, *rest))
    head = ("version!", "outcome!", "took>", "phases!")
    return table("Promotions", head if narrow else (*head, "answers"), rows, dense=True)


def _answers(way: Promotion) -> Text:
    if way.reason:
        return Text(one_line(way.reason), STATE_STYLES.get(way.outcome, ""))
    refused = f", {way.refused} refused" if way.refused else ""
    return Text(f"{way.accepted} accepted{refused}" + (f", {way.slowest} last" if way.slowest else ""), "dim")


def _routers(view: Overview, *, narrow: bool) -> RenderableType:
    if narrow and view.routers:
        rows = [(each.router, each.behind, each.inflight, seconds(each.age_s)) for each in view.routers]
        return table("Routers", ("router!", "behind>", "in flight>", "heard>"), rows, dense=True)
    return routers(view, dense=True)


def _events(view: Overview, *, most: int, narrow: bool) -> Group:
    lines = [Text("Events", "bold")]
    for each in view.events[-most:]:
        style = "bold red" if each.bad else EVENT_STYLES.get(each.type, "")
        when = Text() if narrow else Text(f"{each.clock()} ", "dim")
        what = Text.assemble((f"{one_line(each.type):<18}", style), " ", (one_line(each.subject), "bold"))
        lines.append(Text.assemble(when, what, "  ", one_line(each.text), no_wrap=True, overflow="ellipsis"))
    return Group(*lines)


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.2f}"


def _lines(console: Console, part: RenderableType, width: int) -> int:
    return len(console.render_lines(part, console.options.update(width=width), pad=False))
