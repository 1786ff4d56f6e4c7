"""What the events tell, and whether an answer was right by them. Pure: no clock, no network.

Independent of the services on purpose: knows the events and the promises, and shares no rule with the coordinator.
Times are milliseconds of the control server's clock, which is also that of this host.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from adaptersync_core.events import (
    AdapterPublished,
    ControlRestored,
    ReplicaAcked,
    VersionPromoted,
    VersionRetired,
    VersionRetiring,
    VersionRolledBack,
    VersionSuperseded,
    VersionVoided,
)

CLOCK_MS = 50.0  # how far two readings of one clock may be apart
WITHDRAWN = frozenset({404, 409, 410})
_NUMBER = re.compile(r"(?P<run>.+)@v(?P<seq>\d+)")

Speak = Callable[[str, Sequence[int], int, int], list[int]]  # version, prompt, limit, seed -> tokens


class Violation(Struct, frozen=True, kw_only=True):
    """A promise that was not kept. `at` is wall time in seconds."""

    kind: str
    what: str
    at: float


class Rollout(Struct, frozen=True, kw_only=True):
    """One request and its answer; status 0 is no answer. Times are wall time in seconds."""

    asked: str
    prompt: tuple[int, ...]
    seed: int
    limit: int
    sent_at: float
    got_at: float
    status: int
    request_id: str = ""
    version: str = ""
    model: str = ""
    replica: str = ""
    tokens: tuple[int, ...] = ()
    reason: str = ""


class History:
    """Fates of versions in the order of the events. `late_ms` is how long a router may serve from an older table.

    The last decision before Redis lost something may be lost with it, unless it was a refusal: what it promoted may be
    promoted once more, what it withdrew served again. Everything before it must hold.
    """

    def __init__(self, *, late_s: float, speak: Speak) -> None:
        self._late_ms = late_s * 1000
        self._speak = speak
        self.promoted: dict[str, float] = {}
        self.withdrawn: dict[str, float] = {}  # retiring or voided: nothing new from here on
        self.refused: dict[str, str] = {}  # rolled back or superseded
        self.names: dict[tuple[str, int], str] = {}
        self.voided: set[str] = set()
        self._gone: set[str] = set()
        self._acked: set[tuple[str, str]] = set()
        self.generation = 0  # the highest that was heard of
        self._latest: list[str] = []  # versions that the decisions of that generation speak of
        self._unclear: set[str] = set()

    def lost(self) -> None:
        """Redis was emptied or set back; every event up to then was added."""
        self._unclear.update(self._latest)

    def add(self, at_ms: float, event: Any) -> list[Violation]:
        """Take in the next event; what it shows to be broken."""
        found: list[str] = []
        self._follow(event)
        match event:
            case AdapterPublished():
                known = self.names.setdefault((event.run, event.seq), event.version)
                if known != event.version:
                    found.append(f"number reused: {known} and {event.version}")
            case ReplicaAcked():
                if event.accepted:
                    self._acked.add((event.replica, event.version))
                else:
                    self._acked.discard((event.replica, event.version))
            case VersionPromoted():
                found += self._promoted(at_ms, event)
            case VersionRetiring():
                self._withdrawn(event.version, at_ms)
            case VersionVoided():
                self._withdrawn(event.version, at_ms)
                self.voided.add(event.version)
                if event.current in self.voided or event.current in self.refused:
                    found.append(f"went back to what was refused: {event.current}")
            case VersionRolledBack() | VersionSuperseded():
                if event.version in self.promoted and event.version not in self._unclear:
                    found.append(f"refused after it was promoted: {event.version}")
                self.refused[event.version] = event.reason
            case VersionRetired():
                self._gone.add(event.version)
        return [Violation(kind="protocol", what=what, at=at_ms / 1000) for what in found]

    def _follow(self, event: Any) -> None:
        """Keep which versions the latest decision was about."""
        generation = getattr(event, "generation", 0)
        if isinstance(event, ControlRestored) or generation > self.generation:
            self.generation, self._latest = generation, []
        if generation == self.generation and generation and hasattr(event, "version"):
            self._latest.append(event.version)

    def _withdrawn(self, version: str, at_ms: float) -> None:
        if version in self._unclear:
            self._unclear.discard(version)
            self.withdrawn.pop(version, None)
        self.withdrawn.setdefault(version, at_ms)

    def _promoted(self, at_ms: float, event: VersionPromoted) -> list[str]:
        found = []
        if event.version in self.promoted and event.version not in self._unclear:
            found.append(f"promoted twice: {event.version}")
        self._unclear.discard(event.version)
        if event.version in self.voided:
            found.append(f"was voided and came back: {event.version}")
        if event.version in self.refused or event.version in self._gone:
            found.append(f"came back: {event.version}")
        for replica in event.replicas.split():
            if (replica, event.version) not in self._acked:
                found.append(f"promoted without the word of {replica}: {event.version}")
        self.promoted.setdefault(event.version, at_ms)
        return found

    def judge(self, rollout: Rollout) -> list[Violation]:
        """What is wrong with an answer; every event up to its arrival must have been added."""
        if rollout.status == 200:
            kind, found = "answer", self._answered(rollout)
        else:
            kind, found = "refusal", self._refused(rollout)
        return [Violation(kind=kind, what=f"{what} ({_about(rollout)})", at=rollout.got_at) for what in found]

    def _answered(self, rollout: Rollout) -> list[str]:
        version, found = rollout.version, []
        if rollout.model != version:
            found.append(f"header and body name two versions: {version} and {rollout.model}")
        if not self._asked_for(rollout.asked, version):
            found.append(f"another version than asked for: {version}")
        promoted, withdrawn = self.promoted.get(version), self.withdrawn.get(version)
        if promoted is None or promoted > rollout.got_at * 1000 + CLOCK_MS:
            found.append(f"served before it was promoted: {version}")
        unclear = version in self._unclear and version not in self.voided
        if withdrawn is not None and not unclear and rollout.sent_at * 1000 > withdrawn + self._late_ms + CLOCK_MS:
            found.append(f"served after it was withdrawn: {version}")
        if tuple(self._speak(version, rollout.prompt, rollout.limit, rollout.seed)) != rollout.tokens:
            found.append(f"tokens are not those of the version's weights: {version}")
        return found

    def _refused(self, rollout: Rollout) -> list[str]:
        """A version that is valid all the time may be unavailable for a moment, and is never called gone."""
        if rollout.status not in WITHDRAWN:
            return []
        version = self._named(rollout.asked)
        if version is None:
            return [f"a run was refused with {rollout.status}: {rollout.reason}"]
        promoted, withdrawn = self.promoted.get(version), self.withdrawn.get(version)
        if version in self._unclear:
            return []
        if promoted is None or promoted > rollout.sent_at * 1000 - CLOCK_MS:
            return []
        if withdrawn is not None and withdrawn < rollout.got_at * 1000 + CLOCK_MS:
            return []
        return [f"a valid version was refused with {rollout.status}: {rollout.reason}"]

    def _named(self, asked: str) -> str | None:
        """The version a name stands for by itself; None for a run."""
        if found := _NUMBER.fullmatch(asked):
            return self.names.get((found["run"], int(found["seq"])), "")
        return asked if re.search(r"-v\d+-[0-9a-f]{12}$", asked) else None

    def _asked_for(self, asked: str, version: str) -> bool:
        named = self._named(asked)
        return version == named if named is not None else version.startswith(f"{asked}-v")


def _about(rollout: Rollout) -> str:
    return f"asked={rollout.asked} replica={rollout.replica} request={rollout.request_id} sent={rollout.sent_at:.3f}"
