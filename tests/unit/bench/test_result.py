"""The arithmetic of figures and promises."""

from __future__ import annotations

import orjson
import pytest

from adaptersync_tools.bench.result import SECONDS, Figure, Machine, Result, Target, show

MACHINE = Machine(system="Linux", cores=2, gpus=0, load=1.5)


def result(*targets: Target) -> Result:
    slow = Figure.of("polling", [4.0, 2.0, 9.0])
    fast = Figure.of("fast lane", [0.1, 0.3, 0.2, 0.4], against=slow)
    return Result(
        bench="promotion",
        began_at="2026-11-30T00:00:00+00:00",
        machine=MACHINE,
        settings={"publications": 3},
        figures=(slow, fast),
        targets=targets,
    )


def test_a_figure_is_median_and_worst() -> None:
    slow, fast = result().figures
    assert (slow.p50_s, slow.max_s, slow.ratio) == (4.0, 9.0, None)
    assert fast.p50_s == pytest.approx(0.25)
    assert fast.max_s == 0.4
    assert fast.ratio == pytest.approx(0.0625)
    assert fast.against == "polling"


def test_nothing_measured_is_no_figure() -> None:
    with pytest.raises(ValueError, match="data"):
        Figure.of("nothing", [])


@pytest.mark.parametrize(
    ("target", "kept"),
    [
        (Target.at_least("faster", 10.0, 10.0), True),
        (Target.at_least("faster", 9.99, 10.0), False),
        (Target.at_most("latency", 0.5, 0.5, unit=SECONDS), True),
        (Target.at_most("latency", 0.51, 0.5, unit=SECONDS), False),
    ],
)
def test_a_target_says_whether_it_is_kept(target: Target, kept: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert target.kept is kept
    assert show(result(Target.at_least("always", 1.0, 0.0), target), as_json=False) == (0 if kept else 1)
    shown = capsys.readouterr().out
    assert ("✗" in shown) is not kept
    assert "0.0625 of polling" in shown


def test_json_says_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(result(Target.at_most("latency", 0.6, 0.5, unit=SECONDS)), as_json=True) == 1
    document = orjson.loads(capsys.readouterr().out)
    assert document["figures"][1]["samples_s"] == [0.1, 0.3, 0.2, 0.4]
    assert document["targets"][0]["kept"] is False
    assert document["machine"] == {"system": "Linux", "cores": 2, "gpus": 0, "load": 1.5}
