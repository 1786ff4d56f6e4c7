"""When training waits for the fleet, when it does not, and when it stops."""

from __future__ import annotations

import logging
import queue
from types import SimpleNamespace

import pytest

from adaptersync.trainer.pace import NEVER, Pace
from adaptersync.trainer.samples import Samples
from adaptersync_core.errors import PublicationFailed
from support.publications import FakePublication, FakePublisher


class Trainer:
    """A pace, and syncs one after another."""

    def __init__(self, publisher: FakePublisher, max_staleness: int, clock: int = 0) -> None:
        self.now = 0.0
        self.clock = clock
        self.publisher = publisher
        self.pace = Pace(
            lambda: publisher.current_seq, max_staleness=max_staleness, timeout_s=30.0, monotonic=lambda: self.now
        )

    def submit(self) -> FakePublication:
        self.clock += 1
        submission = self.publisher.announce()
        self.pace.submitted(self.clock, submission)
        return submission

    def sync(self) -> FakePublication:
        submission = self.submit()
        self.pace.wait()
        return submission


@pytest.mark.parametrize(
    ("max_staleness", "left_undecided"), [(0, 0), (1, 0), (2, 1), (4, 3)], ids=lambda value: f"{value}"
)
def test_training_runs_one_less_than_max_staleness_ahead(max_staleness: int, left_undecided: int) -> None:
    publisher = FakePublisher()
    trainer = Trainer(publisher, max_staleness)
    for seq in range(1, 11):
        trainer.sync()
        ahead = seq - (publisher.current_seq or 0)
        assert ahead == min(seq - 1, left_undecided)
    assert publisher.waited_for == list(range(1, 11 - left_undecided))


def test_the_first_version_is_always_waited_for() -> None:
    publisher = FakePublisher()
    Trainer(publisher, 8).sync()
    assert publisher.waited_for == [1]


def test_what_was_decided_meanwhile_costs_no_wait() -> None:
    publisher = FakePublisher()
    trainer = Trainer(publisher, 2)
    trainer.sync()
    for _ in range(3):
        publisher.decide(trainer.submit(), "current")
        trainer.pace.wait()
    assert publisher.waited_for == [1]
    assert trainer.pace.counts.promoted == 4


def test_one_rollback_does_not_stop_training() -> None:
    publisher = FakePublisher(fates={3: "rolled_back"})
    trainer = Trainer(publisher, 2)
    for _ in range(6):
        trainer.sync()
    trainer.pace.settle()
    assert (trainer.pace.counts.published, trainer.pace.counts.promoted, trainer.pace.counts.rolled_back) == (6, 5, 1)


def test_rollbacks_in_a_row_stop_it_with_the_reason() -> None:
    publisher = FakePublisher(fates={seq: "rolled_back" for seq in range(3, 99)})
    trainer = Trainer(publisher, 2)
    for _ in range(4):
        trainer.sync()
    with pytest.raises(PublicationFailed, match=r"serves version 2 .* \(because of 5\).*version=run-v5-"):
        trainer.sync()


def test_a_first_version_that_is_rolled_back_stops_training() -> None:
    publisher = FakePublisher(fates={1: "rolled_back"})
    with pytest.raises(PublicationFailed, match=r"no version of this run .*\(because of 1\)"):
        Trainer(publisher, 4).sync()


def test_a_fleet_that_does_not_answer_stops_training() -> None:
    publisher = FakePublisher(fates={2: "silence"})
    trainer = Trainer(publisher, 1)
    trainer.sync()
    with pytest.raises(PublicationFailed, match="no outcome"):
        trainer.sync()


def test_superseded_versions_are_counted_and_not_missed() -> None:
    publisher = FakePublisher(fates={2: "superseded"})
    trainer = Trainer(publisher, 2)
    for _ in range(3):
        trainer.sync()
    assert (trainer.pace.counts.promoted, trainer.pace.counts.superseded) == (2, 1)


@pytest.mark.parametrize(("fate", "why"), [("silence", "no outcome in"), ("fenced", "a newer trainer has begun")])
def test_what_ends_before_the_last_outcome_is_known_is_logged_and_not_raised(
    caplog: pytest.LogCaptureFixture, fate: str, why: str
) -> None:
    publisher = FakePublisher(fates={2: fate})
    trainer = Trainer(publisher, 2)
    trainer.sync()
    trainer.sync()
    with caplog.at_level(logging.WARNING):
        trainer.pace.settle()
    assert f"what became of its last versions is not known: {why}" in caplog.text


