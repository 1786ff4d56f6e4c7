"""A bounded file in which rows wait that Redis does not have yet.

A ring in shared memory of a file: what is in it survives the death of this process at any instant (kill -9), since
the pages belong to the kernel; a crash of the machine may take the last seconds. Appending is a copy in memory, no
call to the system, so it may be done while a request waits. All space is taken when the file is made: a full disk
shows then, not later. One process owns a file, by a lock that the kernel gives back when it dies.

Layout, native byte order: magic, capacity, tail (position of the first record still wanted), then the ring. A record
is its position, length, checksum and payload; positions only grow, so what is left of an earlier lap is not mistaken
for a record, nor is one whose writing was cut short; and behind damage the next whole one is found again. Knows nothing
of rows.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import struct
import time
import zlib
from array import array
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from adaptersync_core.errors import StoreError

SUFFIX = ".spool"
RECORD_BYTES = 2048  # the largest record, its head included; a row is about 700
SEARCHED_BYTES = 1 << 20  # how far the next record is looked for, behind damage and behind the last one alike
HALF_MADE_S = 3600.0  # after this nobody is making a file any more

_MAGIC = b"ADSPOOL1"
_HEADER = struct.Struct("=8sQQ")
_TAIL = slice(16, 24)  # copied as one aligned word
_RING = 4096  # where the ring begins in the file
_RECORD = struct.Struct("=QII")
PAYLOAD_BYTES = RECORD_BYTES - _RECORD.size
_HALF_MADE = ".making"
_SKIP = 0xFFFFFFFF  # the length of what only fills the end of a lap
_ALIGN = 8

log = logging.getLogger(__name__)


class Record(Struct, gc=False):
    """A place in the ring. `done`: nobody wants it any more; `kept`: wanted still, and may be moved to the front."""

    position: int
    length: int
    done: bool = False
    kept: bool = False


class Spool:
    """One file, ours. `free` says how many bytes of records fit for certain."""

    def __init__(self, path: Path, file: int, memory: mmap.mmap) -> None:
        self.path = path
        self._file = file
        self._memory = memory
        magic, capacity, tail = _HEADER.unpack_from(memory)
        self.capacity, self._tail = int(capacity), int(tail)
        if magic != _MAGIC or self.capacity != len(memory) - _RING or self._tail % _ALIGN:
            raise StoreError("not a spool", path=str(path))
        self._head = self._tail
        self._records = deque(self._recover())

    @classmethod
    def create(cls, path: Path, capacity: int) -> Spool:
        """A new file for `capacity` bytes of records; StoreError when there is no room for it."""
        fresh = path.with_suffix(_HALF_MADE)
        with _explained(path):
            file = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.posix_fallocate(file, 0, _RING + capacity)
                memory = mmap.mmap(file, _RING + capacity)
                memory[: _HEADER.size] = _HEADER.pack(_MAGIC, capacity, 0)
                fresh.rename(path)  # whoever looks for spools finds it whole, and locked
            except BaseException:
                os.close(file)
                fresh.unlink(missing_ok=True)
                raise
        return cls(path, file, memory)

    @classmethod
    def take(cls, path: Path) -> Spool | None:
        """What a process left that is gone; None when it is not gone, or the file is no spool."""
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_nlink:  # else its owner has just removed it
                return cls(path, file, mmap.mmap(file, 0))
            os.close(file)
            return None
        except (OSError, ValueError, StoreError, struct.error):
            os.close(file)
            return None

    @property
    def used(self) -> int:
        return self._head - self._tail

    @property
    def free(self) -> int:
        """Less what the end of a lap, and one record on its way to the front, may waste."""
        return self.capacity - self.used - 2 * RECORD_BYTES

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    def append(self, payload: bytes) -> Record | None:
        """None when it does not fit."""
        length, position, capacity = len(payload), self._head, self.capacity
        size = _size(length)
        left = capacity - position % capacity
        skipped = left if left < size else 0
        if size > RECORD_BYTES or position - self._tail + skipped + size > capacity:
            return None
        if skipped >= _RECORD.size:
            self._write(position, _SKIP, 0)
        position += skipped
        record = Record(position, length)
        start = _RING + position % capacity + _RECORD.size
        self._memory[start : start + length] = payload
        # the head comes last: a record that is cut short does not count
        self._write(position, length, zlib.crc32(payload))
        self._head = position + size
        self._records.append(record)
        return record

    def payload(self, record: Record) -> bytes:
        start = _RING + record.position % self.capacity + _RECORD.size
        return self._memory[start : start + record.length]

    def trim(self) -> None:
        """Give back the space of what is done; past half of it, records that are kept make way by moving to the front.

        So a request that runs for minutes does not hold up the space of all that came after it.
        """
        records = self._records
        for _ in range(len(records)):
            if not records[0].done:
                if not records[0].kept or self.used <= self.capacity // 2:
                    break
                moved = self.append(self.payload(records[0]))
                if moved is None:
                    break
                old = records.popleft()
                records[-1] = old  # whoever knows it finds it where it is now
                old.position = moved.position
            else:
                records.popleft()
            self._set_tail(records[0].position if records else self._head)

    def close(self) -> None:
        """Leave the file to whoever comes next, unless it is empty."""
        self.trim()
        if not self._records:
            self.path.unlink(missing_ok=True)
        self._memory.close()
        os.close(self._file)

    def _write(self, position: int, length: int, checksum: int) -> None:
        _RECORD.pack_into(self._memory, _RING + position % self.capacity, position, length, checksum)

    def _set_tail(self, position: int) -> None:
        self._tail = position
        self._memory[_TAIL] = struct.pack("=Q", position)

    def _recover(self) -> Iterator[Record]:
        while self.used < self.capacity:
            left = self.capacity - self._head % self.capacity
            if left < _RECORD.size:
                self._head += left
                continue
            length = self._length(self._head)
            if not length:
                found = self._behind_damage()
                if found is None:
                    self._tell_of_a_damaged_end()
                    return
                log.warning("%s: %d bytes are damaged, and their rows lost", self.path, found - self._head)
                self._head = found
            elif length == _SKIP:
                self._head += left
            else:
                record = Record(self._head, length)
                self._head += _size(length)
                yield record

    def _length(self, position: int) -> int:
        """Of the whole record that begins there, or _SKIP; 0 where none does."""
        left = self.capacity - position % self.capacity
        if left < _RECORD.size:
            return 0
        said, length, checksum = _RECORD.unpack_from(self._memory, _RING + position % self.capacity)
        if said != position:
            return 0
        if length == _SKIP:
            return _SKIP
        if not length or _size(length) > min(left, RECORD_BYTES):
            return 0
        return int(length) if zlib.crc32(self.payload(Record(position, length))) == checksum else 0

    def _behind_damage(self) -> int | None:
        """Where the next whole record begins, which says its own position; None behind the last one."""
        position = self._head + _ALIGN
        stop = min(self._head + SEARCHED_BYTES, self._tail + self.capacity)
        while position < stop:
            begin = position % self.capacity
            size = min(stop - position, self.capacity - begin)
            words = array("Q", self._memory[_RING + begin : _RING + begin + size - size % _ALIGN])
            for place, word in zip(range(position, position + size, _ALIGN), words, strict=False):
                if word == place and self._length(place):
                    return place
            position += size
        return None

    def _tell_of_a_damaged_end(self) -> None:
        """One that was cut short by a death has no head yet."""
        position, length, _ = _RECORD.unpack_from(self._memory, _RING + self._head % self.capacity)
        if position == self._head and length:
            lost = min(_size(length), RECORD_BYTES)
            log.warning("%s: %d bytes at the end are damaged, and their rows lost", self.path, lost)


def own_and_left(directory: Path, name: str, capacity: int) -> tuple[Spool, list[Spool]]:
    """A spool for this process, and those that others left.

    One of the right size is taken over rather than made: routers that die again and again leave no more files than
    have ever run at once.
    """
    capacity -= capacity % _ALIGN
    own: Spool | None = None
    left = []
    with _explained(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.glob(f"*{_HALF_MADE}"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > HALF_MADE_S:
                    path.unlink()
        for spool in all_left(directory):
            if own is None and spool.capacity == capacity:
                own = spool
            else:
                left.append(spool)
    return own or Spool.create(directory / f"{name}{SUFFIX}", capacity), left


def all_left(directory: Path) -> Iterator[Spool]:
    """Spools of processes that are gone."""
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        spool = Spool.take(path)
        if spool is not None:
            yield spool


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"spool cannot be made: {error.strerror}",
            next_step="check router.spool_path, and router.spool_bytes and kept_bytes against the space there",
            path=str(path),
        ) from error


def _size(length: int) -> int:
    return -(-(_RECORD.size + length) // _ALIGN) * _ALIGN
