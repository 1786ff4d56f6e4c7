"""Which directories are due, and in which order: every rule, without a disk and without a clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptersync.trainer.arrivals import PRESETS, Arrivals, Last, Layout, Sighting
from adaptersync_core.errors import ConfigError

SETTLE_S = 5.0


def one(step: int, *, written: int | None = None, mark: int | None = None, size: int = 100) -> Sighting:
    """A directory that was written at `written` (by default in the order of the steps) and marked then."""
    at = step * 10 if written is None else written
    files = ((50, at), (size, at))
    return Sighting(name=f"step_{step}", step=step, files=files, written_ns=at, mark_ns=at if mark is None else mark)


def arrivals(*, marked: bool = True, last: Last | None = None, everything: bool = False) -> Arrivals:
    return Arrivals(marked=marked, settle_s=SETTLE_S, last=last, everything=everything)


def taken(those: Arrivals, *here: Sighting, now: float = 0.0) -> list[int]:
    """The steps that are published when everything that is due at one moment is."""
    steps = []
    while (due := those.due(here, now)[0]) is not None:
        those.published(due)
        steps.append(due.step)
    return steps


def looking(*, marked: bool = True) -> Arrivals:
    """One that has begun before anything was there."""
    those = arrivals(marked=marked)
    assert taken(those) == []
    return those


# layouts


@pytest.mark.parametrize(
    ("pattern", "name", "step"),
    [
        ("step_{step}", "step_10", 10),
        ("step_{step}", "step_007", 7),
        ("step_{step}", "step_", None),
        ("step_{step}", "step_-1", None),
        ("step_{step}", "step_1.tmp", None),
        ("step_{step}", "xstep_1", None),
        ("step_{step}", "step_१", None),
        ("step_{step}", "step_" + "9" * 19, None),
        ("a.{step}.b", "a.3.b", 3),
        ("a.{step}.b", "ax3xb", None),
        ("runs/now/checkpoint-{step}/lora", "checkpoint-3", 3),
    ],
)
def test_a_pattern_says_what_a_name_is(pattern: str, name: str, step: int | None) -> None:
    assert Layout(pattern=pattern).step(name) == step


def test_a_pattern_may_lead_down_on_both_sides() -> None:
    layout = Layout(pattern="./runs/now//checkpoint-{step}/lora/")
    assert (layout.above, layout.below) == ("runs/now", "lora")
    assert (PRESETS["trl"].above, PRESETS["trl"].below) == ("", "")


@pytest.mark.parametrize(
    "fields",
    [
        {"pattern": "step"},
        {"pattern": ""},
        {"pattern": "{step}/{step}"},
        {"pattern": "/tmp/{step}"},  # noqa: S108
        {"pattern": "../{step}"},
        {"pattern": "a/{step}", "complete": "../x"},
        {"pattern": "a/{step}", "complete": "/x"},
    ],
    ids=str,
)
def test_a_pattern_that_leads_elsewhere_is_refused(fields: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        Layout(**fields)
    assert refusal.value.next_step


# order


def test_steps_come_in_the_order_of_their_numbers() -> None:
    assert taken(looking(), one(10), one(9), one(100)) == [9, 10, 100]


def test_of_what_was_there_before_only_the_newest_is_published() -> None:
    those = arrivals()
    due, passed = those.due([one(9), one(10), one(2)], 0.0)
    assert due is not None
    assert (due.step, passed) == (10, [])
    those.published(due)
    due, passed = those.due([one(9), one(10), one(2)], 0.0)
    assert (due, [each.step for each in passed]) == (None, [2, 9])
    assert taken(those, one(9), one(10), one(11)) == [11]


def test_of_what_was_there_before_the_newest_is_that_of_the_highest_step() -> None:
    """Whatever the times say, which may be those of a copy."""
    those = arrivals()
    copied = [one(1, written=90), one(2, written=80), one(3, written=70)]
    assert taken(those, *copied) == [3]
    assert taken(those, one(1, written=95), *copied[1:]) == [1]  # this is a trainer that went back


def test_on_request_all_of_what_was_there_before_is() -> None:
    assert taken(arrivals(everything=True), one(9), one(10), one(2)) == [2, 9, 10]


def test_when_the_newest_of_before_is_bad_the_next_one_is_it() -> None:
    those = arrivals()
    here = [one(1), one(2), one(3)]
    due, _ = those.due(here, 0.0)
    assert due is not None
    assert not those.failed(due, 0.0)
    assert those.due(here, SETTLE_S)[0] == due
    assert those.failed(due, SETTLE_S)
    assert taken(those, *here, now=SETTLE_S) == [2]


# complete


def test_without_its_mark_a_directory_is_not_complete_and_holds_nobody_up() -> None:
    those = looking()
    assert taken(those, one(1, mark=0), one(2)) == [2]
    assert taken(those, one(1, mark=0), one(2), now=1e9) == []


def test_a_mark_that_is_older_than_the_adapter_is_another_adapters() -> None:
    """A trainer that resumed writes into a directory that has a mark already."""
    those = looking()
    written_again = one(1, written=20, mark=10)
    assert taken(those, written_again, now=0.0) == []
    assert taken(those, written_again, now=SETTLE_S - 0.1) == []
    assert taken(those, one(1, written=20, mark=21), now=SETTLE_S - 0.1) == [1]


def test_a_mark_that_stays_older_counts_as_none() -> None:
    """As after a copy that kept no times."""
    those = looking()
    assert taken(those, one(1, written=20, mark=10), now=0.0) == []
    assert taken(those, one(1, written=20, mark=10), now=SETTLE_S) == [1]


def test_without_marks_it_is_complete_when_it_has_not_changed_for_the_settle_time() -> None:
    those = looking(marked=False)
    assert taken(those, one(1, mark=0, size=1), now=0.0) == []
    assert taken(those, one(1, mark=0, size=2), now=4.0) == []
    assert taken(those, one(1, mark=0, size=2), now=8.9) == []
    assert taken(those, one(1, mark=0, size=2), now=9.0) == [1]


def test_who_is_still_being_written_is_waited_for_by_later_steps() -> None:
    those = looking(marked=False)
    assert taken(those, one(1, mark=0), one(2, mark=0, size=1), now=0.0) == []
    assert taken(those, one(1, mark=0, size=2), one(2, mark=0, size=1), now=5.0) == []
    assert taken(those, one(1, mark=0, size=2), one(2, mark=0, size=1), now=10.0) == [1, 2]


# bad


def test_what_fails_is_tried_for_the_settle_time_and_then_given_up() -> None:
    """A mount may show the mark before the files."""
    those = looking()
    for now in (10.0, 12.0):
        due, _ = those.due([one(1)], now)
        assert due is not None
        assert not those.failed(due, now)
    due, _ = those.due([one(1)], 15.0)
    assert due is not None
    assert those.failed(due, 15.0)
    assert those.due([one(1)], 16.0) == (None, [])
    assert taken(those, one(1), one(2), now=17.0) == [2]


def test_what_may_pass_by_itself_is_final_only_when_it_lasts() -> None:
    those = looking()
    those.due([one(1)], 0.0)
    assert not those.failed(one(1), 100.0, fleeting=True)
    assert not those.failed(one(1), 104.9, fleeting=True)
    assert those.failed(one(1), 105.0, fleeting=True)


def test_what_was_given_up_is_looked_at_again_when_it_is_written_again() -> None:
    those = looking()
    those.due([one(1)], 0.0)
    assert not those.failed(one(1), 0.0)
    assert those.failed(one(1), SETTLE_S)
    assert taken(those, one(1, size=7), now=SETTLE_S) == [1]


# new


def test_a_directory_that_was_deleted_is_no_news_and_comes_again_as_a_new_one() -> None:
    those = looking()
    assert taken(those, one(1), one(2)) == [1, 2]
    assert those.due([], 1.0) == (None, [])
    assert those.open() == set()
    assert taken(those, one(2, written=99)) == [2]


def test_a_trainer_that_went_back_is_followed() -> None:
    those = looking()
    assert taken(those, *map(one, range(1, 5))) == [1, 2, 3, 4]
    again = [one(1), one(2), one(3, written=50), one(4)]
    assert taken(those, *again) == [3]
    assert taken(those, *again[:3], one(4, written=60)) == [4]


def test_what_is_older_than_what_was_published_is_passed_over() -> None:
    those = looking()
    assert taken(those, one(5)) == [5]
    due, passed = those.due([one(5), one(4)], 1.0)
    assert (due, passed) == (None, [one(4)])
    assert those.due([one(5), one(4)], 2.0) == (None, [])


def test_who_is_complete_late_does_not_take_the_fleet_back() -> None:
    """It was being written when a later step was published; its time says nothing, then."""
    those = looking()
    assert taken(those, one(4, mark=0), one(5)) == [5]
    late = one(4, written=70)
    due, passed = those.due([late, one(5)], 1.0)
    assert (due, passed) == (None, [late])
    assert taken(those, one(4, written=80), one(5)) == [4]  # and this is a trainer that went back


def test_after_a_restart_what_was_not_complete_before_is_no_way_back_either() -> None:
    those = arrivals(last=Last(step=5, written_ns=50))
    assert taken(those, one(4, mark=0), one(5)) == []
    assert taken(those, one(4, written=70), one(5)) == []


@pytest.mark.parametrize("everything", [False, True])
def test_after_a_restart_only_what_is_new_comes(everything: bool) -> None:
    those = arrivals(last=Last(step=5, written_ns=55), everything=everything)
    assert taken(those, *map(one, (3, 4, 5))) == []
    assert taken(those, *map(one, (3, 4, 5, 6))) == [6]


def test_after_a_restart_the_newest_of_a_trainer_that_went_back_meanwhile_comes() -> None:
    those = arrivals(last=Last(step=5, written_ns=55))
    assert taken(those, one(3, written=60), one(4), one(5)) == [3]


def test_what_turns_out_to_be_published_before_stands_for_all_before_it() -> None:
    """As when somebody else published last, without a step."""
    those = arrivals(last=Last(step=-1, written_ns=99))
    here = [one(1), one(2), one(3)]
    due, _ = those.due(here, 0.0)
    assert due == one(3)
    those.repeated(one(3))
    assert those.due(here, 0.0) == (None, [one(1), one(2)])
    assert those.last == Last(step=-1, written_ns=99)


def test_what_a_trainer_wrote_that_went_back_before_a_restart_comes_although_a_higher_step_is_there() -> None:
    those = arrivals(last=Last(step=3, written_ns=65))
    here = [one(3, written=60), one(4, written=70), one(5)]
    due, _ = those.due(here, 0.0)
    assert due == one(5)
    those.repeated(one(5))
    assert taken(those, *here) == [4]


def test_it_remembers_no_more_than_what_is_there() -> None:
    those = looking()
    for step in range(1, 1000):
        taken(those, one(step), one(step + 1))
    assert len(those._known) == 2


@given(
    order=st.permutations(range(1, 9)),
    restarts=st.sets(st.integers(0, 8)),
    deleted=st.sets(st.integers(1, 8)),
)
def test_whatever_order_directories_come_in_no_step_comes_twice_or_out_of_order(
    order: list[int], restarts: set[int], deleted: set[int]
) -> None:
    """Forward progress, seen in any order, with restarts and deletions anywhere: and the last step always comes."""
    those, published = looking(), []
    here: dict[int, Sighting] = {}
    for number, step in enumerate(order):
        here[step] = one(step)
        published += taken(those, *here.values())
        for gone in deleted & set(published):
            here.pop(gone, None)
        if number in restarts:
            those = arrivals(last=those.last)
    assert published == sorted(set(published))
    assert published[-1] == 8
