"""What is handed over comes to one end each, in order, off the caller's thread; closing waits, and not for ever."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace

from adaptersync.trainer import outgoing
from adaptersync.trainer.publication import Outcome, Publication
from adaptersync.trainer.submissions import Submission, Submitter
from adaptersync_core.errors import AdapterInvalid, ControlUnavailable, Fenced, PublicationFailed, StoreError
from adaptersync_core.manifest import AdapterShape, Manifest
from support.wait import wait_until_sync

AWAY = ControlUnavailable("Redis is away")
SHAPE = AdapterShape(rank=1, alpha=1.0, target_modules=(), base_model="", dtype="F32", tensors={}, noop=False)
MANIFEST = Manifest(run="run", seq=1, epoch=1, digest="a" * 64, files=(), shape=SHAPE, created_at=0.0)


class Publishing:
    """Stands in for a publisher: fails as told, and blocks while `go` is not set."""

    def __init__(self) -> None:
        self.done: list[int | None] = []
        self.fails: list[Exception] = []
        self.go = threading.Event()
        self.go.set()
        self.began = threading.Semaphore(0)
        self.threads: set[int] = set()

    def __call__(self, submission: Submission) -> Publication:
        self.began.release()
        self.threads.add(threading.get_ident())
        assert self.go.wait(20)
        if self.fails:
            raise self.fails.pop(0)
        assert list(submission.directory.iterdir())
        self.done.append(submission.step)
        return Publication(replace(MANIFEST, seq=len(self.done)))


@pytest.fixture
def publish(monkeypatch: pytest.MonkeyPatch) -> Publishing:
    monkeypatch.setattr(outgoing, "FIRST_REST_S", 0.01)
    return Publishing()


@pytest.fixture
def submitter(publish: Publishing) -> Iterator[Submitter]:
    made = Submitter(publish, name="outgoing-test")
    yield made
    publish.go.set()
    made.close(20)
    assert not [thread for thread in threading.enumerate() if thread.name == "outgoing-test"]


@pytest.fixture
def submit(submitter: Submitter, tmp_path: Path) -> Callable[[int], Submission]:
    def submit(step: int) -> Submission:
        directory = tmp_path / str(step)
        directory.mkdir()
        (directory / "file").touch()
        submission = Submission(directory, step=step, remove=True)
        submitter.submit(submission)
        return submission

    return submit


def published(submission: Submission) -> Publication:
    found = submission.published(20)
    assert found is not None, (submission.outcome, submission.trouble)
    return found


def test_all_are_published_in_order_by_a_thread_that_is_not_the_callers(
    publish: Publishing, submit: Callable[[int], Submission]
) -> None:
    submissions = []
    for step in range(5):
        submissions.append(submit(step))
        published(submissions[-1])
    assert publish.done == [0, 1, 2, 3, 4]
    assert threading.get_ident() not in publish.threads
    assert [submission.seq for submission in submissions] == [1, 2, 3, 4, 5]


def test_the_caller_never_waits_and_of_those_that_wait_the_newest_is_published(
    publish: Publishing, submit: Callable[[int], Submission]
) -> None:
    publish.go.clear()
    first = submit(1)
    assert publish.began.acquire(timeout=20)
    later = [submit(step) for step in (2, 3, 4)]
    assert (first.outcome, first.seq, later[2].outcome) == (None, None, None)
    replaced = Outcome(state="replaced", reason="a newer one was submitted before it was published")
    assert [one.outcome for one in later[:2]] == [replaced, replaced]
    assert [one.directory.exists() for one in (first, *later)] == [True, False, False, True]
    publish.go.set()
    published(later[2])
    assert publish.done == [1, 4]
    assert not later[2].directory.exists()


def test_what_failed_is_tried_again_and_said_once(
    publish: Publishing,
    submitter: Submitter,
    submit: Callable[[int], Submission],
    caplog: pytest.LogCaptureFixture,
) -> None:
    publish.fails = [AWAY, AWAY, AWAY]
    with caplog.at_level(logging.INFO):
        submission = submit(1)
        published(submission)
        wait_until_sync(lambda: "goes on" in caplog.text)
    assert (submission.attempts, submitter.retries) == (4, 3)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["adapter of step 1 is not published yet, and will be tried again: Redis is away"]


def test_a_full_store_is_said_once_though_each_attempt_has_another_number(
    publish: Publishing, submitter: Submitter, submit: Callable[[int], Submission], caplog: pytest.LogCaptureFixture
) -> None:
    publish.fails = [StoreError("version could not be stored: no room", version=f"run-v{seq}") for seq in range(1, 5)]
    published(submit(1))
    publish.fails = [AdapterInvalid("not finite", tensor=name) for name in ("a", "b")]
    for step in (2, 3):
        assert submit(step).wait(20).state == "failed"
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [
        "adapter of step 1 is not published yet, and will be tried again: "
        "version could not be stored: no room (version=run-v1)",
        "adapter of step 2 is not published: not finite (tensor=a)",
        "adapter of step 3 is not published: not finite (tensor=b)",
    ]


def test_what_failed_gives_way_to_the_next_with_its_reason(
    publish: Publishing, submit: Callable[[int], Submission], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing, "FIRST_REST_S", 60.0)
    publish.fails = [AWAY]
    first = submit(1)
    wait_until_sync(lambda: first.trouble != "")
    with pytest.raises(PublicationFailed, match=r"not published in 0\.01 s: Redis is away .*step=1"):
        first.wait(0.01)
    published(submit(2))
    assert first.outcome is not None
    assert first.outcome.state == "replaced"
    assert "Redis is away" in first.outcome.reason


def test_an_adapter_nobody_could_serve_is_failed_and_the_next_is_published(
    publish: Publishing, submit: Callable[[int], Submission]
) -> None:
    publish.fails = [AdapterInvalid("not finite")]
    bad = submit(1)
    assert bad.wait(20) == Outcome(state="failed", reason="not finite")
    published(submit(2))
    assert (bad.attempts, bad.seq) == (1, None)


@pytest.mark.parametrize("error", [Fenced("a newer trainer has begun this run"), TypeError("a mistake")])
def test_what_ends_publishing_is_raised_to_whoever_waits_and_to_whoever_submits(
    publish: Publishing, submit: Callable[[int], Submission], error: Exception
) -> None:
    publish.go.clear()
    publish.fails = [error]
    first = submit(1)
    assert publish.began.acquire(timeout=20)
    second = submit(2)
    publish.go.set()
    for one in (first, second):
        with pytest.raises(type(error)):
            one.wait(20)
    with pytest.raises(type(error)):
        submit(3)
    assert not publish.done


def test_closing_waits_for_what_is_under_way_and_what_waits(
    publish: Publishing, submitter: Submitter, submit: Callable[[int], Submission]
) -> None:
    publish.go.clear()
    first = submit(1)
    assert publish.began.acquire(timeout=20)
    second = submit(2)
    threading.Timer(0.1, publish.go.set).start()
    submitter.close(20)
    assert publish.done == [1, 2]
    assert (first.seq, second.seq) == (1, 2)
    with pytest.raises(PublicationFailed, match="closed"):
        submit(3)


def test_closing_does_not_wait_for_ever_and_says_what_it_gave_up(
    publish: Publishing, submitter: Submitter, submit: Callable[[int], Submission], caplog: pytest.LogCaptureFixture
) -> None:
    publish.go.clear()
    first = submit(1)
    assert publish.began.acquire(timeout=20)
    second = submit(2)
    began = time.monotonic()
    submitter.close(0.2)
    assert time.monotonic() - began < 10
    for one in (first, second):
        with pytest.raises(PublicationFailed, match="publisher is closed"):
            one.wait(1)
    assert "adapter of step 2 is given up" in caplog.text


@pytest.mark.parametrize("fails", [[], [AWAY], [AdapterInvalid("not finite")]], ids=["late", "away", "bad"])
def test_what_is_given_up_while_it_is_read_is_removed_once_it_is_not(
    publish: Publishing, submitter: Submitter, submit: Callable[[int], Submission], fails: list[Exception]
) -> None:
    publish.go.clear()
    publish.fails = list(fails)
    one = submit(1)
    assert publish.began.acquire(timeout=20)
    submitter.close(0.05)
    with pytest.raises(PublicationFailed, match="publisher is closed"):
        one.wait(1)
    assert one.directory.exists()
    publish.go.set()
    wait_until_sync(lambda: not one.directory.exists())
    assert publish.done == ([] if fails else [1])
    assert (one.publication, one.outcome) == (None, None)


def test_of_two_ends_at_once_the_first_counts(tmp_path: Path) -> None:
    both_looked = threading.Barrier(2)

    class Looked(Future[Publication | Outcome]):
        def done(self) -> bool:
            done = super().done()
            with contextlib.suppress(threading.BrokenBarrierError):
                both_looked.wait(0.1)
            return done

    one = Submission(tmp_path)
    one._published = Looked()
    with ThreadPoolExecutor(2) as threads:
        ends = [threads.submit(one.end, Outcome(state="failed")), threads.submit(one.end, PublicationFailed("closed"))]
    assert [end.exception() for end in ends] == [None, None]


def test_closing_gives_up_what_keeps_failing(
    publish: Publishing, submitter: Submitter, submit: Callable[[int], Submission], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing, "FIRST_REST_S", 60.0)
    publish.fails = [AWAY]
    one = submit(1)
    wait_until_sync(lambda: one.trouble != "")
    submitter.close(0.2)
    with pytest.raises(PublicationFailed):
        one.wait(1)
    assert not one.directory.exists()
