"""Phases of versions as a router tells Prometheus of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from adaptersync.router.metrics import Metrics
from adaptersync.router.version_phases import FOLLOWED, VersionPhases
from adaptersync_core.errors import ControlUnavailable
from adaptersync_core.events import (
    AdapterPublished,
    Event,
    ReplicaAcked,
    VersionPromoted,
    VersionReady,
    VersionStaging,
    to_fields,
)
from adaptersync_core.manifest import Manifest
from adaptersync_core.registry import Registry
from support.artifacts import manifest_of, small_adapter

V = "run-v1-0123456789ab"


class Manifests(Registry):
    def __init__(self, manifest: Manifest | None) -> None:
        self._manifest = manifest

    async def manifest(self, adapter_id: str) -> Manifest | None:
        if self._manifest is None:
            raise ControlUnavailable("away")
        return self._manifest


class Told:
    """The events of a version as a router hears of them; moments are seconds since it was announced."""

    def __init__(self, manifest: Manifest | None = None) -> None:
        self.metrics = Metrics()
        self.phases = VersionPhases(self.metrics, Manifests(manifest))

    async def see(self, *events: tuple[float, Event]) -> None:
        for at, event in events:
            said: Iterator[str] = iter(to_fields(event))
            await self.phases.see(1000.0 + at, dict(zip(said, said, strict=True)), now=at)

    def took(self, name: str = "version_phase_seconds") -> dict[tuple[str, ...], tuple[int, Any]]:
        found = self.metrics.figures.histograms[name]
        return {labels: (sum(each.counts), pytest.approx(each.sum, abs=1e-6)) for labels, each in found.items()}


def published(version: str = V) -> Event:
    return AdapterPublished(
        version=version, run="run", seq=1, epoch=1, digest="", size=1, rank=1, noop=False, stored_s=0.2
    )


def acked(replica: str, *, accepted: bool = True) -> Event:
    took = {"visible_s": 0.0, "staged_s": 0.1, "verified_s": 0.1, "loaded_s": 0.5, "proved_s": 0.3}
    return ReplicaAcked(version=V, replica=replica, engine_epoch="1", accepted=accepted, **took)  # type: ignore[arg-type]


STAGING = VersionStaging(version=V, generation=1, replicas="a b")
PROMOTED = VersionPromoted(version=V, generation=2, replicas="a b")


async def test_each_phase_is_told_once_by_version_or_by_replica(tmp_path: Path) -> None:
    timings = {"step_s": 4.0, "gather_s": 0.1, "save_s": 0.2, "hashed_s": 0.05, "rollout_wait_s": 3.0}
    told = Told(replace(manifest_of(small_adapter(tmp_path)), timings=timings))
    await told.see((0.0, published()), (0.3, STAGING), (1.5, acked("a")), (2.0, acked("b")), (2.1, PROMOTED))
    told.phases.answered(V, 2.6)
    told.phases.answered(V, 2.8)  # no first one any more
    assert told.took() == {
        ("step",): (1, 4.0),
        ("gather",): (1, 0.1),
        ("save",): (1, 0.2),
        ("digest",): (1, 0.05),
        ("publish",): (1, 0.2),
        ("taken up",): (1, 0.3),
        ("committed",): (1, 0.1),  # by the slowest
        ("first token",): (1, 0.5),
    }
    by_replica = told.took("replica_phase_seconds")
    assert by_replica.keys() == {
        (name, phase)
        for name in ("a", "b")
        for phase in ("noticed", "visible", "staged", "verified", "loaded", "proved")
    }
    assert (by_replica["a", "noticed"], by_replica["b", "noticed"]) == ((1, 0.2), (1, 0.7))
    assert by_replica["a", "loaded"] == (1, 0.5)


async def test_a_wait_at_the_gate_is_no_part_of_the_commit() -> None:
    told = Told()
    ready = VersionReady(version=V, generation=2, replicas="a b")
    await told.see((0.0, published()), (0.3, STAGING), (1.5, acked("a")), (1.6, ready), (9.6, PROMOTED))
    assert told.took() == {
        ("publish",): (1, 0.2),  # of its trainer nobody could ask
        ("taken up",): (1, 0.3),
        ("committed",): (1, 0.1),
        ("gate",): (1, 8.0),
    }


async def test_who_comes_later_took_its_phases_but_kept_nobody_waiting() -> None:
    told = Told()
    await told.see((0.0, published()), (0.3, STAGING), (1.5, acked("a")), (2.0, PROMOTED), (60.0, acked("b")))
    await told.see((61.0, acked("c", accepted=False)))
    by_replica = told.took("replica_phase_seconds")
    assert by_replica["b", "loaded"] == (1, 0.5)
    assert ("b", "noticed") not in by_replica
    assert not any(name == "c" for name, _ in by_replica)


async def test_what_began_before_this_router_is_counted_from_where_it_was_heard_of() -> None:
    told = Told()
    await told.see((0.3, STAGING), (1.5, acked("a")), (2.0, PROMOTED))
    assert told.took().keys() == {("committed",)}
    await told.phases.see(1003.0, {"type": "of.another.release", "version": V}, now=3.0)


async def test_versions_that_come_to_nothing_are_forgotten() -> None:
    told = Told()
    for seq in range(FOLLOWED + 2):
        await told.see((0.0, published(f"run-v{seq}-0123456789ab")))
    assert len(told.phases._ways) == FOLLOWED
