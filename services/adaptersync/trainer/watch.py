"""Publish what another trainer writes into a directory: look, publish what is due, say what became of it.

It polls. On NFS and FUSE, where trainers of a cluster write, inotify tells nothing of what another host did; what is
complete without a mark shows in time only; and a look costs three `stat` for each of the latest directories. Everything
that must be right after a restart is read back from what was published, so this keeps nothing on disk.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event

from msgspec import Struct
from msgspec.structs import replace

from adaptersync.trainer.arrivals import Arrivals, Last, Layout, Sighting
from adaptersync.trainer.publication import Publication
from adaptersync.trainer.publisher import AdapterPublisher
from adaptersync_core.errors import AdapterInvalid, AdapterSyncError, ControlError, Fenced, StoreError
from adaptersync_core.manifest import FILES, content_digest, hash_file, inspect

AGAIN = "write it again: it is looked at whenever it changes"
LATEST = 256  # directories looked at each time, by step; beyond them only what is new
UNDECIDED = 16  # versions of which the fleet has not said what became of them; with so many the next one waits
RETRY_S, RETRY_MOST_S = 1.0, 30.0  # after trouble with Redis or the store: at first, and at the last


class News(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that happened. `what`: published, repeated (it was published before), passed (over), bad, waiting,
    trouble (to be tried again), or the outcome of a version: current, superseded, rolled_back, voided.

    `fix` says what to do, `count` of how many directories it is told at once.
    """

    what: str
    directory: str = ""
    step: int | None = None
    version: str = ""
    reason: str = ""
    fix: str = ""
    count: int = 1


