"""How long each phase of a version took, for Prometheus: from the events that tell of it.

Phases have the names, and begin and end, as in `adaptersync phases`. What a version's trainer took is known once it is
announced, what a replica took once it accepts, the rest once it is promoted. Only what happens while this router runs
is counted. All routers hear the same: one of them is to be looked at, not their sum.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict

import msgspec
from msgspec import Struct

from adaptersync.router.metrics import Metrics
from adaptersync_core.bus import follow
from adaptersync_core.errors import ControlError
from adaptersync_core.events import (
    PHASES,
    TAKEN_UP,
    AdapterPublished,
    ReplicaAcked,
    VersionPromoted,
    VersionReady,
    VersionStaging,
    from_fields,
)
from adaptersync_core.registry import Registry

FOLLOWED = 256  # versions on their way, or promoted and not yet answered from; older ones are given up
TRAINER = {"step_s": "step", "gather_s": "gather", "save_s": "save", "queued_s": "queued", "hashed_s": "digest"}
OF_VERSION, OF_REPLICA = "version_phase_seconds", "replica_phase_seconds"

log = logging.getLogger(__name__)


class _Way(Struct):
    """Moments of the control server's clock; 0 for what was not told. `promoted_at` is of this process's."""

    announced: float = 0.0
    asked: float = 0.0
    acked: float = 0.0
    ready: float = 0.0
    promoted_at: float = 0.0


class VersionPhases:
    def __init__(self, metrics: Metrics, registry: Registry) -> None:
        self._metrics = metrics
        self._registry = registry
        self._ways: OrderedDict[str, _Way] = OrderedDict()

    async def follow(self, url: str, stream: str, *, name: str) -> None:
        """Runs until cancelled."""
        async for entries in follow(url, stream, name=name):
            for entry, fields in entries:
                await self.see(int(entry.partition("-")[0]) / 1000, fields, now=time.monotonic())

    async def see(self, at: float, fields: dict[str, str], *, now: float) -> None:
        """One event, told `at` by the control server's clock and heard of `now` by this process's."""
        try:
            event = from_fields(fields)
        except msgspec.ValidationError:
            return  # of another release
        match event:
            case AdapterPublished():
                self._way(event.version).announced = at
                await self._trainer(event)
            case VersionStaging():
                way = self._way(event.version)
                if not way.asked:
                    way.asked = at
                    self._took(TAKEN_UP, way.announced, at)
            case ReplicaAcked(accepted=True):
                self._acked(event, at)
            case VersionReady():
                self._way(event.version).ready = at
            case VersionPromoted():
                way = self._way(event.version)
                self._took("committed", way.acked, way.ready or at)
                self._took("gate", way.ready, at)
                way.promoted_at = now

    def answered(self, version: str, at: float) -> None:
        """`version` said a first token `at` a moment of this process's clock; of an answer that came whole, its end."""
        way = self._ways.get(version)
        if way is not None and way.promoted_at:
            del self._ways[version]
            self._metrics.observe(OF_VERSION, max(0.0, at - way.promoted_at), "first token")

    async def _trainer(self, event: AdapterPublished) -> None:
        try:
            manifest = await self._registry.manifest(event.version)
        except ControlError as error:
            log.debug("nothing is known of what its trainer took: %s", error)
            manifest = None
        timings = manifest.timings if manifest else {}
        for name, phase in TRAINER.items():
            if name in timings:
                self._metrics.observe(OF_VERSION, timings[name], phase)
        if event.stored_s is not None:
            self._metrics.observe(OF_VERSION, event.stored_s, "publish")

    def _acked(self, event: ReplicaAcked, at: float) -> None:
        """One that accepts later than others, or again, took the same phases; when it was asked is not known then."""
        took = {name: spent for name in PHASES if (spent := getattr(event, name)) is not None}
        for name, spent in took.items():
            self._metrics.observe(OF_REPLICA, spent, event.replica, name.removesuffix("_s"))
        way = self._ways.get(event.version)
        if way is not None and way.asked and not way.promoted_at:
            self._metrics.observe(OF_REPLICA, max(0.0, at - sum(took.values()) - way.asked), event.replica, "noticed")
            way.acked = at

    def _took(self, phase: str, start: float, end: float) -> None:
        if start:
            self._metrics.observe(OF_VERSION, max(0.0, end - start), phase)

    def _way(self, version: str) -> _Way:
        way = self._ways.setdefault(version, _Way())
        if len(self._ways) > FOLLOWED:
            self._ways.popitem(last=False)
        return way
