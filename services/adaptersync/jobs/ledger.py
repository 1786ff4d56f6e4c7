"""Drain the ledger's streams into the archive in the store, trim them behind it, and make few files of many.

Level-triggered: each run reads on where the last link of the chain says, so it may be killed at any call and run again,
or twice at once. Nothing is trimmed that is not archived, and nothing younger than `jobs.ledger_kept_s`: until then
routers look whether Redis still has what it took, and take what is gone for trimmed on purpose from then on.

Each link says where the chains of the other tables end, so that one that was cut off is missed, and up to when they
held all there was. Where no event comes to say so, an empty link of the events does; and where the events end, a file
beside the tables.

A stream that is not the one of before, since the coordinators' term is another one or its end lies below what was read,
may have been set back, and entries may have come with ids that were read over. Then all of it is read again, and what
the archive has is left out.

Who may write a stream may give an entry any id and any content: it is archived like all others, as far as it can be.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

from msgspec import Struct

from adaptersync_core.archive import Archive, day, span
from adaptersync_core.archived import Record
from adaptersync_core.chain import FIRST, ROW_LATE_S, Beside, File, Head, Link, ended, place, write_ends
from adaptersync_core.config import Config, load_config
from adaptersync_core.errors import ControlError, ControlUnavailable, StoreError
from adaptersync_core.keys import Keys
from adaptersync_core.redis import Entry, RedisClient
from adaptersync_core.registry import Registry
from adaptersync_core.store_identity import agree
from adaptersync_core.unarchived import note

PAGE = 1000  # entries of one read
BATCH = 10_000  # entries of one link: some 100 MB in memory, a few on the disk
BATCHES = 400  # of one table in one run of the job; the next one goes on
TRIM = 10_000  # entries that one call removes, at about a microsecond each
EVENTS_KEPT = 10_000  # of the newest events, whatever their age: what happened is looked at with redis-cli
MERGED_ROWS = 200_000  # of one file
FILES = 1000  # that become one: a second or two, and more where each read is a request
MERGES = 2000  # files in one run of the job; the next one goes on
# What a row says rests on earlier events, and a fate on its row: so read, the archive never has one without the other.
ORDER = ("fates", "rollouts", "events")
LAST = ORDER[-1]

log = logging.getLogger(__name__)


class Drained(Struct, kw_only=True):
    entries: int = 0
    trimmed: int = 0
    merged: int = 0
    damaged: list[str] = []


class Present(Struct, frozen=True):
    """Of a stream: the coordinators' term, the last entry it ever had, and whether it lacks some it had."""

    incarnation: str
    newest: str = FIRST
    lacks: bool = False


def drain_ledger() -> str:
    """The job."""
    done = asyncio.run(drain(load_config()))
    return f"archived {done.entries} entries, trimmed {done.trimmed}, merged {done.merged} files"


async def drain(config: Config) -> Drained:
    """Archive what came since, of all tables; ControlError or StoreError when it could not, and nothing is lost.

    StoreError, too, when all is done, where files that were to be merged are not what was archived: these are left.
    """
    done = Drained()
    client = RedisClient(config.redis.control_url, name="ledger")
    store = Path(config.store.path)
    try:
        registry = Registry(client, Keys(config.group.name))
        await agree(registry, store)  # an empty mount point is no store
        archives = {name: Archive(store, config.group.name, name) for name in ORDER}
        ends = {name: ended(name, await asyncio.to_thread(archive.head)) for name, archive in archives.items()}
        for name, archive in archives.items():
            beside = tuple(end for other, end in ends.items() if other != name)
            kept_s = config.jobs.ledger_kept_s
            until = (await client.command("TIME"))[0] * 1000
            each = Drain(client, registry.keys, name, archive, done, beside=beside, kept_s=kept_s)
            if not await each.run():
                break  # what rests on it would be there without it
            ends[name] = ended(name, await asyncio.to_thread(archive.head), until)
        await asyncio.to_thread(write_ends, archives[LAST].root.parent, archives)
    finally:
        await client.close()
    if done.entries or done.trimmed:
        log.info("ledger: %s", done)
    if done.damaged:
        raise StoreError(
            done.damaged[0],
            next_step="all else is archived; see adaptersync audit verify",
            damaged=len(done.damaged),
        )
    return done


