"""A publisher whose fleet decides exactly when it is waited for, or when the test says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

from adaptersync.trainer.publisher import Outcome
from adaptersync_core.errors import PublicationFailed
from adaptersync_core.identity import adapter_id


class FakePublication:
    def __init__(self, publisher: FakePublisher, seq: int) -> None:
        self.seq = seq
        self.adapter_id = adapter_id("run", seq, f"{seq:064x}")
        self.outcome: Outcome | None = None
        self._publisher = publisher

    def wait(self, timeout_s: float) -> Outcome:
        self._publisher.waited_for.append(self.seq)
        fate = self._publisher.fates.get(self.seq, "current")
        if fate == "silence":
            raise PublicationFailed(f"no outcome in {timeout_s:g} s", version=self.adapter_id)
        return self._publisher.decide(self, fate)


class FakePublisher:
    """`fates` says what becomes of a sequence number that is waited for; by default it is promoted."""

    epoch = 7

    def __init__(self, fates: Mapping[int, str] | None = None) -> None:
        self.fates = dict(fates or {})
        self.current_seq: int | None = None
        self.waited_for: list[int] = []
        self.published: list[SimpleNamespace] = []
        self.closed = False
        self._callback: Callable[[int], None] = lambda _seq: None
        self._seq = 0

    def announce(self) -> FakePublication:
        self._seq += 1
        return FakePublication(self, self._seq)

    def decide(self, publication: FakePublication, fate: str) -> Outcome:
        if fate == "current":
            self.current_seq = publication.seq
            self._callback(publication.seq)
        publication.outcome = Outcome(state=fate, reason=f"because of {publication.seq}")  # type: ignore[arg-type]
        return publication.outcome

    def publish(self, directory: Path, *, step: int, timings: Mapping[str, float]) -> FakePublication:
        files = sorted(path.name for path in directory.iterdir())
        self.published.append(SimpleNamespace(step=step, timings=dict(timings), files=files))
        return self.announce()

    def on_promoted(self, callback: Callable[[int], None]) -> None:
        self._callback = callback

    def close(self) -> None:
        self.closed = True
