"""The first answer that this router had for each version, as the end of the version's trace. Where nothing is traced
there is no such thing, and requests pass it by."""

from __future__ import annotations

import asyncio

from adaptersync.router.table import TableView
from adaptersync_core.errors import ControlError
from adaptersync_core.registry import Registry
from adaptersync_core.rollouts import Row
from adaptersync_core.traces import Traces

WAITING = 64  # first answers that may wait to be told; more are not


class Firsts:
    def __init__(self, traces: Traces, registry: Registry, view: TableView, *, name: str) -> None:
        self._traces = traces
        self._registry = registry
        self._view = view
        self._name = name
        self._seen: set[str] = set()
        self._waiting: asyncio.Queue[Row] = asyncio.Queue(WAITING)

    def answered(self, row: Row) -> None:
        """A request has ended; the first one of a version that brought tokens is told of."""
        if row.version in self._seen or not row.run or row.first_byte_s is None or row.status != 200:
            return
        self._seen.add(row.version)
        if not self._waiting.full():
            self._waiting.put_nowait(row)

    async def run(self) -> None:
        """Tell of them, off the path of requests; runs until cancelled."""
        while True:
            row = await self._waiting.get()
            self._seen.intersection_update({*self._view.table.versions, row.version})
            try:
                manifest = await self._registry.manifest(row.version)
            except ControlError:
                continue  # nobody waits for a trace
            if manifest is None or not manifest.traceparent:
                continue
            parts = {
                name: spent
                for name, spent in (
                    ("hold", row.hold_s),
                    ("route", row.route_s),
                    ("replica", row.first_token_s if row.first_token_s is not None else row.first_byte_s),
                )
                if spent is not None
            }
            self._traces.span(
                "first token",
                manifest.traceparent,
                row.started_at,
                row.started_at + sum(parts.values()),
                parts=parts,
                version=row.version,
                router=self._name,
                replica=row.replica,
                request_id=row.request_id,
                routing=row.routing,
            )
