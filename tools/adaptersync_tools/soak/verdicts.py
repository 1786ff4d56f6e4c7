"""What the samples of a run come to: each promise with its figure and its bound. Pure.

Memory is judged after a warm-up third of a process's life, by how much it grows in a hundred versions. What Redis holds
of events and ledger is left out, in servers and in their processes: those streams keep an hour, so in less they grow by
design, and the report says by how much. So are the lane, the records of versions and finished jobs: their keys are
counted, and last for ten minutes, thirty days and an hour.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from adaptersync_core.keys import LANE_TTL_S, PROMISES_TTL_S
from adaptersync_core.markers import COUNT as MARKERS
from adaptersync_core.markers import KEPT_S as MARKERS_S
from adaptersync_core.queue import RESULT_TTL_S
from adaptersync_tools.soak.look import Sample
from adaptersync_tools.soak.processes import Process
from adaptersync_tools.soak.trend import Point, growth, warm

MB = 1 << 20
GROWS_MB = 1.5  # in a hundred versions, or
GROWS_SHARE = 0.02  # of what it takes, whichever is more
LEAST_MB = 3.0  # in all: what a process settles by, however few the versions
FEWEST = 6  # points; a process that lived for less is not judged
MORE_FILES, MORE_THREADS = 32, 6  # than in the middle third; connections and threads of a moment come and go
TIDY_S = 60.0 + 30.0  # how often a publisher tidies the store, and how long it may be kept from it
CONTROL, CACHE = "redis-control", "redis-cache"
SESSIONS_S = 2.0  # a client begins no conversation sooner after another


class Bounds(Struct, frozen=True, kw_only=True):
    """What it was set up with. Times are seconds; `every_s` is from one version to the next, over all `runs`."""

    versions: int
    every_s: float
    runs: int
    slots: int
    keep_last: int
    keep_s: float
    session_s: float
    clients: int

    def within(self, seconds: float) -> int:
        """How many versions may have been published in that time."""
        return min(math.ceil(seconds / self.every_s) + self.runs - 1, self.versions)

    @property
    def stored(self) -> int:
        """Versions in the store: those that are kept, those that are served, those since it was tidied last."""
        return self.runs * self.keep_last + self.slots + self.within(TIDY_S)

    @property
    def staged(self) -> int:
        """On an agent's disk; one that was started again counts anew how long it has kept what it finds there."""
        return self.slots + self.within(2 * (self.keep_s + self.every_s))

    @property
    def markers(self) -> int:
        return MARKERS * (self.within(MARKERS_S + TIDY_S) + 1)

    @property
    def keys(self) -> dict[str, int]:
        """Of kinds that may have more than a few; those that last for days are one a version."""
        return {
            "manifest:*": self.versions,
            "version:*": self.versions,
            "verified:*": self.versions,
            "promises:*": self.slots + self.within(PROMISES_TTL_S) + 1,
            "owned:*": self.slots + 1,
            "lane:*": 2 * self.within(LANE_TTL_S),
            "session:*": math.ceil(self.clients * self.session_s / SESSIONS_S),
            "rq:job:*": self.within(RESULT_TTL_S) + FEW,
            "rq:results:*": self.within(RESULT_TTL_S) + FEW,
        }


FEW = 16  # keys of any other kind


class Check(Struct, frozen=True, kw_only=True):
    what: str
    figure: str
    bound: str
    holds: bool


class Life(Struct, frozen=True, kw_only=True):
    """One process from its first sample to its last; megabytes. `grows` is after the warm-up, in all and per hundred
    versions; None for one that lived too short to be judged."""

    service: str
    role: str
    pid: int
    from_s: float
    to_s: float
    memory: float
    grows: float | None
    grows_100: float | None
    bound: float
    files: tuple[int, int]
    threads: tuple[int, int]
    points: list[Point]

    @property
    def name(self) -> str:
        return f"{self.service} {self.role}".strip()

    @property
    def holds(self) -> bool:
        return self.grows is None or self.grows <= self.bound

    @property
    def leaks(self) -> list[str]:
        """Open files or threads of which there are more and more."""
        found = []
        for what, (before, after), more in (("files", self.files, MORE_FILES), ("threads", self.threads, MORE_THREADS)):
            if self.grows is not None and after > before + more:
                found.append(f"{self.name}: {before} {what}, then {after}")
        return found


