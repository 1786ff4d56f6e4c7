"""Curves in a terminal, and as a picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaptersync_tools.curves import Curve, bounds, drawn, mean_curve, smoothed, stretched, write_picture


def test_a_curve_in_a_terminal() -> None:
    rising, falling = Curve(name="ours", values=(0.0, 0.5, 1.0)), Curve(name="theirs", values=(1.0, 0.5, 0.0))
    assert drawn("Reward", [rising, falling], width=9, height=3).plain.splitlines() == [
        "Reward",
        "  1.00 ┤○○○   ●●●",
        "  0.50 ┤   ◉◉◉   ",
        "  0.00 ┤●●●   ○○○",
        "       └─────────",
        "        1  step 3",
        "        ● ours   ○ theirs   ◉ both",
    ]


def test_more_steps_than_columns_are_means_and_fewer_are_lines() -> None:
    assert stretched([1.0, 3.0, 5.0, 7.0], 2) == [2.0, 6.0]
    assert stretched([1.0, 3.0], 5) == [1.0, 1.5, 2.0, 2.5, 3.0]
    assert stretched([2.0], 3) == [2.0] * 3
    assert sum(stretched([1.0] * 7 + [2.0], 3)) > 3.0  # the last step is shown


def test_bounds_hold_everything_and_do_not_dramatize() -> None:
    assert bounds([Curve(name="a", values=(0.5, 0.501))]) == pytest.approx((0.45, 0.6))
    low, high = bounds([Curve(name="a", values=(0.42, 0.88))], [0.97])
    assert (low, high) == pytest.approx((0.4, 1.0))


def test_a_mean_of_runs_is_as_long_as_the_shortest() -> None:
    curve = mean_curve("ours", [[0.0, 1.0, 5.0], [1.0, 2.0]])
    assert curve.values == (0.5, 1.5)
    assert curve.runs == ((0.0, 1.0, 5.0), (1.0, 2.0))
    assert mean_curve("ours", [[1.0, 2.0]]).runs == ()
    assert smoothed([0.0, 3.0, 6.0, 3.0], steps=3) == [1.5, 3.0, 4.0, 4.5]


@pytest.mark.trl
@pytest.mark.filterwarnings("default")
def test_a_picture_is_a_png(tmp_path: Path) -> None:
    curves = [Curve(name="ours", values=(0.1, 0.5, 0.9)), mean_curve("theirs", [[0.2, 0.4], [0.4, 0.6]])]
    write_picture(tmp_path / "new" / "curve.png", "A run", curves, unit="reward", levels={"before": 0.05})
    assert (tmp_path / "new" / "curve.png").read_bytes().startswith(b"\x89PNG")
