"""Drain the ledger's streams into the archive in the store, trim them behind it, and make few files of many.

Level-triggered: each run reads on where the last link of the chain says, so it may be killed at any call and run again,
or twice at once. Nothing is trimmed that is not archived, and nothing younger than `jobs.ledger_kept_s`: until then
routers look whether Redis still has what it took, and take what is gone for trimmed on purpose from then on.

A stream that is not the one of before, since the coordinators' term is another one or its end lies below what was read,
may have been set back, and entries may have come with ids that were read over. Then all of it is read again, and what
the archive has is left out.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

from msgspec import Struct

from adaptersync_core.archive import FIRST, Archive, File, Head, day, place, span
from adaptersync_core.archived import Record
from adaptersync_core.config import Config, load_config
from adaptersync_core.errors import ControlError, ControlUnavailable
from adaptersync_core.keys import Keys
from adaptersync_core.redis import Entry, RedisClient
from adaptersync_core.registry import Registry
from adaptersync_core.store_identity import agree

PAGE = 1000  # entries of one read
BATCH = 10_000  # entries of one link: some 100 MB in memory, a few on the disk
BATCHES = 400  # of one table in one run of the job; the next one goes on
TRIM = 10_000  # entries that one call removes, at about a microsecond each
EVENTS_KEPT = 10_000  # of the newest events, whatever their age: what happened is looked at with redis-cli
MERGED_ROWS = 200_000  # of one file
MERGES = 500  # in one run of the job
# What a row says rests on earlier events, and a fate on its row: so read, the archive never has one without the other.
ORDER = ("fates", "rollouts", "events")

log = logging.getLogger(__name__)


class Drained(Struct, kw_only=True):
    entries: int = 0
    trimmed: int = 0
    merged: int = 0


def drain_ledger() -> str:
    """The job."""
    done = asyncio.run(drain(load_config()))
    return f"archived {done.entries} entries, trimmed {done.trimmed}, merged {done.merged} files"


async def drain(config: Config) -> Drained:
    """Archive what came since, of all tables; ControlError or StoreError when it could not, and nothing is lost."""
    done = Drained()
    client = RedisClient(config.redis.control_url, name="ledger")
    store = Path(config.store.path)
    try:
        registry = Registry(client, Keys(config.group.name))
        await agree(registry, store)  # an empty mount point is no store
        for name in ORDER:
            archive = Archive(store, config.group.name, name)
            await Drain(client, registry.keys, name, archive, done, kept_s=config.jobs.ledger_kept_s).run()
    finally:
        await client.close()
    if done.entries or done.trimmed:
        log.info("ledger: %s", done)
    return done


class Drain:
    """One table."""

    def __init__(
        self, client: RedisClient, keys: Keys, name: str, archive: Archive, done: Drained, *, kept_s: float
    ) -> None:
        self._client = client
        self._control = keys.control
        self._stream = {"fates": keys.fates, "rollouts": keys.rollouts, "events": keys.events}[name]
        self._kept = EVENTS_KEPT if name == "events" else 0
        self._archive = archive
        self._done = done
        self._kept_s = kept_s

    async def run(self) -> None:
        await asyncio.to_thread(self._archive.tidy)
        before = head = await asyncio.to_thread(self._archive.head)
        for _ in range(BATCHES):
            if not await self._batch(head):
                break
            head = await asyncio.to_thread(self._archive.head)
        await asyncio.to_thread(self._archive.tidy)  # of links that are there only now
        await self._trim(head)
        if before is not None and head is not None and day(before.link.highest) != day(head.link.highest):
            await self._merge(head)

    async def _batch(self, head: Head | None) -> bool:
        """Whether there may be more."""
        incarnation, newest = await self._present()
        link = head.link if head else None
        again = link is not None and (incarnation != link.incarnation or place(newest) < place(link.cursor))
        cursor = FIRST if link is None or again else link.cursor
        entries = await self._read(cursor)
        if not entries and not again:
            return False
        records = [record for entry, fields in entries for record in self._archive.table.records(entry, fields)]
        if records and link is not None and place(entries[0][0]) <= place(link.highest):
            records = await asyncio.to_thread(self._unknown, records)
        cursor = entries[-1][0] if entries else FIRST
        more = {"cursor": cursor, "incarnation": incarnation}
        written = await asyncio.to_thread(lambda: self._archive.write(records, head, **more))
        if written is not None:
            self._done.entries += written.link.entries
        return bool(entries)

    async def _present(self) -> tuple[str, str]:
        """The coordinators' term, and the last entry that the stream ever had."""
        incarnation = await self._client.command("HGET", self._control, "incarnation")
        try:
            reply = await self._client.command("XINFO", "STREAM", self._stream)
        except ControlUnavailable:
            raise
        except ControlError:  # no such key
            return incarnation or "", FIRST
        told = dict(zip(reply[::2], reply[1::2], strict=True))
        return incarnation or "", str(told["last-generated-id"])

    async def _read(self, after: str) -> list[Entry]:
        entries: list[Entry] = []
        while len(entries) < BATCH:
            page = await self._client.read_stream(self._stream, after, count=PAGE)
            entries += page
            if len(page) < PAGE:
                break
            after = page[-1][0]
        return entries

    def _unknown(self, records: list[Record]) -> list[Record]:
        """Those that the archive does not have."""
        known = self._archive.known(records[0].entry, records[-1].entry)
        return [record for record in records if not any(_same(record, row) for row in known.get(record.entry, ()))]

    async def _trim(self, head: Head | None) -> None:
        """Up to the last entry that was archived, which stays: so the stream tells how far it was trimmed."""
        incarnation, _ = await self._present()
        if head is None or head.link.incarnation != incarnation:
            return
        now = await self._client.command("TIME")
        bounds = [head.link.cursor, f"{max(0, now[0] * 1000 - int(self._kept_s * 1000))}-0"]
        if self._kept:
            if await self._client.command("XLEN", self._stream) <= 2 * self._kept:
                return
            bounds.append((await self._client.command("XREVRANGE", self._stream, "+", "-", "COUNT", self._kept))[-1][0])
        below = min(bounds, key=place)
        while gone := await self._client.command("XTRIM", self._stream, "MINID", "~", below, "LIMIT", TRIM):
            self._done.trimmed += gone

    async def _merge(self, head: Head) -> None:
        """Of days that are over: a file for each run is enough, up to a bound."""
        for paths in await asyncio.to_thread(self._mergeable, day(head.link.highest)):
            merged = await asyncio.to_thread(self._archive.merge, paths, head)
            if merged is None:
                return  # another is at it
            head = merged
            self._done.merged += len(paths)

    def _mergeable(self, today: str) -> list[list[str]]:
        """Files of one run and day that together are not too large."""
        groups: list[list[File]] = []
        for file in sorted(self._archive.files().values(), key=_order):
            if f"/day={today}/" in file.path:
                continue
            last = groups[-1] if groups else []
            fits = sum(each.rows for each in last) + file.rows <= MERGED_ROWS
            if last and fits and _directory(last[0]) == _directory(file):
                last.append(file)
            else:
                groups.append([file])
        return [[file.path for file in group] for group in groups if len(group) > 1][:MERGES]


def _directory(file: File) -> str:
    return file.path.rpartition("/")[0]


def _order(file: File) -> tuple[str, tuple[int, int], tuple[int, int]]:
    first, last = span(file.path)
    return _directory(file), place(first), place(last)


def _same(record: Record, row: dict[str, Any]) -> bool:
    """`written_at` follows from the entry."""
    return all(record.values.get(name) == value for name, value in row.items() if name != "written_at")
