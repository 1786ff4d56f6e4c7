"""Everything that happens, as one struct each: the entries of the group's `events` stream.

An entry's fields are flat text: `redis-cli XRANGE` alone tells what happened. Events wake loops and inform people;
truth is in the records they speak of. Fields may be added with defaults; unknown fields are ignored.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from msgspec import Struct


class Event(Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all events. Times and durations are seconds; a version is its adapter id."""


class RunBegan(Event, frozen=True, kw_only=True, tag="run.began"):
    """A trainer began an incarnation of a run; older epochs are fenced off."""

    run: str
    epoch: int
    seq: int
    max_staleness: int
    trainer: str = ""


class RunEnded(Event, frozen=True, kw_only=True, tag="run.ended"):
    """A trainer closed its run, or an operator with a reason: nothing more comes, until another begins it again."""

    run: str
    epoch: int
    reason: str = ""


class AdapterPublished(Event, frozen=True, kw_only=True, tag="adapter.published"):
    """A version's files are in the store and its manifest can be read. `published_at` is the trainer's wall clock.

    `stored_s` was spent between the digest and this: on a number, the store, and the fast lane. `traceparent` is the
    publication's span, where it is traced.
    """

    version: str
    run: str
    seq: int
    epoch: int
    digest: str
    size: int
    rank: int
    noop: bool
    step: int | None = None
    published_at: float = 0.0
    stored_s: float | None = None
    traceparent: str = ""


class VersionStaging(Event, frozen=True, kw_only=True, tag="version.staging"):
    """The coordinator asks the fleet to load a version; `replicas` must answer."""

    version: str
    generation: int
    replicas: str


class ReplicaAcked(Event, frozen=True, kw_only=True, tag="replica.acked"):
    """A replica loaded a version, or refused it with a reason; `fault` is "replica" where that is its own.

    The phases follow each other without a gap, and this is said at their end. `visible_s` is until the mount showed it.
    """

    version: str
    replica: str
    engine_epoch: str
    accepted: bool
    proof: str = "not probed"
    reason: str = ""
    fault: str = ""
    visible_s: float | None = None
    staged_s: float | None = None
    verified_s: float | None = None
    loaded_s: float | None = None
    proved_s: float | None = None


TAKEN_UP = "taken up"  # a version's phase from its announcement on: those before it come first
PHASES = ("visible_s", "staged_s", "verified_s", "loaded_s", "proved_s")  # of an ack, in their order


class VersionReady(Event, frozen=True, kw_only=True, tag="version.ready"):
    """Every ready replica serves the version; it waits at the gate until an operator admits or refuses it."""

    version: str
    generation: int
    replicas: str


class VersionHeld(Event, frozen=True, kw_only=True, tag="version.held"):
    """The gate's function could not say, or did not in time: the version goes on waiting, for an operator."""

    version: str
    generation: int
    reason: str


class VersionPromoted(Event, frozen=True, kw_only=True, tag="version.promoted"):
    """Every ready replica serves the version; it is current from here on. `waited_s` counts from publication."""

    version: str
    generation: int
    replicas: str
    previous: str = ""
    waited_s: float = 0.0


class VersionSuperseded(Event, frozen=True, kw_only=True, tag="version.superseded"):
    version: str
    generation: int
    reason: str


class VersionRolledBack(Event, frozen=True, kw_only=True, tag="version.rolled_back"):
    version: str
    generation: int
    reason: str


class VersionVoided(Event, frozen=True, kw_only=True, tag="version.voided"):
    """A promoted version was found bad; `current` is what the pointer moved back to."""

    version: str
    generation: int
    reason: str
    current: str


class VersionRetiring(Event, frozen=True, kw_only=True, tag="version.retiring"):
    version: str
    generation: int
    reason: str


class VersionRetired(Event, frozen=True, kw_only=True, tag="version.retired"):
    """No replica holds the version any more."""

    version: str
    generation: int


class VersionVerified(Event, frozen=True, kw_only=True, tag="version.verified"):
    """The stored bytes were read again; `ok` is false when they differ from the manifest."""

    version: str
    ok: bool
    reason: str = ""


class ReplicaState(Event, frozen=True, kw_only=True, tag="replica.state"):
    """A replica is joining, ready, draining, ejected or gone, and why."""

    replica: str
    state: str
    generation: int
    reason: str = ""
    engine_epoch: str = ""


class CoordinatorElected(Event, frozen=True, kw_only=True, tag="coordinator.elected"):
    coordinator: str
    token: int
    incarnation: str


class ControlRestored(Event, frozen=True, kw_only=True, tag="control.restored"):
    """Redis had lost state, or stood at an older one; it was rebuilt from journal and store."""

    incarnation: str
    generation: int


class RequestRefused(Event, frozen=True, kw_only=True, tag="request.refused"):
    """What an operator asked for cannot be done."""

    request: str
    reason: str


AnyEvent = (
    RunBegan
    | RunEnded
    | AdapterPublished
    | VersionStaging
    | ReplicaAcked
    | VersionReady
    | VersionHeld
    | VersionPromoted
    | VersionSuperseded
    | VersionRolledBack
    | VersionVoided
    | VersionRetiring
    | VersionRetired
    | VersionVerified
    | ReplicaState
    | CoordinatorElected
    | ControlRestored
    | RequestRefused
)

# Said to the coordinator: the table is as it was before. Whoever waits for the table alone need not look at it for each
# of them, which would be every replica for the ack of every other.
REPORTS = frozenset({"run.began", "run.ended", "adapter.published", "replica.acked", "version.verified"})


def to_fields(event: Event) -> list[str]:
    """Field, value, field, value, ... as a stream entry holds them; what is None, or empty by default, is left out."""
    fields: list[str] = []
    empty = _empty_by_default(type(event))
    for name, value in msgspec.to_builtins(event).items():
        if value is None or (value == "" and name in empty):
            continue
        fields += name, _text(value)
    return fields


@functools.cache
def _empty_by_default(kind: type[Event]) -> frozenset[str]:
    return frozenset(field.name for field in msgspec.structs.fields(kind) if field.default == "")


def from_fields(fields: dict[str, str]) -> AnyEvent:
    """The event of a stream entry; msgspec.ValidationError when it is none."""
    event: AnyEvent = msgspec.convert(fields, type=AnyEvent, strict=False)
    return event


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6f}".rstrip("0").rstrip(".") if abs(value) < 1e15 else repr(value)
    return str(value)