class Drain:
    """One table."""

    def __init__(
        self,
        client: RedisClient,
        keys: Keys,
        name: str,
        archive: Archive,
        done: Drained,
        *,
        beside: tuple[Beside, ...],
        kept_s: float,
    ) -> None:
        """`beside` is where the others end; of those before it in this run also up to when they are whole."""
        self._name = name
        self._client = client
        self._keys = keys
        self._control = keys.control
        self._stream = {"fates": keys.fates, "rollouts": keys.rollouts, "events": keys.events}[name]
        self._kept = EVENTS_KEPT if name == "events" else 0
        self._archive = archive
        self._done = done
        self._beside = beside
        self._kept_s = kept_s

    async def run(self) -> bool:
        """Whether all that the stream had as this began is archived."""
        await asyncio.to_thread(self._archive.tidy)
        head = await asyncio.to_thread(self._archive.head)
        whole = False
        for _ in range(BATCHES):
            whole = not await self._batch(head)
            head = await asyncio.to_thread(self._archive.head)
            if whole:
                break
        await asyncio.to_thread(self._archive.tidy)  # of links that are there only now
        if head is not None:
            await note(self._client, self._keys, self._name, head.link.cursor)
        await self._trim(head)
        if head is not None:
            today = day(min(head.link.highest, f"{await self._now_ms()}-0", key=place))
            if head.link.merged != today:
                await self._merge(head, today)
        return whole

    async def _now_ms(self) -> int:
        seconds, microseconds = await self._client.command("TIME")
        return int(seconds) * 1000 + int(microseconds) // 1000

    async def _batch(self, head: Head | None) -> bool:
        """Whether there may be more. What came after the read is the next run's: or none would end while rows come."""
        present = await self._present()
        link = head.link if head else None
        again = link is not None and (
            present.incarnation != link.incarnation or place(present.newest) < place(link.cursor)
        )
        cursor = FIRST if link is None or again else link.cursor
        entries = await self._read(cursor)
        read_at = await self._now_ms()
        if not entries and not again and not (self._name == LAST and self._untold(link)):
            return False
        records = [record for entry, fields in entries for record in self._archive.table.records(entry, fields)]
        if records and link is not None and place(entries[0][0]) <= place(link.highest):
            records = await asyncio.to_thread(self._unknown, records)
        cursor = entries[-1][0] if entries else cursor
        more: dict[str, Any] = {"cursor": cursor, "incarnation": present.incarnation, "beside": self._beside}
        more |= {"clipped": link is None and present.lacks, "read_at": read_at}
        written = await asyncio.to_thread(lambda: self._archive.write(records, head, **more))
        if written is not None:
            self._done.entries += written.link.entries
        return len(entries) >= BATCH or (bool(entries) and written is None)  # another may have archived less

    def _untold(self, link: Link | None) -> bool:
        """Whether the chain does not tell yet where the others end, or that they are whole some time beyond that."""
        told = {each.table: each for each in link.beside} if link else {}
        for each in self._beside:
            before = told.get(each.table, Beside(table=each.table))
            late_ms = place(each.highest)[0] + ROW_LATE_S * 1000
            if each.number and (before.number != each.number or before.until <= late_ms < each.until):
                return True
        return False

    async def _present(self) -> Present:
        incarnation = await self._client.command("HGET", self._control, "incarnation") or ""
        try:
            reply = await self._client.command("XINFO", "STREAM", self._stream)
        except ControlUnavailable:
            raise
        except ControlError:  # no such key
            return Present(incarnation)
        told = dict(zip(reply[::2], reply[1::2], strict=True))
        return Present(incarnation, str(told["last-generated-id"]), told["entries-added"] > told["length"])

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
        known = self._archive.known(records[0].entry, records[-1].entry, self._damaged)
        return [record for record in records if not any(_same(record, row) for row in known.get(record.entry, ()))]

    async def _trim(self, head: Head | None) -> None:
        """Up to the last entry that was archived, which stays: so the stream tells how far it was trimmed."""
        present = await self._present()
        if head is None or head.link.incarnation != present.incarnation:
            return
        now_ms = await self._now_ms()
        old_ms = max(0, now_ms - int(self._kept_s * 1000))
        bounds = [head.link.cursor, f"{old_ms}-0"]
        if place(head.link.cursor)[0] > now_ms:
            bounds = [await asyncio.to_thread(self._read_by, head.link, old_ms)]
        if self._kept:
            if await self._client.command("XLEN", self._stream) <= 2 * self._kept:
                return
            bounds.append((await self._client.command("XREVRANGE", self._stream, "+", "-", "COUNT", self._kept))[-1][0])
        below = min(bounds, key=place)
        while gone := await self._client.command("XTRIM", self._stream, "MINID", "~", below, "LIMIT", TRIM):
            self._done.trimmed += gone

    def _read_by(self, link: Link, old_ms: int) -> str:
        """Up to where it had been read by then: of entries whose ids tell of a time that is still to come."""
        while not 0 < link.read_at <= old_ms:
            try:
                before = self._archive.link(link.number - 1)
            except StoreError:  # the first, or what verify tells of
                return FIRST
            if before.incarnation != link.incarnation or place(before.cursor) > place(link.cursor):
                return FIRST  # of another stream
            link = before
        return link.cursor

    async def _merge(self, head: Head, today: str) -> None:
        """Of days that are over: a file for each run is enough, up to a bound. What is left is the next run's."""
        for group in await asyncio.to_thread(self._mergeable, today):
            if self._done.merged + len(group) > MERGES and self._done.merged:
                return
            files, tables = await asyncio.to_thread(self._sound, group)
            if len(files) < 2:
                continue
            merged = await asyncio.to_thread(self._archive.merge, files, tables, head)
            if merged is None:
                return  # another is at it
            head = merged
            self._done.merged += len(files)
        await asyncio.to_thread(self._archive.sweep)
        link = head.link
        kept: dict[str, Any] = {"cursor": link.cursor, "incarnation": link.incarnation, "beside": link.beside}
        kept["read_at"] = link.read_at
        await asyncio.to_thread(lambda: self._archive.write([], head, merged=today, **kept))

    def _mergeable(self, today: str) -> list[list[File]]:
        """Files of one run and day that together are not too large."""
        groups: list[list[File]] = []
        for file in sorted(self._archive.files().values(), key=_order):
            if f"/day={today}/" in file.path:
                continue
            last = groups[-1] if groups else []
            fits = sum(each.rows for each in last) + file.rows <= MERGED_ROWS and len(last) < FILES
            if last and fits and _directory(last[0]) == _directory(file):
                last.append(file)
            else:
                groups.append([file])
        return [group for group in groups if len(group) > 1]

    def _sound(self, group: list[File]) -> tuple[list[File], list[Any]]:
        """Those that are what was archived, and what they hold."""
        files, tables = [], []
        for file in group:
            try:
                tables.append(self._archive.checked(file))
                files.append(file)
            except StoreError as error:
                self._damaged(error)
        return files, tables

    def _damaged(self, error: StoreError) -> None:
        told = f"{self._name}: {error}"
        if told not in self._done.damaged:
            log.error("left as it is: %s", told)
            self._done.damaged.append(told)


def _directory(file: File) -> str:
    return file.path.rpartition("/")[0]


def _order(file: File) -> tuple[str, tuple[int, int], tuple[int, int]]:
    first, last = span(file.path)
    return _directory(file), place(first), place(last)


def _same(record: Record, row: dict[str, Any]) -> bool:
    """`written_at` follows from the entry."""
    return all(record.values.get(name) == value for name, value in row.items() if name != "written_at")
