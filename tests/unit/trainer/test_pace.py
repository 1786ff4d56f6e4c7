"""When training waits for the fleet, when it does not, and when it stops."""

from __future__ import annotations

import logging

import pytest

from adaptersync.trainer.pace import Pace
from adaptersync_core.errors import PublicationFailed
from support.publications import FakePublication, FakePublisher


def pace_of(publisher: FakePublisher, max_staleness: int) -> Pace[FakePublication]:
    return Pace(lambda: publisher.current_seq, max_staleness=max_staleness, timeout_s=30.0)


@pytest.mark.parametrize(
    ("max_staleness", "left_undecided"), [(0, 0), (1, 0), (2, 1), (4, 3)], ids=lambda value: f"{value}"
)
def test_training_runs_one_less_than_max_staleness_ahead(max_staleness: int, left_undecided: int) -> None:
    publisher = FakePublisher()
    pace = pace_of(publisher, max_staleness)
    for seq in range(1, 11):
        pace.published(publisher.announce())
        ahead = seq - (publisher.current_seq or 0)
        assert ahead == min(seq - 1, left_undecided)
    assert publisher.waited_for == list(range(1, 11 - left_undecided))


def test_the_first_version_is_always_waited_for() -> None:
    publisher = FakePublisher()
    pace_of(publisher, 8).published(publisher.announce())
    assert publisher.waited_for == [1]


def test_what_was_decided_meanwhile_costs_no_wait() -> None:
    publisher = FakePublisher()
    pace = pace_of(publisher, 2)
    pace.published(publisher.announce())
    for _ in range(3):
        publication = publisher.announce()
        publisher.decide(publication, "current")
        pace.published(publication)
    assert publisher.waited_for == [1]
    assert pace.counts.promoted == 4


def test_one_rollback_does_not_stop_training() -> None:
    publisher = FakePublisher(fates={3: "rolled_back"})
    pace = pace_of(publisher, 2)
    for _ in range(6):
        pace.published(publisher.announce())
    pace.settle()
    assert (pace.counts.published, pace.counts.promoted, pace.counts.rolled_back) == (6, 5, 1)


def test_rollbacks_in_a_row_stop_it_with_the_reason() -> None:
    publisher = FakePublisher(fates={seq: "rolled_back" for seq in range(3, 99)})
    pace = pace_of(publisher, 2)
    for _ in range(4):
        pace.published(publisher.announce())
    with pytest.raises(PublicationFailed, match=r"serves version 2 .* \(because of 5\).*version=run-v5-"):
        pace.published(publisher.announce())


def test_a_first_version_that_is_rolled_back_stops_training() -> None:
    publisher = FakePublisher(fates={1: "rolled_back"})
    with pytest.raises(PublicationFailed, match=r"no version of this run .*\(because of 1\)"):
        pace_of(publisher, 4).published(publisher.announce())


def test_a_fleet_that_does_not_answer_stops_training() -> None:
    publisher = FakePublisher(fates={2: "silence"})
    pace = pace_of(publisher, 1)
    pace.published(publisher.announce())
    with pytest.raises(PublicationFailed, match="no outcome"):
        pace.published(publisher.announce())


def test_superseded_versions_are_counted_and_not_missed() -> None:
    publisher = FakePublisher(fates={2: "superseded"})
    pace = pace_of(publisher, 2)
    for _ in range(3):
        pace.published(publisher.announce())
    assert (pace.counts.promoted, pace.counts.superseded) == (2, 1)


def test_silence_at_the_end_is_logged_and_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    publisher = FakePublisher(fates={2: "silence"})
    pace = pace_of(publisher, 2)
    pace.published(publisher.announce())
    pace.published(publisher.announce())
    with caplog.at_level(logging.WARNING):
        pace.settle()
    assert "has not decided" in caplog.text
