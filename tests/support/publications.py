"""A publisher whose fleet decides exactly when it is waited for, or when the test says so."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

from adaptersync.trainer.checkpoint import adapter_in
from adaptersync.trainer.fates import RolloutFates
from adaptersync.trainer.publication import Outcome
from adaptersync.trainer.submissions import Submission
from adaptersync_core.errors import Fenced, PublicationFailed
from adaptersync_core.identity import adapter_id


class FakePublication(Submission):
    """A submission that was published at once, unless its fate is one that comes before that."""

    def __init__(self, publisher: FakePublisher, seq: int, step: int | None = None) -> None:
        super().__init__(Path(f"adapter-{seq}"), step=step)
        self.decided: Outcome | None = None
        self.digest = f"{seq:064x}"
        self._number = seq
        self._publisher = publisher

    @property
    def adapter_id(self) -> str:
        return adapter_id("run", self._number, f"{self._number:064x}")

    @property
    def outcome(self) -> Outcome | None:
        return self.decided

    @property
    def seq(self) -> int | None:
        never = self._publisher.fates.get(self._number) in ("replaced", "failed")
        return None if never or self._number in self._publisher.on_their_way else self._number

    @property
    def publication(self) -> FakePublication | None:  # type: ignore[override]
        return None if self.seq is None else self

    def published(self, timeout_s: float) -> FakePublication | None:  # type: ignore[override]
        return self.publication

    def wait(self, timeout_s: float) -> Outcome:
        self._publisher.waited_for.append(self._number)
        fate = self._publisher.fates.get(self._number, "current")
        if fate == "silence":
            raise PublicationFailed(f"no outcome in {timeout_s:g} s", version=self.adapter_id)
        if fate == "fenced":
            raise Fenced("a newer trainer has begun this run", run="run")
        return self._publisher.decide(self, fate)


class FakePublisher:
    """`fates` says what becomes of a number that is waited for; by default it is promoted.

    Numbers begin after `last`; those `on_their_way` are published as they are decided.
    """

    epoch = 7

    def __init__(self, fates: Mapping[int, str] | None = None, *, last: int = 0) -> None:
        self.fates = dict(fates or {})
        self.rollouts = RolloutFates()
        self.current_seq: int | None = None
        self.on_their_way: set[int] = set()
        self.waited_for: list[int] = []
        self.published: list[SimpleNamespace] = []
        self.closed = False
        self.retries = 0
        self._callback: Callable[[int | None], None] = lambda _seq: None
        self._seq = last

    def announce(self, step: int | None = None) -> FakePublication:
        self._seq += 1
        return FakePublication(self, self._seq, step)

    def decide(self, publication: FakePublication, fate: str) -> Outcome:
        self.on_their_way.discard(publication._number)
        if fate == "current":
            self.current_seq = publication._number
            self._callback(publication._number)
        reason = f"because of {publication._number}"
        publication.decided = Outcome(state=fate, reason=reason)  # type: ignore[arg-type]
        return publication.decided

    def submit(
        self, directory: Path, *, step: int, timings: Mapping[str, float], load: Mapping[str, float], remove: bool
    ) -> FakePublication:
        files = {path.name: path.read_bytes() for path in directory.iterdir()}
        self.published.append(
            SimpleNamespace(step=step, timings=dict(timings), load=dict(load), files=files, directory=directory)
        )
        submission = self.announce(step)
        submission.timings = dict(timings)
        submission.digest = adapter_in(directory).digest
        if remove:
            shutil.rmtree(directory)
        return submission

    def on_promoted(self, callback: Callable[[int | None], None]) -> None:
        self._callback = callback

    def close(self) -> None:
        self.closed = True