def lives(samples: Sequence[Sample]) -> list[Life]:
    """Every process that was seen, by service."""
    seen: defaultdict[tuple[str, str, int], list[tuple[Sample, Process]]] = defaultdict(list)
    for sample in samples:
        for process in sample.processes:
            seen[process.service, process.role, process.pid].append((sample, process))
    return [_life(samples, key, pairs) for key, pairs in sorted(seen.items())]


def _life(samples: Sequence[Sample], key: tuple[str, str, int], pairs: list[tuple[Sample, Process]]) -> Life:
    service, role, pid = key
    points = [
        (sample.at_s, (process.rss - (_apart(sample, service) if service in sample.servers and not role else 0)) / MB)
        for sample, process in pairs
    ]
    judged = warm(points)
    memory = statistics.median(value for _, value in points)
    grows, grows_100, bound = None, None, 0.0
    long_enough = points[-1][0] - points[0][0] >= (samples[-1].at_s - samples[0].at_s) / 4
    if len(judged) >= FEWEST and long_enough:
        grows = growth(judged)
        grows_100, bound = _per_hundred(samples, judged, grows, memory)
    return Life(
        service=service,
        role=role,
        pid=pid,
        from_s=points[0][0],
        to_s=points[-1][0],
        memory=memory,
        grows=grows,
        grows_100=grows_100,
        bound=bound,
        files=_thirds([process.files for _, process in pairs]),
        threads=_thirds([process.threads for _, process in pairs]),
        points=points,
    )


def _apart(sample: Sample, server: str) -> int:
    return sum(sample.servers[server].apart.values())


def _per_hundred(
    samples: Sequence[Sample], judged: Sequence[Point], grows: float, memory: float
) -> tuple[float, float]:
    """Growth in a hundred versions, and the bound of all of it, in megabytes."""
    at = {sample.at_s: sample.published for sample in samples}
    hundreds = (at[judged[-1][0]] - at[judged[0][0]]) / 100
    return (grows / hundreds if hundreds else grows), max(LEAST_MB, max(GROWS_MB, GROWS_SHARE * memory) * hundreds)


def _thirds(values: Sequence[int]) -> tuple[int, int]:
    """Medians of the second third and of the last."""
    third = len(values) // 3
    middle, last = values[third : 2 * third] or values, values[2 * third :]
    return round(statistics.median(middle)), round(statistics.median(last))


def judge(samples: Sequence[Sample], known: Sequence[Life], bounds: Bounds) -> Iterator[Check]:
    """All of what the samples tell."""
    judged = [life for life in known if life.grows is not None]
    yield from _memory(judged, known)
    leaks = [leak for life in judged for leak in life.leaks]
    yield Check(
        what="open files and threads",
        figure="; ".join(leaks) or f"alike in {len(judged)} processes",
        bound=f"last third at most {MORE_FILES} files, {MORE_THREADS} threads above the second",
        holds=not leaks,
    )
    for name in (CONTROL, CACHE):
        yield _used(name, samples)
    yield _most("adapters of one engine", samples, lambda sample: sample.adapters.values(), bounds.slots)
    yield _most("versions in the store", samples, lambda sample: [sample.stored], bounds.stored)
    yield _most("versions on one agent's disk", samples, lambda sample: sample.staged.values(), bounds.staged)
    for name in (CONTROL, CACHE):
        yield _keys(name, samples, bounds)
    yield _most("markers in the store", samples, lambda sample: [sample.markers], bounds.markers)
    left = samples[-1].leftovers
    yield Check(what="half versions in the store", figure=str(left), bound="none at the end", holds=not left)


