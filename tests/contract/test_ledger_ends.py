"""Up to where each table is archived, and that all that rests on it comes after."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from adaptersync.jobs import ledger
from adaptersync.jobs.ledger import drain
from adaptersync_core.archive import Archive
from adaptersync_core.archived import Record
from adaptersync_core.chain import Head
from adaptersync_core.config import Config
from support.ledger import GROUP, Writer, archived, config_of, ids, promoted, row
from support.wait import wait_until


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def config(redis_url: str, store: Path) -> Config:
    return config_of(redis_url, store)


class Killed(BaseException):
    pass


def killed(*_: object) -> None:
    raise Killed


async def test_a_table_that_is_not_read_to_its_end_holds_up_what_rests_on_it(
    config: Config, store: Path, writer: Writer, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "BATCHES", 3)
    await writer.rows([row(f"r-{n:x}") for n in range(20)])
    await writer.events(promoted())
    await drain(config)
    assert (len(archived(store)), archived(store, "events")) == (18, [])
    await drain(config)
    assert (len(archived(store)), len(archived(store, "events"))) == (20, 1)


async def test_rows_that_come_meanwhile_hold_up_nothing(
    config: Config, store: Path, writer: Writer, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one is archived the next one comes, and so on."""
    monkeypatch.setattr(ledger, "BATCHES", 5)
    loop, write = asyncio.get_running_loop(), Archive.write

    def slow(archive: Archive, *given: Any, **more: Any) -> Head | None:
        if archive.root.name == "rollouts":
            asyncio.run_coroutine_threadsafe(writer.rows([row("next")]), loop).result(timeout=30)
        return write(archive, *given, **more)

    await writer.rows([row("r-1"), row("r-2")])
    await writer.events(promoted())
    with monkeypatch.context() as steady:
        steady.setattr(Archive, "write", slow)
        done = await drain(config)
    assert done.entries == 3
    assert ids(store) == ["r-1", "r-2"]
    assert len(archived(store, "events")) == 1
    assert [head.link.number for _, head in Archive(store, GROUP, "rollouts").links()] == [1]
    head = Archive(store, GROUP, "events").head()
    assert head is not None
    assert {each.table: each.until > 0 for each in head.link.beside}["rollouts"]  # whole up to then
    await drain(config)
    assert ids(store) == ["r-1", "r-2", "next"]


async def test_what_another_archived_is_not_taken_for_all_there_was(
    config: Config, store: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who had read before the second row came, and was faster."""
    write = Archive.write
    fast: list[Head | None] = []

    def slower(archive: Archive, records: Sequence[Record], head: Head | None, **more: Any) -> Head | None:
        if archive.root.name == "rollouts" and not fast:
            fast.append(write(archive, records[:1], head, **{**more, "cursor": records[0].entry}))
        return write(archive, records, head, **more)

    monkeypatch.setattr(Archive, "write", slower)
    await writer.rows([row("r-1"), row("r-2")])
    await writer.events(promoted())
    await drain(config)
    assert len(fast) == 1
    assert fast[0] is not None
    assert ids(store) == ["r-1", "r-2"]
    assert len(archived(store, "events")) == 1


NOTES = {
    "torn": b'{"number":1,',
    "of no link": b'{"number":0,"paths":[]}',
    "of a link that is gone": b'{"number":1,"paths":[]}',
    "of a name that no file can have": b'{"number":2,"paths":["run=a/day=2026-01-01/1-0_1-0_2_%b.parquet"]}'
    % (b"0" * 300),
    "of a number that is none": b'{"number":2,"paths":["run=a/day=2026-01-01/1-0_1-0_%b_0.parquet"]}' % (b"1" * 5000),
}


@pytest.mark.parametrize("note", NOTES.values(), ids=[*NOTES])
async def test_what_comes_is_archived_whatever_lies_among_the_notes(
    config: Config, store: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch, note: bytes
) -> None:
    archive = Archive(store, GROUP, "rollouts")
    for n in range(2):
        await writer.rows([row(f"r-{n}")])
        await drain(config)
    shutil.rmtree(archive.root / ".chain" / "000000" / "000000001")
    (archive.root / "run=a" / "day=2026-01-01").mkdir(parents=True)
    (archive.root / ".chain" / "000000000-0.noted").write_bytes(note)
    await writer.rows([row("r-2")])
    with monkeypatch.context() as dying:
        dying.setattr(Archive, "append", killed)
        with pytest.raises(Killed):
            await drain(config)
    await writer.events(promoted())
    await drain(config)
    assert [file.rows for file in archive.files().values()] == [1, 1]
    assert len(archived(store, "events")) == 1
    assert len(list((archive.root / ".chain").glob("*.noted"))) == 1  # others are tidied all the same


async def test_events_tell_where_the_others_end_even_when_none_comes(
    config: Config, store: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts, events = Archive(store, GROUP, "rollouts"), Archive(store, GROUP, "events")

    def told() -> tuple[int, str, int, int]:
        head = events.head()
        assert head is not None
        beside = {each.table: each for each in head.link.beside}["rollouts"]
        return beside.number, beside.sha256, beside.until, head.link.number

    def ends() -> tuple[int, str]:
        head = rollouts.head()
        assert head is not None
        return head.link.number, head.sha256

    now = (await writer.client.command("TIME"))[0] * 1000
    await writer.rows([row("a")])
    await drain(config)
    assert told()[:2] == ends()
    assert now <= told()[2] < now + 60_000
    await writer.rows([row("b")])
    await drain(config)
    assert told()[:2] == ends()
    entry = await writer.client.command("XREVRANGE", writer.keys.rollouts, "+", "-", "COUNT", 1)
    last_ms = int(entry[0][0].partition("-")[0])
    monkeypatch.setattr(ledger, "ROW_LATE_S", 0.0)
    await wait_until(lambda: _passed(writer, last_ms))
    await drain(config)
    assert told()[2] > last_ms  # nothing came for so long
    number = told()[3]
    await drain(config)
    assert told()[3] == number  # nothing to say


async def _passed(writer: Writer, milliseconds: int) -> bool:
    return bool((await writer.client.command("TIME"))[0] * 1000 > milliseconds)
