"""One row for every rollout that was asked for: what served it, how it was routed, how long it took, how it ended.

Rows wait in a bounded queue and are written in batches to the `rollouts` stream; while Redis is away they wait. A row
may be written twice when a reply is lost: readers go by `request_id`. What does not fit is counted, never silent.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

import msgspec
from msgspec import Struct

from adaptersync_core.bus import Bell
from adaptersync_core.errors import ControlError
from adaptersync_core.pipe import Argument, Pipe

BATCH = 256  # rows in one round trip
GATHER_S = 0.05  # rows that end within this are written together
RETRY_S = 0.5

log = logging.getLogger(__name__)


class Row(Struct, frozen=True, kw_only=True):
    """`version` is the adapter id (the base model's name for the base); times are seconds; None is not known.

    `outcome`: ok; refused (by us or by the replica, see `status`); upstream_error; client_gone; stopped (by us).
    `first_byte_s` counts from sending to the replica. `started_at` is this host's wall clock. `substituted` is the
    name a relay was asked for where it asks for another version in its place.
    """

    request_id: str
    router: str
    path: str
    asked: str
    outcome: str
    status: int
    started_at: float
    total_s: float
    run: str = ""
    version: str = ""
    digest: str = ""
    replica: str = ""
    engine_epoch: str = ""
    routing: str = ""
    owned_blocks: int | None = None
    attempts: int = 0
    hold_s: float | None = None
    route_s: float | None = None
    first_byte_s: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    generation: int = 0
    substituted: str = ""
    reason: str = ""


class Ledger:
    """The queue and its writer. `lost` counts rows that found the queue full or were not written before the stop."""

    def __init__(self, pipe: Pipe, stream: str, *, queue: int) -> None:
        self._pipe = pipe
        self._stream = stream
        self._limit = queue
        self._rows: deque[Row] = deque()
        self._bell = Bell()
        self.written = 0
        self.lost = 0

    @property
    def waiting(self) -> int:
        return len(self._rows)

    def add(self, row: Row) -> None:
        if len(self._rows) >= self._limit:
            self.lost += 1
            return
        self._rows.append(row)
        self._bell.ring()

    async def write(self) -> None:
        """Write what waits; runs until cancelled."""
        away = False
        while True:
            await self._bell.wait(60.0)
            await asyncio.sleep(GATHER_S)
            while self._rows:
                try:
                    await self._write_batch()
                    away = False
                except ControlError as error:
                    if not away:
                        log.warning("ledger rows wait: %s", error)
                    away = True
                    await asyncio.sleep(RETRY_S)

    async def flush(self, timeout_s: float) -> None:
        """Write what is left before a stop; what cannot be written in time is counted as lost and logged."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._rows:
                    try:
                        await self._write_batch()
                    except ControlError:
                        await asyncio.sleep(GATHER_S)
        except TimeoutError:
            self.lost += len(self._rows)
            log.error("%d ledger rows are lost: they could not be written before the stop", len(self._rows))
            self._rows.clear()

    async def _write_batch(self) -> None:
        batch = [self._rows[place] for place in range(min(BATCH, len(self._rows)))]
        replies = await self._pipe.calls(("XADD", self._stream, "*", *_fields(row)) for row in batch)
        for _ in batch:
            self._rows.popleft()
        failed = [(row, reply) for row, reply in zip(batch, replies, strict=True) if isinstance(reply, ControlError)]
        self._rows.extendleft(row for row, _ in reversed(failed))
        self.written += len(batch) - len(failed)
        if failed:
            raise failed[0][1]


def _fields(row: Row) -> list[Argument]:
    """Field, value, field, value, ...; microseconds are precise enough."""
    fields: list[Argument] = []
    for name, value in msgspec.structs.asdict(row).items():
        if value is not None and value != "":
            fields += name, f"{value:.6f}" if type(value) is float else value
    return fields
