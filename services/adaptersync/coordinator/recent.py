"""What happened lately, kept in memory and bounded: events, the versions they speak of, and figures over time. No I/O.

Fed with entries of the events stream and with looks at the fleet. Times are the control server's clock, in seconds.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from msgspec import Struct
from msgspec.structs import fields as fields_of
from msgspec.structs import replace

from adaptersync.coordinator.phases import Span, Told, VersionPhases, version_phases
from adaptersync_core.errors import NameInvalid
from adaptersync_core.identity import parse_adapter_id
from adaptersync_core.manifest import Manifest
from adaptersync_core.records import Fleet, Traffic
from adaptersync_core.redis import Entry
from adaptersync_core.rollouts import GIVEN_UP, REFUSED, SERVED

EVENTS = 500  # that are shown to who begins to look
VERSIONS = 24  # of which the way to promotion is kept
WORDS = 4096  # events of one version: an ack of each of a few thousand replicas
FIELDS, WORD, TEXT = 32, 64, 2000  # of one event, and characters of a name and of a value: services write far less
STEP_S = 2.0  # between two points of a series
POINTS = 900  # of a series: half an hour
ROUTINGS = ("affinity", "session", "cold", "spill", "local")


class Point(Struct, frozen=True, kw_only=True):
    """The fleet between two looks: rates are a second. None: it is not known, or there is nothing to divide by.

    `refused_s` are requests that were answered with a reason, by a router or a replica, `failed_s` those that the fleet
    owed and did not give. `cached` is the share of prompt tokens that replicas
    had. `imbalance` is the most sequences at one ready replica over their mean. `behind` are versions published and not
    yet current.
    """

    at: float
    requests_s: float | None = None
    refused_s: float | None = None
    failed_s: float | None = None
    prompt_tokens_s: float | None = None
    completion_tokens_s: float | None = None
    cached: float | None = None
    affinity_s: float | None = None
    session_s: float | None = None
    cold_s: float | None = None
    spill_s: float | None = None
    local_s: float | None = None
    in_flight: int = 0
    imbalance: float | None = None
    ready: int = 0
    behind: int = 0


SERIES = tuple(field.name for field in fields_of(Point))


class Happened(Struct, frozen=True, kw_only=True):
    """An entry of the events stream; `bad` when it tells of something that should not be."""

    id: str
    at: float
    type: str
    fields: dict[str, str]

    @property
    def bad(self) -> bool:
        return self.type in ("version.rolled_back", "version.voided", "request.refused") or "false" in (
            self.fields.get("accepted"),
            self.fields.get("ok"),
        )


class Promotion(Struct, frozen=True, kw_only=True):
    """A version's way: `spans` from the step before it to its promotion, by the replica whose word came last.

    `start_s` of a span counts from the announcement, at `at`.
    """

    version: str
    run: str
    at: float
    outcome: str
    reason: str
    step: int | None
    promoted_s: float | None
    slowest: str
    accepted: int
    refused: int
    spans: list[Span]


class _Version:
    """What was said of one version; its way is made from that when somebody asks, and kept until more is said."""

    def __init__(self) -> None:
        self.told: list[Told] = []
        self.manifest: Manifest | None = None
        self.way: Promotion | None = None


class Recent:
    """Feed it with `happened` and `seen`; `clear` it when the stream was lost."""

    def __init__(self, *, step_s: float = STEP_S) -> None:
        self.events: deque[Happened] = deque(maxlen=EVENTS)
        self.points: deque[Point] = deque(maxlen=POINTS)
        self._step_s = step_s
        self._versions: OrderedDict[str, _Version] = OrderedDict()
        self._before: dict[str, Traffic] = {}
        self._before_at: float | None = None

    def clear(self) -> None:
        """Events are read again from the stream; figures over time are not there."""
        self.events.clear()
        self._versions.clear()

    def happened(self, entries: Iterable[Entry]) -> list[Happened]:
        """Take in events, each once and in their order; returns those that are news."""
        news = []
        for entry_id, fields in entries:
            if self.events and order(entry_id) <= order(self.events[-1].id):
                continue
            kept = {name[:WORD]: value[:TEXT] for name, value in islice(fields.items(), FIELDS)}
            each = Happened(id=entry_id, at=order(entry_id)[0] / 1000, type=kept.get("type", "?"), fields=kept)
            self.events.append(each)
            news.append(each)
            self._of_version(each)
        return news

    def after(self, entry_id: str) -> list[Happened]:
        """Events later than that one, as far as they are kept."""
        return [each for each in self.events if order(each.id) > order(entry_id)]

    def unknown(self) -> list[str]:
        """Versions whose manifest was not looked up yet."""
        return [name for name, version in self._versions.items() if version.manifest is None]

    def known(self, manifests: Mapping[str, Manifest | None]) -> None:
        for name, manifest in manifests.items():
            if manifest is not None and name in self._versions:
                version = self._versions[name]
                version.manifest, version.way = replace(manifest, probe=None), None  # a probe may be of any size

    def promotions(self) -> list[Promotion]:
        """Newest first; of versions whose announcement is no longer kept nothing can be said."""
        found = []
        for name, version in reversed(self._versions.items()):
            if version.way is None:
                version.way = _read_way(name, version)
            if version.way is not None:
                found.append(version.way)
        return found

    def seen(self, fleet: Fleet) -> None:
        """A look at the fleet: a point, unless the last one was a moment ago."""
        if self._before_at is not None and fleet.now - self._before_at < self._step_s * 0.9:
            return
        traffic = {name: router.report.traffic for name, router in fleet.routers.items()}
        self.points.append(self._point(fleet, traffic))
        self._before, self._before_at = traffic, fleet.now

    def series(self, since: float = 0.0) -> dict[str, list[float | None]]:
        """One list a figure, all of one length, of points later than `since`."""
        points = [point for point in self.points if point.at > since]
        return {name: [getattr(point, name) for point in points] for name in SERIES}

    def _of_version(self, event: Happened) -> None:
        name = event.fields.get("version")
        if not name:
            return
        version = self._versions.get(name)
        if version is None:
            version = self._versions[name] = _Version()
            while len(self._versions) > VERSIONS:
                self._versions.popitem(last=False)
        if len(version.told) < WORDS or event.type != "replica.acked":
            version.told.append((event.at, event.fields))
            version.way = None
            del version.told[: -2 * WORDS]

    def _point(self, fleet: Fleet, traffic: Mapping[str, Traffic]) -> Point:
        ready = fleet.table.ready()
        at = in_flight(traffic.values())
        on_their_way = sum(entry.state in ("staging", "ready") for entry in fleet.table.versions.values())
        point = Point(
            at=fleet.now,
            in_flight=sum(at.values()),
            imbalance=imbalance(at, ready),
            ready=len(ready),
            behind=on_their_way + sum(map(len, fleet.published.values())),
        )
        if self._before_at is None or fleet.now <= self._before_at:
            return point
        grown = added_up(grown_by(self._before.get(name), now) for name, now in traffic.items())
        return replace(point, **_rates(grown, fleet.now - self._before_at))


def _rates(grown: Traffic, over_s: float) -> dict[str, float | None]:
    fine = (SERVED, *GIVEN_UP, REFUSED)
    prompt, cached = grown.tokens.get("prompt", 0), grown.tokens.get("cached", 0)
    return {
        "requests_s": sum(grown.ended.values()) / over_s,
        "refused_s": grown.ended.get(REFUSED, 0) / over_s,
        "failed_s": sum(count for name, count in grown.ended.items() if name not in fine) / over_s,
        "prompt_tokens_s": prompt / over_s,
        "completion_tokens_s": grown.tokens.get("completion", 0) / over_s,
        "cached": cached / prompt if prompt else None,
        **{f"{name}_s": grown.routed.get(name, 0) / over_s for name in ROUTINGS},
    }


def order(entry_id: str) -> tuple[int, int]:
    """Of a stream's entries. ValueError where it is no id."""
    first, _, second = entry_id.partition("-")
    return int(first), int(second or 0)


