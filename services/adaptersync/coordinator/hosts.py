"""What each host was asked to run beside what it runs, as agents, routers and the queue tell it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from adaptersync_core.records import Fleet
from adaptersync_core.scaling import Scale


class Placed(Protocol):
    @property
    def replica(self) -> str: ...
    @property
    def state(self) -> str: ...


class HostView(Struct, frozen=True, kw_only=True):
    """Replicas by state, `other` being those that are ejected, or not taken in yet. What was never asked for is None,
    and so is `workers` for who may not read the queue."""

    host: str
    keeper: str
    desired: int | None
    joining: int
    ready: int
    draining: int
    other: int
    routers: int
    routers_desired: int | None
    workers: int | None
    workers_desired: int | None

    @property
    def settled(self) -> bool:
        """Whether it runs what it was asked to, and nothing is on its way in or out."""
        there = (self.ready, self.routers, self.workers)
        asked = (self.desired, self.routers_desired, self.workers_desired)
        as_asked = not any(differ(*pair) for pair in zip(asked, there, strict=True))
        return as_asked and not (self.joining or self.draining or self.other)


def hosts(
    fleet: Fleet, replicas: Sequence[Placed], scales: Mapping[str, Scale], workers: Mapping[str, int] | None
) -> Iterator[HostView]:
    """Every host that was spoken of, or speaks."""
    at = {name: seen.report.host for name, seen in fleet.replicas.items()}
    states: dict[str, Counter[str]] = {}
    for each in replicas:
        states.setdefault(at.get(each.replica, ""), Counter())[each.state] += 1
    # each process of a router reports, and so does a new one beside what was killed: they are one by their address
    listening = {(seen.report.host, seen.report.url) for seen in fleet.routers.values() if seen.may_serve}
    routers = Counter(host for host, _ in listening)
    for host in sorted({*scales, *states, *routers, *(workers or {})} - {""}):
        scale, mine = scales.get(host), states.get(host, Counter())
        yield HostView(
            host=host,
            keeper=scale.keeper if scale else "",
            desired=scale.replicas if scale else None,
            joining=mine["joining"],
            ready=mine["ready"],
            draining=mine["draining"],
            other=mine.total() - mine["joining"] - mine["ready"] - mine["draining"],
            routers=routers[host],
            routers_desired=scale.routers if scale else None,
            workers=None if workers is None else workers.get(host, 0),
            workers_desired=scale.workers if scale else None,
        )


def host_problems(hosts: Sequence[HostView]) -> Iterator[str]:
    """Hosts that run too few, or too many. What drains is on its way; a worker that was killed counts for a while."""
    for each in hosts:
        workers = each.workers if each.workers is None else min(each.workers, each.workers_desired or 0)
        for what, desired, there in (
            ("replicas", each.desired, each.joining + each.ready + each.other),
            ("routers", each.routers_desired, each.routers),
            ("workers", each.workers_desired, workers),
        ):
            if differ(desired, there):
                yield f"{each.host} is to run {desired} {what}, and runs {there} (adaptersync scale)"


def differ(desired: int | None, there: int | None) -> bool:
    """Nothing differs from what was never asked for, nor does what may not be known."""
    return desired is not None and there is not None and desired != there
