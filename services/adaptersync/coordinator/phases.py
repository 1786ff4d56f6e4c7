"""How long each phase of a version and of a rollout took, from what was kept: events, manifests, ledger. No I/O.

One clock: the control server's, which dates the entries of its streams. What one process measured is a duration by its
own monotonic clock, and is laid backwards from the entry that it was told with: a trainer's phases end where the
version was announced, a replica's where it was acked. No other host's wall clock is believed; a router's is read by
the entries of its rows (`Rollouts`). So a place in time is wrong by half a round trip to the server and the millisecond
of an entry's id, the first token's by up to `GATHERED_S` more. Durations are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from msgspec import Struct

from adaptersync_core.events import PHASES, TAKEN_UP
from adaptersync_core.manifest import Manifest
from adaptersync_core.rollouts import OPEN, SERVED, Row

GATHERED_S = 0.05  # rows wait so long for others before they are written
TRAINER = {
    "step_s": "step",
    "gather_s": "gather",
    "save_s": "save",
    "queued_s": "queued",
    "hashed_s": "digest",
    "stored_s": "publish",
}
REPLICA = ("noticed", *(name.removesuffix("_s") for name in PHASES))
PATH = (*TRAINER.values(), TAKEN_UP, *REPLICA, "committed", "gate", "first token")
ROLLOUT = ("hold", "route", "first token", "decode", "whole answer")
FULL = "router is full"  # how a router begins its reason, when it has all the requests that it may have

Fields = Mapping[str, str]
Told = tuple[float, Fields]  # an event with when it was told, by the server's clock


class Span(Struct, frozen=True, kw_only=True):
    """`start_s` counts from the announcement, so what came before it is negative."""

    phase: str
    start_s: float
    seconds: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.seconds


class ReplicaPhases(Struct, frozen=True, kw_only=True):
    """`acked_s` and `first_token_s` count from the announcement. `late`: its word was not waited for."""

    replica: str
    accepted: bool
    late: bool
    acked_s: float
    spans: list[Span]
    first_token_s: float | None = None


class VersionPhases(Struct, frozen=True, kw_only=True):
    """`slowest` is the replica whose word came last before the version was promoted."""

    version: str
    outcome: str
    step: int | None
    spans: list[Span]
    replicas: list[ReplicaPhases]
    promoted_s: float | None = None
    slowest: str = ""

    def path(self) -> dict[str, float]:
        """What followed each other from the end of the step before to the first token: by the slowest replica."""
        waited_for = [each for each in self.replicas if each.replica == self.slowest]
        return {span.phase: span.seconds for span in [*self.spans, *(s for each in waited_for for s in each.spans)]}


class Share(Struct, frozen=True, kw_only=True):
    """A phase in several: `share` of the sum of all phases named with it."""

    phase: str
    count: int
    p50_s: float
    p95_s: float
    share: float


class RolloutPhases(Struct, frozen=True, kw_only=True):
    """Of the rollouts of one replica."""

    replica: str
    phases: list[Share]


def version_phases(
    version: str, manifest: Manifest | None, events: Sequence[Told], first_tokens: Mapping[str, float]
) -> VersionPhases | None:
    """None where no event says when it was announced. `first_tokens` are moments by replica."""
    times: dict[str, float] = {}
    for at, fields in events:
        times.setdefault(fields.get("type", ""), at)
    announced = times.get("adapter.published")
    if announced is None:
        return None
    staging, promoted = times.get("version.staging"), times.get("version.promoted")
    published = next(fields for _, fields in events if fields.get("type") == "adapter.published")
    spans = _trainer(manifest, published)
    if staging is not None:
        spans.append(_span(TAKEN_UP, 0.0, staging - announced))
    replicas = [
        _replica(
            at - announced,
            fields,
            asked_s=None if staging is None else staging - announced,
            late=promoted is not None and at > promoted,
            first_token_s=first_tokens[name] - announced if name in first_tokens else None,
        )
        for name, (at, fields) in sorted(_first_words(events).items())
    ]
    waited_for = [each for each in replicas if each.accepted and not each.late]
    slowest = max(waited_for, key=lambda each: each.acked_s, default=None) if promoted is not None else None
    if promoted is not None and slowest is not None:
        spans += _committed(slowest.acked_s, promoted - announced, times.get("version.ready"), announced)
        if tokens := [each.first_token_s for each in replicas if each.first_token_s is not None]:
            spans.append(_span("first token", promoted - announced, min(tokens)))
    return VersionPhases(
        version=version,
        outcome=_outcome(times),
        step=manifest.step if manifest else None,
        spans=spans,
        replicas=replicas,
        promoted_s=None if promoted is None else promoted - announced,
        slowest=slowest.replica if slowest else "",
    )


def _trainer(manifest: Manifest | None, published: Fields) -> list[Span]:
    took = dict(manifest.timings) if manifest else {}
    if "stored_s" in published:
        took["stored_s"] = float(published["stored_s"])
    spans: list[Span] = []
    end = 0.0
    for name in reversed(TRAINER):
        if name in took:
            end -= took[name]
            spans.append(Span(phase=TRAINER[name], start_s=end, seconds=took[name]))
    return spans[::-1]


def _first_words(events: Sequence[Told]) -> dict[str, Told]:
    """Of each replica its first yes, or where it never said so its first no. An engine that restarts says it again."""
    words: dict[str, Told] = {}
    for at, fields in events:
        if fields.get("type") == "replica.acked":
            known = words.get(fields["replica"])
            if known is None or (known[1]["accepted"] != "true" and fields["accepted"] == "true"):
                words[fields["replica"]] = at, fields
    return words


def _replica(
    acked_s: float, fields: Fields, *, asked_s: float | None, late: bool, first_token_s: float | None
) -> ReplicaPhases:
    """`asked_s` is when the fleet was asked for the version; who came later was asked then."""
    took = [(name.removesuffix("_s"), float(fields[name])) for name in PHASES if name in fields]
    start = acked_s - sum(seconds for _, seconds in took)
    spans = [] if late or asked_s is None else [_span("noticed", asked_s, start)]
    for phase, seconds in took:
        spans.append(Span(phase=phase, start_s=start, seconds=seconds))
        start += seconds
    return ReplicaPhases(
        replica=fields["replica"],
        accepted=fields["accepted"] == "true",
        late=late,
        acked_s=acked_s,
        spans=spans,
        first_token_s=first_token_s,
    )


def _committed(acked_s: float, promoted_s: float, ready: float | None, announced: float) -> list[Span]:
    if ready is None:
        return [_span("committed", acked_s, promoted_s)]
    ready_s = ready - announced
    return [_span("committed", acked_s, ready_s), _span("gate", ready_s, promoted_s)]


def _span(phase: str, start_s: float, end_s: float) -> Span:
    """Between two moments, each of which may be wrong by a little more than lies between them."""
    return Span(phase=phase, start_s=start_s, seconds=max(0.0, end_s - start_s))


def _outcome(times: Mapping[str, float]) -> str:
    for kind in ("voided", "promoted", "rolled_back", "superseded", "ready", "staging"):
        if f"version.{kind}" in times:
            return kind
    return "published"


def shares(found: Iterable[VersionPhases]) -> list[Share]:
    """Of the way from the step to the first token, over versions that were promoted."""
    took: dict[str, list[float]] = {}
    for each in found:
        if each.slowest:
            for phase, seconds in each.path().items():
                took.setdefault(phase, []).append(seconds)
    return _shares({phase: took[phase] for phase in PATH if phase in took})


def _shares(took: Mapping[str, Sequence[float]]) -> list[Share]:
    total = sum(map(sum, took.values()))
    return [
        Share(
            phase=phase,
            count=len(values),
            p50_s=median(values),
            p95_s=sorted(values)[-(-len(values) * 95 // 100) - 1],
            share=sum(values) / total if total else 0.0,
        )
        for phase, values in took.items()
    ]


class Rollouts:
    """Read rows as they come; of the versions named, keeps what they took, by replica.

    A router's clock is compared with the server's by the rows that it wrote: none is written before its request has
    ended, and of many some are written soon after. Their least distance is the difference of the clocks and what the
    quickest row had to wait, GATHERED_S at most. So no first token is placed earlier than it was.

    A row that was written twice counts twice. One that was sent on from another replica counts in no phase: it holds
    more than one replica's time.
    """

    def __init__(self, versions: Iterable[str]) -> None:
        self._versions = frozenset(versions)
        self._ahead: dict[str, float] = {}  # by router: the server's clock less the router's, at most
        self._first: dict[tuple[str, str, str], float] = {}  # by version, replica and router, on the router's clock
        self._took: dict[str, dict[str, list[float]]] = {}
        self.count = 0
        self.full = 0
        self.held_s = 0.0
        self.total_s = 0.0

    def see(self, at: float, row: Row) -> None:
        if row.outcome == OPEN or row.total_s is None:
            return
        ahead = at - row.started_at - row.total_s
        self._ahead[row.router] = min(ahead, self._ahead.get(row.router, ahead))
        if row.version not in self._versions:
            return
        self.count += 1
        self.full += row.reason.startswith(FULL)
        self.held_s += row.hold_s or 0.0
        self.total_s += row.total_s
        if row.outcome != SERVED or row.attempts != 1 or row.first_byte_s is None:
            return
        hold_s, route_s = row.hold_s or 0.0, row.route_s or 0.0
        first_s = row.first_byte_s if row.first_token_s is None else row.first_token_s
        key = row.version, row.replica, row.router
        moment = row.started_at + hold_s + route_s + first_s
        self._first[key] = min(moment, self._first.get(key, moment))
        took = self._took.setdefault(row.replica, {})
        parts = {"hold": hold_s, "route": route_s}
        if row.first_token_s is None:
            parts["whole answer"] = row.first_byte_s
        else:
            parts |= {"first token": first_s, "decode": max(0.0, row.total_s - hold_s - route_s - first_s)}
        for phase, seconds in parts.items():
            took.setdefault(phase, []).append(seconds)

    def first_tokens(self, version: str) -> dict[str, float]:
        """Moments on the server's clock, by replica; of an answer that came whole, when it came."""
        found: dict[str, float] = {}
        for (name, replica, router), moment in self._first.items():
            if name == version:
                at = moment + self._ahead[router]
                found[replica] = min(at, found.get(replica, at))
        return found

    def phases(self) -> list[RolloutPhases]:
        return [
            RolloutPhases(replica=replica, phases=_shares({phase: took[phase] for phase in ROLLOUT if phase in took}))
            for replica, took in sorted(self._took.items())
        ]