class Watch:
    """One directory, and the run into which it is published. `tell` is called with each thing that happens, once."""

    def __init__(
        self,
        publisher: AdapterPublisher,
        directory: Path,
        layout: Layout,
        tell: Callable[[News], None],
        *,
        settle_s: float,
        everything: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._publisher = publisher
        self._directory = directory
        self._layout = layout
        self._tell = tell
        self._clock = clock
        newest = publisher.newest()
        last = None
        if newest is not None:
            step = -1 if newest.step is None else newest.step
            last = Last(step=step, written_ns=int(newest.created_at * 1e9))
        self._arrivals = Arrivals(marked=bool(layout.complete), settle_s=settle_s, last=last, everything=everything)
        self._names: set[str] = set()
        self._undecided: dict[str, tuple[Publication, News]] = {}
        self._said: tuple[str, str] | None = None  # the last waiting or trouble, so that it is told once
        self._came = False
        self._not_before, self._pause_s = 0.0, 0.0  # after trouble

    @property
    def busy(self) -> bool:
        """Whether the fleet is still at a version, or a directory is being written."""
        return bool(self._undecided or self._arrivals.waiting())

    def run(self, stop: Event, *, interval_s: float) -> None:
        """Until `stop` is set. Raises what repeating does not help against, as a newer trainer of the run."""
        while not stop.is_set():
            self.look(stop)
            stop.wait(interval_s)

    def look(self, stop: Event) -> None:
        """Publish what is due now, one after the other."""
        while not stop.is_set():
            self._outcomes()
            if self._clock() < self._not_before:
                return
            if len(self._undecided) >= UNDECIDED:
                self._once("waiting", f"the fleet has not decided on {UNDECIDED} versions", "see adaptersync status")
                return
            try:
                here = self._sightings()
            except OSError as error:
                self._once("waiting", f"{self._above} cannot be read: {error.strerror}", "check path and permissions")
                return
            one, passed = self._arrivals.due(here, self._clock())
            self._pass_over(passed)
            if one is None:
                self._explain(here)
                return
            if not self._publish(one):
                return

    def _publish(self, one: Sighting) -> bool:
        """Whether the next may be looked for at once."""
        place = self._place(one)
        try:
            inspect(place)
            digest = content_digest(tuple(hash_file(place / name) for name in FILES))
            before = self._publisher.find(digest, one.step)
            publication = None if before else self._publisher.publish(place, step=one.step)
        except (AdapterInvalid, OSError) as error:
            return self._failed(one, error)
        except Fenced:
            raise
        except (ControlError, StoreError) as error:
            self._once("trouble", *_told(error), one)
            self._pause_s = min(max(2 * self._pause_s, RETRY_S), RETRY_MOST_S)
            self._not_before = self._clock() + self._pause_s
            return False
        self._said, self._pause_s, self._came = None, 0.0, True
        if publication is None:
            self._arrivals.repeated(one)
            self._tell(self._news("repeated", one, version=before))
            return True
        self._arrivals.published(one)
        news = self._news("published", one, version=publication.adapter_id, reason=publication.manifest.noop)
        self._undecided[publication.adapter_id] = publication, news
        self._tell(news)
        return True

    def _failed(self, one: Sighting, error: AdapterInvalid | OSError) -> bool:
        fleeting = not isinstance(error, AdapterInvalid)
        if self._see(one.name, one.step) != one or not self._arrivals.failed(one, self._clock(), fleeting=fleeting):
            return False  # it is gone, or still on its way
        reason, fix = _told(error)
        self._tell(self._news("bad", one, reason=reason, fix=fix or AGAIN))
        return True

    def _outcomes(self) -> None:
        for name, (publication, news) in list(self._undecided.items()):
            if (outcome := publication.outcome) is not None:
                del self._undecided[name]
                self._tell(replace(news, what=outcome.state, reason=outcome.reason))

    def _pass_over(self, passed: list[Sighting]) -> None:
        if not passed:
            return
        self._came = True
        reason = "neither a later step nor written later than what was published"
        last = self._news("passed", passed[-1], reason=reason)
        self._tell(replace(last, count=len(passed)))

    def _explain(self, here: list[Sighting]) -> None:
        """Say why nothing comes, as long as nothing did."""
        if self._came:
            return
        mark = self._layout.complete
        if not here:
            self._once("waiting", f"nothing in {self._directory} is called {self._layout.pattern}", "check --pattern")
        elif mark and not any(one.mark_ns for one in here):
            self._once("waiting", f"none of {len(here)} directories has {mark}", "check --complete")

    def _once(self, what: str, reason: str, fix: str, one: Sighting | None = None) -> None:
        kind = what, reason.partition(" (")[0]  # a number of the next attempt is no news
        if kind != self._said:
            self._said = kind
            self._tell(
                self._news(what, one, reason=reason, fix=fix) if one else News(what=what, reason=reason, fix=fix)
            )

    def _news(self, what: str, one: Sighting, *, version: str = "", reason: str = "", fix: str = "") -> News:
        place = str(self._place(one))
        return News(what=what, directory=place, step=one.step, version=version, reason=reason, fix=fix)

    # what is on the disk

    @property
    def _above(self) -> Path:
        return self._directory / self._layout.above

    def _place(self, one: Sighting) -> Path:
        return self._above / one.name / self._layout.below

    def _sightings(self) -> list[Sighting]:
        """The latest directories, those that were not seen before, and those that are not dealt with."""
        steps = {name: step for name in os.listdir(self._above) if (step := self._layout.step(name)) is not None}
        chosen = set(sorted(steps, key=lambda name: -steps[name])[:LATEST])
        chosen |= (steps.keys() - self._names) | (steps.keys() & self._arrivals.open())
        self._names = set(steps)
        return [one for name in chosen if (one := self._see(name, steps[name])) is not None]

    def _see(self, name: str, step: int) -> Sighting | None:
        """None where no adapter's directory is (any more)."""
        step_directory = self._above / name
        place = step_directory / self._layout.below
        files = tuple(_stat(place / file) for file in FILES)
        if not any(files) and not place.is_dir():
            return None
        mark = _stat(step_directory / self._layout.complete) if self._layout.complete else None
        return Sighting(
            name=name,
            step=step,
            files=files,
            written_ns=max(file[1] for file in files if file) if any(files) else 0,
            mark_ns=mark[1] if mark else 0,
        )


def _stat(path: Path) -> tuple[int, int] | None:
    """Size, and when it was written; None where there is nothing. What may not be looked at fails when it is read."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError:
        return -1, 0
    return found.st_size, found.st_mtime_ns


def _told(error: AdapterSyncError | OSError) -> tuple[str, str]:
    """Reason, and what to do about it."""
    if isinstance(error, PermissionError):
        return f"may not be read: {error.filename}", "run as the trainer's user, or give its group the files"
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'}: {error.strerror or error}", ""
    about = "".join(f" {name}={value}" for name, value in error.ids.items())
    return f"{error.reason} ({about.strip()})" if about else error.reason, error.next_step
