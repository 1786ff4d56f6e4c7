"""Rows that Redis has taken, kept on this host as long as there is room: a server that is set back has lost the last.

A ring beside the spool; a record is the id of the stream's entry, a space, and the row. The newest entries of the last
two batches, at first the newest that is kept, are looked up with every batch: when the stream lacks one it was emptied
or set back, and then all that is kept is looked up. Two batches, because the stream may be emptied within one. What was
trimmed away on purpose is not lost. Knows nothing of Redis.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from msgspec import Struct

from adaptersync.router.spool import PAYLOAD_BYTES, Record, Spool, all_left, own_and_left

BATCH = 256  # entries looked up in one round trip, beside the marks
NOTHING = "0-0"  # below every entry of a stream
LEFT_S = 86_400.0  # what a router left behind longer ago is of no use to anybody


class Taken(Struct, gc=False):
    """One row that the stream had as `entry`; `lost` once it was found that it has it no more."""

    spool: Spool
    record: Record
    entry: str
    lost: bool = False


class TakenRows:
    """`left` are rings of routers that are gone: they are looked through, and left for whoever comes next."""

    def __init__(self, own: Spool | None, left: Sequence[Spool] = ()) -> None:
        self._own = own
        self._left = list(left)
        self._kept = deque(_taken(own)) if own else deque[Taken]()
        self._others = [each for spool in left for each in _taken(spool)]
        newest = max(self._all(), key=lambda each: _place(each.entry), default=None)
        self._marks: deque[Taken] = deque(() if newest is None else (newest,), maxlen=2)
        self._unsure = deque(self._all())  # nobody looked while no router ran here

    @classmethod
    async def at(cls, directory: Path, *, name: str, capacity: int) -> TakenRows:
        """A ring in `directory`; StoreError when there is no room for it. Without capacity nothing is, nor stays."""
        if not capacity:
            for spool in await asyncio.to_thread(lambda: [*all_left(directory)]):
                _give_up(spool)
                await asyncio.to_thread(spool.close)
            return cls(None)
        own, found = await asyncio.to_thread(own_and_left, directory, name, capacity)
        left = []
        for spool in (own, *found):
            newest_ms, _ = max((_place(each.entry) for each in _taken(spool)), default=(0, 0))
            if time.time() - newest_ms / 1000 > LEFT_S:
                _give_up(spool)
        for spool in found:
            if spool.used:
                left.append(spool)
            else:
                await asyncio.to_thread(spool.close)
        return cls(own, left)

    def questions(self) -> list[Taken]:
        """What to look up in the stream now."""
        return [*self._marks, *islice(self._unsure, BATCH)]

    def answered(self, asked: Sequence[Taken], found: Sequence[bool], *, trimmed: str = NOTHING) -> list[Taken]:
        """What is to be written again, by whether each of `asked` is in the stream.

        Up to the entry `trimmed` the stream was emptied on purpose: what it lacks there is not kept any longer.
        """
        floor = _place(trimmed)
        marks = len(self._marks)
        lost = []
        for each, there in zip(asked[marks:], found[marks:], strict=True):
            self._unsure.popleft()
            if not there and not each.lost and _place(each.entry) <= floor:
                each.record.done = True
            elif not there and not each.lost and not each.record.done:
                each.lost = True
                lost.append(each)
        if not all(found[:marks]):
            self._marks.clear()
            self._unsure = deque(each for each in self._all() if not each.lost and not each.record.done)
        return lost

    @property
    def unsure(self) -> bool:
        """Whether there is something to look up beside the marks."""
        return bool(self._unsure)

    def take(self, rows: Iterable[tuple[str, bytes]]) -> None:
        """A batch that was written: entry and row. The oldest rows give way."""
        newest = None
        for entry, row in rows:
            newest = self._append(entry, row) or newest
        if newest is not None:
            self._marks.append(newest)

    def trim(self) -> None:
        for spool in self._spools():
            spool.trim()

    def close(self) -> None:
        """Leave the files to whoever comes next."""
        for spool in self._spools():
            spool.close()

    def _append(self, entry: str, row: bytes) -> Taken | None:
        payload = entry.encode() + b" " + row
        if self._own is None or len(payload) > PAYLOAD_BYTES:  # no room could be made for it
            return None
        while (record := self._own.append(payload)) is None:
            if not self._kept:
                return None  # what is there waits to be written again
            oldest = self._kept.popleft()
            if not oldest.lost:
                oldest.record.done = True
            self._own.trim()
        taken = Taken(self._own, record, entry)
        self._kept.append(taken)
        return taken

    def _all(self) -> Iterator[Taken]:
        yield from self._others
        yield from self._kept

    def _spools(self) -> Iterator[Spool]:
        if self._own is not None:
            yield self._own
        yield from self._left


def _give_up(spool: Spool) -> None:
    for record in spool:
        record.done = True
    spool.trim()


def _taken(spool: Spool) -> Iterator[Taken]:
    for record in spool:
        yield Taken(spool, record, spool.payload(record).partition(b" ")[0].decode())


def _place(entry: str) -> tuple[int, int]:
    """Where it stands in the stream: when the server took it, in milliseconds, and which of that millisecond it is."""
    milliseconds, _, number = entry.partition("-")
    return int(milliseconds), int(number)