def grown_by(before: Traffic | None, now: Traffic) -> Traffic:
    """What was added since. A process that was not seen before, or whose counts fell, counts nothing: when it began to
    count is not known."""
    if before is None or any(now.ended.get(name, 0) < count for name, count in before.ended.items()):
        return Traffic()
    return Traffic(
        ended=_minus(now.ended, before.ended),
        routed=_minus(now.routed, before.routed),
        tokens=_minus(now.tokens, before.tokens),
    )


def added_up(traffic: Iterable[Traffic]) -> Traffic:
    """Of all routers together."""
    ended: dict[str, int] = {}
    routed: dict[str, int] = {}
    tokens: dict[str, int] = {}
    found = list(traffic)
    for each in found:
        for total, part in ((ended, each.ended), (routed, each.routed), (tokens, each.tokens)):
            for name, count in part.items():
                total[name] = total.get(name, 0) + count
    return Traffic(ended=ended, routed=routed, tokens=tokens, at=in_flight(found))


def in_flight(traffic: Iterable[Traffic]) -> dict[str, int]:
    """Sequences by replica, of all routers."""
    at: dict[str, int] = {}
    for each in traffic:
        for name, count in each.at.items():
            at[name] = at.get(name, 0) + count
    return at


def imbalance(at: Mapping[str, int], ready: Sequence[str]) -> float | None:
    """The most sequences at one ready replica over their mean; None when there are none."""
    counts = [at.get(name, 0) for name in ready]
    return max(counts) * len(counts) / sum(counts) if sum(counts) else None


def _minus(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return {name: max(0, count - before.get(name, 0)) for name, count in now.items()}


def _read_way(name: str, version: _Version) -> Promotion | None:
    """None where nothing can be said; who may write events may write nonsense, too, and that ends here."""
    try:
        phases = version_phases(name, version.manifest, version.told, {})
        return None if phases is None else _way(phases, version.told)
    except (LookupError, ValueError, NameInvalid):
        return None


def _way(phases: VersionPhases, told: Sequence[Told]) -> Promotion:
    waited_for = [each for each in phases.replicas if each.replica == phases.slowest] or phases.replicas[:1]
    spans = [*phases.spans, *(span for each in waited_for for span in each.spans)]
    reasons = [
        fields["reason"] for _, fields in told if fields.get("type", "").startswith("version.") and "reason" in fields
    ]
    announced = next(at for at, fields in told if fields.get("type") == "adapter.published")
    return Promotion(
        version=phases.version,
        run=parse_adapter_id(phases.version).run,
        at=announced,
        outcome=phases.outcome,
        reason=reasons[-1] if reasons and phases.outcome not in ("promoted", "staging") else "",
        step=phases.step,
        promoted_s=phases.promoted_s,
        slowest=phases.slowest,
        accepted=sum(each.accepted for each in phases.replicas),
        refused=sum(not each.accepted for each in phases.replicas),
        spans=sorted(spans, key=lambda span: span.start_s),
    )