# the two clocks


def test_ages_are_counted_in_syncs_whatever_the_numbers_are() -> None:
    """Numbers of a run that goes on after Redis was lost leave a gap of a hundred."""
    publisher = FakePublisher()
    trainer = Trainer(publisher, 2, clock=40)
    trainer.sync()
    publisher._seq += 100
    trainer.sync()
    assert publisher.waited_for == [1]  # one sync ahead, not a hundred
    assert trainer.pace.ahead == 1
    assert [trainer.pace.sync_of(seq) for seq in (1, 102, 2)] == [41, 42, NEVER]


@pytest.mark.parametrize("fate", ["replaced", "failed"])
def test_what_was_never_published_ages_the_others_all_the_same(fate: str) -> None:
    publisher = FakePublisher(fates={3: fate, 4: fate})
    trainer = Trainer(publisher, 3)
    for _ in range(4):
        trainer.sync()
    assert publisher.waited_for == [1, 2]
    assert trainer.pace.sync_of(2) == 2
    assert trainer.pace.ahead == 2
    trainer.sync()
    assert publisher.waited_for == [1, 2, 3, 4, 5]  # three ahead: two are decided, and bring nothing
    assert trainer.pace.ahead == 0
    assert getattr(trainer.pace.counts, fate) == 2


def test_a_version_of_another_trainer_counts_as_never_young_enough() -> None:
    publisher = FakePublisher()
    trainer = Trainer(publisher, 2)
    trainer.sync()
    assert trainer.pace.sync_of(99) == NEVER
    publisher.current_seq = 99
    assert trainer.pace.ahead == float("inf")


@pytest.mark.parametrize(("max_staleness", "oldest"), [(0, 6), (1, 5), (2, 4), (4, 2)])
def test_what_would_be_dropped_by_now_is_doomed_and_nothing_else_is(max_staleness: int, oldest: int) -> None:
    publisher = FakePublisher()
    trainer = Trainer(publisher, max_staleness)
    for _ in range(6):
        trainer.sync()
    assert trainer.pace.oldest_useful == oldest


def test_with_no_staleness_allowed_everything_is_doomed_until_the_next_version_has_a_number() -> None:
    publisher = FakePublisher(fates={2: "replaced"})
    trainer = Trainer(publisher, 0)
    trainer.sync()
    assert trainer.pace.oldest_useful == 1
    trainer.submit()
    assert trainer.pace.oldest_useful == 2


def test_what_is_known_of_versions_is_bounded() -> None:
    publisher = FakePublisher()
    trainer = Trainer(publisher, 2)
    for _ in range(500):
        trainer.sync()
    assert len(trainer.pace._syncs) <= 8
    assert len(trainer.pace._undecided) <= 3
    assert trainer.pace.oldest_useful == 498


def test_a_pointer_that_goes_back_too_far_ends_training_after_a_while_with_the_reason() -> None:
    """An operator takes versions back: what is generated then would be dropped, and nothing else would ever come."""
    publisher = FakePublisher()
    trainer = Trainer(publisher, 2)
    for _ in range(5):
        trainer.sync()
    trainer.pace.check()
    publisher.current_seq = 2
    trainer.pace.check()
    trainer.now = 31.0
    with pytest.raises(PublicationFailed, match=r"serves version 2 .* too old to train on"):
        trainer.pace.check()


def test_samples_are_read_with_the_sync_their_version_is_of() -> None:
    publisher = FakePublisher(last=50)
    trainer = Trainer(publisher, 2)
    trainer.sync()
    held: queue.Queue[SimpleNamespace] = queue.Queue()
    for seq in (51, 7):
        held.put(SimpleNamespace(model_version=seq))
    samples = Samples(held, trainer.pace)
    assert samples.qsize() == 2
    assert [samples.get(timeout=1).model_version for _ in range(2)] == [1, NEVER]


def test_a_trainer_without_samples_hears_why_there_will_be_none() -> None:
    publisher = FakePublisher()
    trainer = Trainer(publisher, 2)
    trainer.sync()
    publisher.current_seq = None
    samples = Samples(queue.Queue(), trainer.pace)
    with pytest.raises(queue.Empty):
        samples.get(timeout=0.01)
    trainer.now = 31.0
    with pytest.raises(PublicationFailed, match="no version of this run"):
        samples.get(timeout=0.01)
