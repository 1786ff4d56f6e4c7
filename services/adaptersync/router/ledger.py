"""From this router to the `rollouts` stream: rows are opened before a request is sent on, and closed at its end.

A row goes to the spool first, which outlives this process, and from there to Redis in batches, again where a reply was
lost: readers go by `request_id`. A request that ends soon leaves one entry, a long one is told of as `open` meanwhile.
What Redis has taken is kept for a time, too, and written again to one that was emptied or set back. What a router
that died had open is closed as `unknown` by whoever takes its spool over. While Redis is away rows wait; when the spool
is full nothing more is opened, and what must be written all the same is counted as lost, never silent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from adaptersync.router.metrics import Metrics
from adaptersync.router.spool import RECORD_BYTES, Record, Spool, own_and_left
from adaptersync.router.taken import NOTHING, Taken, TakenRows
from adaptersync_core.bus import Bell
from adaptersync_core.errors import ControlError, ControlUnavailable
from adaptersync_core.pipe import Pipe
from adaptersync_core.rollouts import FIELD, OPEN, UNKNOWN, Row

BATCH = 256  # rows in one round trip
GATHER_S = 0.05  # rows that end within this are written together
OPEN_S = 1.0  # a request that takes longer is told of before it ends
RETRY_S = 0.5
ROW_BYTES = RECORD_BYTES - 64  # what is longer loses its reason and what the client called it
DIED = "router died before it ended"

log = logging.getLogger(__name__)


# of these there are many, in no circles: the collector of garbage would stop the router to look at them


class Waiting(msgspec.Struct, gc=False):
    """A row on its way to Redis; `row` is set where the record does not say it as it shall be written."""

    spool: Spool
    record: Record
    row: bytes = b""


class Opened(msgspec.Struct, gc=False):
    """A request on its way: where its row is in the spool, and since when."""

    record: Record
    since: float
    ended: bool = False


class Ledger:
    """What it counts, it counts in `metrics`."""

    def __init__(
        self, pipe: Pipe, stream: str, *, spool: Spool, left: list[Spool], taken: TakenRows, metrics: Metrics
    ) -> None:
        """`left` are spools of routers that are gone: they are emptied and removed."""
        self._pipe = pipe
        self._stream = stream
        self._spool = spool
        self._left = left
        self._taken = taken
        self._metrics = metrics
        self._waiting: deque[Waiting] = deque()
        self._opened: dict[str, Opened] = {}
        self._untold: deque[Opened] = deque()
        self._bell = Bell()
        for each in (spool, *left):
            self._take_over(each)

    @classmethod
    async def at(
        cls, pipe: Pipe, stream: str, *, directory: Path, name: str, capacity: int, kept: int, metrics: Metrics
    ) -> Ledger:
        """A ledger with its spool in `directory`, and `kept` bytes for rows that Redis has; StoreError without room."""
        spool, left = await asyncio.to_thread(own_and_left, directory, name, capacity)
        taken = await TakenRows.at(directory / "kept", name=name, capacity=kept)
        return cls(pipe, stream, spool=spool, left=left, taken=taken, metrics=metrics)

    @property
    def waiting(self) -> int:
        """Rows that ended and are not yet in Redis."""
        return len(self._waiting)

    @property
    def spool_used(self) -> int:
        return self._spool.used

    @property
    def spool_limit(self) -> int:
        return self._spool.capacity

    @property
    def full(self) -> bool:
        """Whether a request more can be recorded: its end must fit as well, and the end of every other that runs."""
        return self._spool.free < (len(self._opened) + 2) * RECORD_BYTES

    def open(self, row: Row) -> bool:
        """Record that a request is about to be sent on, or is sent elsewhere; False when there is no room.

        `row` has the outcome `open`.
        """
        known = self._opened.get(row.request_id)
        if known is None and self.full:
            return False
        if known is not None and self._spool.free < (len(self._opened) + 1) * RECORD_BYTES:
            return True  # it is recorded, if with the replica before; what room there is belongs to ends
        record = self._spool.append(_encode(row))
        if record is None:
            return known is not None
        record.kept = True
        if known is not None:
            known.record.done = True
            known.record = record
            return True
        opened = self._opened[row.request_id] = Opened(record, time.monotonic())
        self._untold.append(opened)
        return True

    def close(self, row: Row, *, sent: bool) -> None:
        """Record how a request ended; `sent` when a replica was asked."""
        opened = self._opened.pop(row.request_id, None)
        record = self._spool.append(_encode(row)) if opened is not None or not self.full else None
        if opened is not None:
            opened.ended = opened.record.done = True  # also where the end has no room: it would be in the way for ever
        if record is None:
            self._metrics.count("ledger_lost" if sent else "ledger_untold")
            return
        self._waiting.append(Waiting(self._spool, record))
        self._bell.ring()

    async def write(self) -> None:
        """Write what waits; runs until cancelled."""
        away = False
        while True:
            await self._bell.wait(OPEN_S)
            await asyncio.sleep(GATHER_S)
            try:
                await self._write_all()
                away = False
            except ControlError as error:
                if not away:
                    log.warning("ledger rows wait: %s", error)
                away = True
                self._bell.ring()
                await asyncio.sleep(RETRY_S)

    async def stop(self, timeout_s: float) -> None:
        """Write what is left; what cannot be written in time stays in the spool for the next router here."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._waiting:
                    try:
                        await self._write_all()
                    except ControlError:
                        await asyncio.sleep(GATHER_S)
        except TimeoutError:
            log.warning("%d ledger rows stay in %s until a router starts here", len(self._waiting), self._spool.path)
        for spool in (self._spool, *self._left):
            await asyncio.to_thread(spool.close)
        await asyncio.to_thread(self._taken.close)

    async def _write_all(self) -> None:
        """Batch after batch until nothing waits; ControlError when one could not be written, or not all of it."""
        once = False
        while True:
            opened = self._long_running()
            ended = [self._waiting[place] for place in range(min(BATCH, self.waiting))]
            asked = self._taken.questions()
            if not opened and not ended and ((once and not self._taken.unsure) or not asked):
                return
            once = True
            rows = [_read(self._spool, each.record) for each in opened]
            rows += [each.row or _read(each.spool, each.record) for each in ended]
            looks = (("XRANGE", self._stream, each.entry, each.entry) for each in asked)
            writes = (("XADD", self._stream, "*", FIELD, row) for row in rows)
            try:
                replies = await self._pipe.calls([*looks, *writes])
            except ControlError:
                self._untold.extendleft(reversed(opened))
                raise
            seen, told = replies[: len(asked)], replies[len(asked) : len(asked) + len(opened)]
            written = replies[len(asked) + len(opened) :]
            failed = [reply for reply in replies if isinstance(reply, ControlError)]
            again = [each for each, reply in zip(opened, told, strict=True) if isinstance(reply, ControlError)]
            self._untold.extendleft(reversed(again))
            taken = []
            for each, row, reply in zip(ended, rows[len(opened) :], written, strict=True):
                self._waiting.popleft()
                each.record.done = not isinstance(reply, ControlError)
                if each.record.done:
                    taken.append((reply, row))
            self._waiting.extendleft(each for each in reversed(ended) if not each.record.done)
            self._metrics.count("ledger_written", by=len(taken))
            if not any(isinstance(reply, ControlError) for reply in seen):
                await self._write_again(asked, [bool(reply) for reply in seen])
            self._taken.take(taken)
            await self._give_back()
            if failed:
                raise failed[0]

    async def _write_again(self, asked: list[Taken], found: list[bool]) -> None:
        trimmed = NOTHING if all(found) else await self._trimmed()
        if trimmed is None:
            return  # they are looked up once more
        lost = self._taken.answered(asked, found, trimmed=trimmed)
        if lost:
            log.warning("Redis lost %d ledger rows; they are written again", len(lost))
        self._metrics.count("ledger_rewritten", by=len(lost))
        self._waiting.extend(Waiting(each.spool, each.record) for each in lost)

    async def _trimmed(self) -> str | None:
        """The entry below which somebody has trimmed the stream; None when that cannot be known now."""
        try:
            reply = await self._pipe.call("XINFO", "STREAM", self._stream)
        except ControlUnavailable:
            return None
        except ControlError:  # no such key
            return NOTHING
        told = dict(zip(reply[::2], reply[1::2], strict=True))
        if told["entries-added"] == told["length"]:  # what a stream that was lost had, none of these counts
            return NOTHING
        return str(told["first-entry"][0] if told["first-entry"] else told["last-generated-id"])

    def _long_running(self) -> list[Opened]:
        """Requests that have run long enough to be told of, the oldest first; they no longer wait for it."""
        found: list[Opened] = []
        untold, due = self._untold, time.monotonic() - OPEN_S
        while untold and len(found) < BATCH and (untold[0].ended or untold[0].since <= due):
            opened = untold.popleft()
            if not opened.ended:
                found.append(opened)
        return found

    async def _give_back(self) -> None:
        for spool in (self._spool, *self._left):
            spool.trim()
        self._taken.trim()
        for spool in [each for each in self._left if not each.used]:
            self._left.remove(spool)
            await asyncio.to_thread(spool.close)

    def _take_over(self, spool: Spool) -> None:
        """Queue what a router left behind; what it had open is over, and nobody knows how it ended."""
        opened: dict[str, Waiting] = {}
        for record in spool:
            row = msgspec.json.decode(_read(spool, record), type=dict[str, Any])
            request_id = row["request_id"]
            before = opened.pop(request_id, None)
            if before is not None:
                before.record.done = True
            if row["outcome"] == OPEN:
                died = msgspec.json.encode(row | {"outcome": UNKNOWN, "reason": DIED})
                opened[request_id] = Waiting(spool, record, died)
            else:
                self._waiting.append(Waiting(spool, record))
        self._waiting.extend(opened.values())
        if self._waiting:
            log.info("%d ledger rows were left in %s, %d of them open", len(self._waiting), spool.path, len(opened))
            self._bell.ring()


def _encode(row: Row) -> bytes:
    payload = msgspec.json.encode(row)
    if len(payload) > ROW_BYTES:
        payload = msgspec.json.encode(replace(row, reason="", asked="", substituted=""))
    return payload


def _read(spool: Spool, record: Record) -> bytes:
    payload = spool.payload(record)
    return payload[payload.index(b"{") :]  # of one that was taken, the row follows its entry
