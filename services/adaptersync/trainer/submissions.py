"""Publishing off the caller's thread: one thread that publishes what was submitted, in order, as `outgoing` says."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

from adaptersync.trainer.outgoing import Disposition, Outgoing
from adaptersync.trainer.publication import Outcome, Publication
from adaptersync_core.errors import AdapterSyncError, PublicationFailed
from adaptersync_core.proof import Probe

log = logging.getLogger(__name__)


class Submission:
    """An adapter that was handed over. It has a number once it is published, an outcome once the fleet has decided.

    `trouble` says why it is not published yet, `attempts` how often that was tried.
    """

    def __init__(
        self,
        directory: Path,
        *,
        step: int | None = None,
        timings: Mapping[str, float] | None = None,
        load: Mapping[str, float] | None = None,
        probe: Probe | None = None,
        remove: bool = False,
    ) -> None:
        self.directory = directory
        self.step = step
        self.timings = dict(timings or {})
        self.load = dict(load or {})
        self.probe = probe
        self.submitted_at = time.monotonic()
        self.trouble = ""
        self.attempts = 0
        self._remove = remove
        self._published: Future[Publication | Outcome] = Future()
        self._ending = threading.Lock()

    @property
    def publication(self) -> Publication | None:
        ended = self._ended
        return ended if isinstance(ended, Publication) else None

    @property
    def seq(self) -> int | None:
        return self.publication.seq if self.publication else None

    @property
    def adapter_id(self) -> str:
        """Its name, and before it has one which step's adapter it is."""
        return self.publication.adapter_id if self.publication else f"adapter of step {self.step}"

    @property
    def outcome(self) -> Outcome | None:
        ended = self._ended
        return ended.outcome if isinstance(ended, Publication) else ended

    @property
    def _ended(self) -> Publication | Outcome | None:
        return None if not self._published.done() or self._published.exception() else self._published.result()

    def published(self, timeout_s: float) -> Publication | None:
        """The publication; None when there is none in time, or never will be."""
        try:
            ended = self._published.result(timeout_s)
        except (TimeoutError, AdapterSyncError):
            return None
        return ended if isinstance(ended, Publication) else None

    def wait(self, timeout_s: float) -> Outcome:
        """The outcome. PublicationFailed when there is none in time, what ended all publishing when something has."""
        deadline = time.monotonic() + timeout_s
        try:
            ended = self._published.result(timeout_s)
        except TimeoutError:
            raise PublicationFailed(
                f"not published in {timeout_s:g} s{f': {self.trouble}' if self.trouble else ''}",
                next_step="mend the cause; it is tried again until it succeeds or something newer is submitted",
                step=self.step,
            ) from None
        return ended if isinstance(ended, Outcome) else ended.wait(max(deadline - time.monotonic(), 0.0))

    def end(self, how: Publication | Outcome | Exception, *, keep: bool = False) -> None:
        """Published, or never to be: what is said first counts. The directory is not needed any more, unless it is
        to `keep`: whoever still reads it ends the submission once more."""
        if not keep:
            self.discard()
        with self._ending:
            if self._published.done():
                return
            if isinstance(how, Exception):
                self._published.set_exception(how)
            else:
                self._published.set_result(how)

    def discard(self) -> None:
        """Remove the directory, if that was asked for."""
        if self._remove:
            shutil.rmtree(self.directory, ignore_errors=True)


class Submitter:
    """The thread; it is started by the first submission. `publish` is called by no other."""

    def __init__(self, publish: Callable[[Submission], Publication], *, name: str) -> None:
        self.retries = 0
        self._publish = publish
        self._name = name
        self._outgoing: Outgoing[Submission] = Outgoing()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._reading: Submission | None = None  # by the thread, right now
        self._closing = False
        self._told = ""  # the trouble that was logged last: said once, not with every attempt and its number

    def submit(self, submission: Submission) -> None:
        """Raises what has ended all publishing, if something has. Never waits."""
        with self._changed:
            if self._closing:
                raise _closed(submission)
            replaced = self._outgoing.put(submission)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()
        if replaced is not None:
            self._replaced(replaced)

    def close(self, timeout_s: float) -> None:
        """Wait for what is under way and for what waits; what is not published by then is given up."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
        with self._changed:
            left, reading = self._outgoing.end(PublicationFailed("publisher is closed")), self._reading
            self._changed.notify_all()
        for submission in left:
            log.warning("%s is given up, since its publisher is closed: %s", submission.adapter_id, submission.trouble)
            submission.end(_closed(submission), keep=submission is reading)

    def _run(self) -> None:
        while (submission := self._next()) is not None:
            submission.attempts += 1
            try:
                publication = self._publish(submission)
            except Exception as error:  # whatever it is: it ends here, or it is tried again, and is told
                self._failed(submission, error)
                continue
            with self._changed:
                self._reading = None
                self._outgoing.done()
                self._changed.notify_all()
            if self._told:
                log.info("publishing goes on: %s", publication.adapter_id)
                self._told = ""
            submission.end(publication)

    def _next(self) -> Submission | None:
        """Waits for something to publish; None when there will be nothing more."""
        with self._changed:
            while (submission := self._outgoing.take(time.monotonic())) is None:
                if self._outgoing.ended is not None or (self._closing and self._outgoing.idle):
                    return None
                self._changed.wait(self._outgoing.rest_s(time.monotonic()))
            self._reading = submission
            return submission

    def _failed(self, submission: Submission, error: Exception) -> None:
        submission.trouble = str(error) or type(error).__name__
        with self._changed:
            self._reading = None
            if self._outgoing.ended is not None:  # given up meanwhile
                submission.end(error)
                return
            disposition = self._outgoing.failed(error, time.monotonic())
            left = self._outgoing.end(error) if disposition is Disposition.END else []
        match disposition:
            case Disposition.RETRY:
                self.retries += 1
                self._tell("%s is not published yet, and will be tried again: %s", submission, _kind(error))
            case Disposition.SKIP:
                self._tell("%s is not published: %s", submission, submission.trouble)  # which tensor it is, say
                submission.end(Outcome(state="failed", reason=submission.trouble))
            case Disposition.END:
                log.error("nothing more is published: %s", submission.trouble, exc_info=_unexpected(error))
                for one in (submission, *left):
                    one.end(error)
            case None:
                self._tell("%s is not published: %s", submission, _kind(error))
                self._replaced(submission)

    def _tell(self, what: str, submission: Submission, kind: str) -> None:
        if kind != self._told:
            log.warning(what, submission.adapter_id, submission.trouble)
        self._told = kind

    @staticmethod
    def _replaced(submission: Submission) -> None:
        reason = "a newer one was submitted before it was published"
        submission.end(
            Outcome(state="replaced", reason=f"{reason}: {submission.trouble}" if submission.trouble else reason)
        )


def _kind(error: Exception) -> str:
    """What is the same for every attempt, each of which has another version."""
    return error.reason if isinstance(error, AdapterSyncError) else repr(error)


def _unexpected(error: Exception) -> Exception | None:
    return None if isinstance(error, AdapterSyncError) else error


def _closed(submission: Submission) -> PublicationFailed:
    return PublicationFailed("publisher is closed", next_step="submit before close()", step=submission.step)
