"""What is made for Prometheus and Grafana: as the code has it, and of nothing but metrics that are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from adaptersync_core.metrics import Metric
from adaptersync_tools.observing.__main__ import WRITTEN
from adaptersync_tools.observing.alerts import ALERTS
from adaptersync_tools.observing.dashboard import ROWS, dashboard, queries
from adaptersync_tools.observing.names import TABLES, labels, series
from support import promql
from support.promql import Scrape, Vector
from support.source import REPOSITORY

QUERIES = [*(alert.expr for alert in ALERTS), *queries()]


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_deployed_is_what_the_code_says(name: str) -> None:
    text = (REPOSITORY / "deploy" / name).read_text()
    assert text == WRITTEN[name](), "python -m adaptersync_tools.observing writes it anew"


def test_every_metric_is_documented_and_means_something() -> None:
    text = (REPOSITORY / "deploy" / "METRICS.md").read_text()
    for service, table in TABLES.items():
        assert len({figure.name for figure in table}) == len(table)
        for figure in table:
            assert f"`adaptersync_{service}_{figure.name}" in text
            assert len(figure.text) > 5


def test_labels_are_few_and_bounded() -> None:
    """Nothing is counted by request, prompt, session or client."""
    words = {"replica", "version", "run", "state", "coordinator"}
    ours = {"outcome", "status", "routing", "read", "reason", "event", "verdict", "word", "phase"}
    for service, table in TABLES.items():
        for figure in table:
            assert set(labels(service, figure)) <= words | ours
            assert len(labels(service, figure)) <= 3


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_asks_for_what_there_is(query: str) -> None:
    known = series()
    for name, chosen in promql.names(query).items():
        assert name in known
        assert chosen <= {*known[name], "instance"}
    assert by(query) <= set().union(*(known[name] for name in promql.names(query)), {"instance"})


def by(query: str) -> set[str]:
    """Labels that it groups by."""
    groups: list[str] = re.findall(r"by \(([^)]*)\)", query)
    return {label.strip() for group in groups for label in group.split(",")}


def test_what_is_compared_with_its_growth_begins_at_zero() -> None:
    """`increase` sees nothing of a series that first appears with a value."""
    for alert in ALERTS:
        for name in re.findall(r"increase\((\w+)", alert.expr):
            figure = next(
                figure
                for service, table in TABLES.items()
                for figure in table
                if name == f"adaptersync_{service}_{figure.name}_total"
            )
            assert figure.words or not figure.labels
            for chosen in re.findall(rf"{name}{{\w+=\"([^\"]+)\"", alert.expr):
                assert chosen in figure.words


def test_texts_of_an_alert_name_labels_that_it_has() -> None:
    for alert in ALERTS:
        assert set(re.findall(r"{(\w+)}", alert.summary)) <= by(alert.expr), alert.name
        assert alert.fix
        assert len({each.name for each in ALERTS}) == len(ALERTS)


def test_panels_do_not_overlap_and_legends_name_labels_of_their_queries() -> None:
    board = json.loads(dashboard())
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for row in ROWS.values():
        for each in row:
            for legend, query in each.queries.items():
                grouped = {
                    label.strip() for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(",")
                }
                assert set(re.findall(r"{{(\w+)}}", legend)) <= grouped | {"instance"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus's own promtool is not installed")
def test_prometheus_takes_the_rules() -> None:
    directory = REPOSITORY / "deploy" / "prometheus"
    command = ["promtool", "check", "config", "prometheus.yml"]  # and the rules it names
    run = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=50)
    assert run.returncode == 0, run.stdout + run.stderr


ONE, TWO = frozenset({("replica", "a")}), frozenset({("replica", "b")})
BEFORE: Scrape = {"x": {ONE: 1.0, TWO: 4.0}, "y": {ONE: 10.0, TWO: 10.0}, "fresh": {}}
NOW: Scrape = {"x": {ONE: 3.0, TWO: 4.0}, "y": {ONE: 10.0, TWO: 5.0}, "fresh": {ONE: 7.0}}
SAID: dict[str, Vector] = {
    "x > 3": {TWO: 4.0},
    'x{replica="a"}': {ONE: 3.0},
    "sum(x) > 3": {frozenset(): 7.0},
    "max by (replica) (x / y) > 0.5": {TWO: 0.8},
    "increase(x[5m]) > 0": {ONE: 2.0},
    "rate(x[5m])": {ONE: 2 / 300, TWO: 0.0},
    "increase(fresh[5m]) > 0": {},
    "absent(x == 9)": {frozenset(): 1.0},
    "absent(x == 3)": {},
    "absent(nothing)": {frozenset(): 1.0},
    "sum(x) < 1 * sum(y)": {frozenset(): 7.0},
    "x > 2 and y > 9": {ONE: 3.0},
    "x > 3 or y > 9": {ONE: 10.0, TWO: 4.0},
    "min_over_time(x[5m])": {ONE: 1.0, TWO: 4.0},
}


@pytest.mark.parametrize("expression", SAID)
def test_queries_have_the_value_they_have_in_prometheus(expression: str) -> None:
    assert promql.value(expression, BEFORE, NOW) == pytest.approx(SAID[expression])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus's own promtool is not installed")
def test_prometheus_says_the_same(tmp_path: Path) -> None:
    named = {ONE: '{replica="a"}', TWO: '{replica="b"}', frozenset(): "{}"}
    case = {
        "interval": "5m",
        "input_series": [
            {"series": name + named[each], "values": f"{BEFORE[name].get(each, '_')} {value}"}
            for name, vector in NOW.items()
            for each, value in vector.items()
        ],
        "promql_expr_test": [
            {
                "expr": f"max by (replica) ({expression})",  # names of metrics are nothing to us
                "eval_time": "5m",
                "exp_samples": [{"labels": named[each], "value": value} for each, value in vector.items()],
            }
            for expression, vector in SAID.items()
        ],
    }
    (tmp_path / "test.yml").write_text(json.dumps({"evaluation_interval": "1m", "tests": [case]}))
    run = subprocess.run(["promtool", "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_figure_of_a_table_needs_a_meaning() -> None:
    with pytest.raises(TypeError):
        Metric(name="x", kind="gauge")  # type: ignore[call-arg]
