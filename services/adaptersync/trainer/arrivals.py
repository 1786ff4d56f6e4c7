"""Which directories of another trainer are to be published, and in which order: rules without a disk and a clock.

A directory is complete when its mark is there and not older than the adapter, or, without a mark, when the adapter has
not changed for a settle time; whether it can be served is seen when it is published. It is new when its step is higher
than that of what was published last, or when it was written later: a trainer that goes back to a checkpoint writes
lower steps again. Nothing here is needed to be right after a restart but what was published last.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property

from msgspec import Struct

from adaptersync_core.errors import ConfigError

STEP = "{step}"
STEP_DIGITS = "[0-9]{1,18}"


class Layout(Struct, frozen=True, kw_only=True, dict=True):
    """How a trainer lays out what it writes.

    `pattern` is the path of the adapter below the directory that is watched, with `{step}` once: step_{step},
    checkpoint-{step}, step_{step}/adapter. `complete` is a file beside or below what has the step in its name, which
    the trainer writes last; empty when it leaves no such mark.
    """

    pattern: str
    complete: str = ""

    def __post_init__(self) -> None:
        for path in (self.pattern, self.complete):
            if path.startswith("/") or ".." in path.split("/"):
                raise ConfigError("path must be relative, and lead down", next_step="leave out / and ..", path=path)
        if self.pattern.count(STEP) != 1 or not self.pattern.strip("/"):
            raise ConfigError(
                "pattern does not say where the step is",
                next_step="write {step} once, as in step_{step} or checkpoint-{step}/adapter",
                pattern=self.pattern,
            )

    @cached_property
    def _parts(self) -> tuple[str, str, str]:
        """What is above the name with the step, that name, and what is below it."""
        parts = [part for part in self.pattern.split("/") if part not in ("", ".")]
        here = next(number for number, part in enumerate(parts) if STEP in part)
        return "/".join(parts[:here]), parts[here], "/".join(parts[here + 1 :])

    @property
    def above(self) -> str:
        return self._parts[0]

    @property
    def below(self) -> str:
        return self._parts[2]

    @cached_property
    def _name(self) -> re.Pattern[str]:
        before, _, after = self._parts[1].partition(STEP)
        return re.compile(f"{re.escape(before)}({STEP_DIGITS}){re.escape(after)}")

    def step(self, name: str) -> int | None:
        """The step in a name; None for what is not the trainer's."""
        found = self._name.fullmatch(name)
        return int(found[1]) if found else None


PRESETS = {
    "prime-rl": Layout(pattern="step_{step}", complete="STABLE"),
    "trl": Layout(pattern="checkpoint-{step}", complete="trainer_state.json"),
}
"""`trainer_state.json` is the last file of a transformers checkpoint; it is not written under another name first."""


class Sighting(Struct, frozen=True, kw_only=True):
    """One directory as it was seen. `files` changes whenever one of the adapter's files was written again.

    `written_ns` is when the adapter was, by the clock of what it is on; `mark_ns` when its mark was, 0 without one.
    """

    name: str
    step: int
    files: tuple[tuple[int, int] | None, ...]
    written_ns: int = 0
    mark_ns: int = 0


class Last(Struct, frozen=True, kw_only=True):
    """What of the run was published last. `step` is -1 where none was named."""

    step: int
    written_ns: int


class _Known(Struct, kw_only=True):
    """`since` is when the files were first seen as they are, `failed_at` when they first could not be published; `done`
    says that they are dealt with.

    `overtaken` is one that a later step was published before: should it ever be complete, it is no way back.
    """

    seen: Sighting
    since: float
    failed_at: float | None = None
    done: bool = False
    overtaken: bool = False


class Arrivals:
    """What is due of the directories that are there. It remembers as many as it was shown last.

    `marked`: the trainer leaves marks. `everything`: of those of the first look all are published, not the newest only.
    """

    def __init__(self, *, marked: bool, settle_s: float, last: Last | None, everything: bool) -> None:
        self.last = last
        self._marked = marked
        self._settle_s = settle_s
        self._known: dict[str, _Known] = {}
        self._looked = False
        self._before: set[str] | None = set() if everything else None  # where to look for the newest; None: all

    def due(self, sightings: Iterable[Sighting], now: float) -> tuple[Sighting | None, list[Sighting]]:
        """The one to publish now, and those that are passed over for good; `now` is monotonic time in seconds."""
        here = sorted(sightings, key=lambda one: (one.step, one.name))
        self._known = {one.name: self._met(one, now) for one in here}
        if not self._looked and self.last:
            for one in here:
                self._known[one.name].overtaken = self._unmarked(one) and one.step < self.last.step
        self._looked = True
        if self._before is None:
            self._before = {one.name for one in here}
        passed: list[Sighting] = []
        if self._before:
            newest, wait = self._first([one for one in reversed(here) if one.name in self._before], now, passed)
            if newest or wait:
                return newest, passed
            self._before = set()
        return self._first(here, now, passed)[0], passed

    def published(self, one: Sighting) -> None:
        """So nothing older is, nor the rest of what was there at first: their times may be those of a copy."""
        self.last = Last(step=one.step, written_ns=one.written_ns)
        for name in self._before or ():
            if name in self._known and self._known[name].seen.step < one.step:
                self._known[name].overtaken = True
        self.repeated(one)

    def repeated(self, one: Sighting) -> None:
        """It need not be published, since it was before; nor what is older."""
        self._before = set()
        for known in self._known.values():
            seen = known.seen
            if seen.step < one.step and (seen.written_ns <= one.written_ns or self._unmarked(seen)):
                known.overtaken = True
        self._known[one.name].done = True

    def failed(self, one: Sighting, now: float, *, fleeting: bool = False) -> bool:
        """It cannot be published as it is. Whether that is final, since nobody has written it for the settle time.

        `fleeting` is a failure that may pass although nobody writes: it is final when it lasts as long.
        """
        known = self._known[one.name]
        known.failed_at = now if known.failed_at is None else known.failed_at
        known.done = now - (known.failed_at if fleeting else known.since) >= self._settle_s
        return known.done

    def open(self) -> set[str]:
        """Names of those that are not dealt with."""
        return {name for name, known in self._known.items() if not known.done}

    def waiting(self) -> set[str]:
        """Of those, the ones that are due as soon as they are what they seem: they have their mark, or need none."""
        return {name for name in self.open() if not self._unmarked(self._known[name].seen)}

    def _met(self, one: Sighting, now: float) -> _Known:
        known = self._known.get(one.name)
        if known is None:
            return _Known(seen=one, since=now)
        if known.seen.files != one.files:
            return _Known(seen=one, since=now, overtaken=known.overtaken and not known.done)
        known.seen = one
        return known

    def _first(self, order: Iterable[Sighting], now: float, passed: list[Sighting]) -> tuple[Sighting | None, bool]:
        """The first that is complete and new; or none, and whether one has to be waited for that comes before."""
        for one in order:
            known = self._known[one.name]
            if known.done or self._unmarked(one):  # which it may stay: a trainer that was killed leaves such
                continue
            if one.mark_ns < one.written_ns and now - known.since < self._settle_s:
                return None, True
            if not known.overtaken and self._new(one):
                return one, False
            known.done, known.overtaken = True, False
            passed.append(one)
        return None, False

    def _unmarked(self, one: Sighting) -> bool:
        return self._marked and not one.mark_ns

    def _new(self, one: Sighting) -> bool:
        return self.last is None or one.step > self.last.step or one.written_ns > self.last.written_ns