def _memory(judged: Sequence[Life], known: Sequence[Life]) -> Iterator[Check]:
    worst = max(judged, key=lambda life: (life.grows or 0.0) / life.bound, default=None)
    broken = [life for life in judged if not life.holds]
    told = broken or ([worst] if worst else [])
    yield Check(
        what="memory of every process",
        figure=f"{len(judged)} judged; " + ", ".join(f"{life.name} {life.grows_100:+.2f} MB" for life in told),
        bound=f"{GROWS_MB:g} MB or {GROWS_SHARE:.0%} in 100 versions, or {LEAST_MB:g} MB in all, after a third",
        holds=not broken,
    )
    # else a run in which everything is restarted again and again would show nothing
    left_out = {_sort(life.service) for life in known if not life.role}
    left_out -= {_sort(life.service) for life in judged if not life.role}
    yield Check(
        what="judged",
        figure=f"none of {', '.join(sorted(left_out))}" if left_out else "one of each sort at least",
        bound="every sort of process",
        holds=not left_out,
    )


def _sort(service: str) -> str:
    return re.sub(r"-\d+$", "", service)


def _used(name: str, samples: Sequence[Sample]) -> Check:
    points = warm([(sample.at_s, (sample.servers[name].used - _apart(sample, name)) / MB) for sample in samples])
    grows = growth(points)
    grows_100, bound = _per_hundred(samples, points, grows, statistics.median(value for _, value in points))
    return Check(
        what=f"memory in use, {name}",
        figure=f"{points[-1][1]:.1f} MB, {grows_100:+.2f} MB in 100 versions",
        bound=f"{bound:.1f} MB more after a third; without events, ledger, lane, records",
        holds=grows <= bound,
    )


def _most(what: str, samples: Sequence[Sample], of: Callable[[Sample], Iterable[int]], bound: int) -> Check:
    most = max((value for sample in samples for value in of(sample)), default=0)
    last = max(of(samples[-1]), default=0)
    return Check(what=what, figure=f"at most {most}, at the end {last}", bound=f"{bound}", holds=0 < most <= bound)


def _keys(name: str, samples: Sequence[Sample], bounds: Bounds) -> Check:
    most: dict[str, int] = {}
    for sample in samples:
        for kind, count in sample.servers[name].keys.items():
            most[kind] = max(most.get(kind, 0), count)
    over = {kind: count for kind, count in most.items() if count > bounds.keys.get(kind, FEW)}
    shown = over or {kind: count for kind, count in most.items() if count > 1}
    return Check(
        what=f"keys, {name}",
        figure=", ".join(f"{kind} {count}" for kind, count in sorted(shown.items())) or "one of each kind",
        bound=", ".join(f"{kind} {bounds.keys.get(kind, FEW)}" for kind in sorted(shown)),
        holds=not over,
    )


def served(asked: int, failed: int) -> Check:
    return Check(what="requests", figure=f"{asked} asked, {failed} failed", bound="none", holds=asked > 0 == failed)


def promoted(events: Mapping[str, int], bounds: Bounds) -> Check:
    """Every version was published, and none was found bad; one that a newer one overtook counts as well."""
    published = events.get("adapter.published", 0)
    told = {name: events.get(f"version.{name}", 0) for name in ("promoted", "superseded", "rolled_back", "voided")}
    return Check(
        what="versions",
        figure=", ".join(f"{count} {name}" for name, count in {"published": published, **told}.items()),
        bound=f"{bounds.versions}, none rolled back or voided",
        holds=published == bounds.versions == told["promoted"] + told["superseded"]
        and not told["rolled_back"] + told["voided"],
    )


def undisturbed(trouble: Sequence[str]) -> Check:
    """Nothing ended by itself, everything that was ordered was done, and in the end all came to rest."""
    return Check(
        what="services", figure="; ".join(trouble) or "as ordered, and at rest at the end", bound="", holds=not trouble
    )
