"""Whatever an entry is, and whatever became of a file: the archive goes on, and nothing is lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest

from adaptersync.jobs import ledger
from adaptersync.jobs.ledger import Drain, drain
from adaptersync_core.archive import Archive
from adaptersync_core.config import Config
from adaptersync_core.errors import StoreError
from adaptersync_core.fates import Fates
from adaptersync_core.rollouts import FIELD
from support.ledger import GROUP, RUN, Writer, archived, config_of, ids, promoted, row

LAST = f"{2**64 - 1}-{2**64 - 1}"  # that there can be
BEYOND = "999999999999999-0"  # the year 33658
FUTURE = "4102444800000-0"  # 2100-01-01


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def config(redis_url: str, store: Path) -> Config:
    return config_of(redis_url, store)


@pytest.mark.parametrize("entry", [BEYOND, FUTURE, LAST])
@pytest.mark.parametrize("table", ["fates", "rollouts", "events"])
async def test_an_entry_of_any_id_is_archived_and_all_others_are(
    config: Config, store: Path, writer: Writer, table: str, entry: str
) -> None:
    await writer.rows([row("r-1")])
    await writer.events(promoted())
    await writer.fates(Fates(run=RUN, epoch=1, fate="trained", requests=("r-1",)))
    stream = getattr(writer.keys, table)
    await writer.client.command("XADD", stream, entry, "type", "x")
    for _ in range(2):
        await drain(config)
    found = {name: [line["entry"] for line in archived(store, name)] for name in ("fates", "rollouts", "events")}
    assert {name: len(entries) for name, entries in found.items()} == dict.fromkeys(found, 1) | {table: 2}
    assert found[table][-1] == entry
    await writer.client.command("DEL", stream)  # as whoever mends it may
    await writer.client.command("XADD", stream, "*", "type", "y")
    await drain(config)
    assert len(archived(store, table)) == 3


HUGE = {
    "fates": {"run": RUN, "epoch": "1", "step": str(10**30), "fate": "trained", "requests": "r-1"},
    "rollouts": {FIELD: msgspec.json.encode(row("r-1", status=2**63)).decode()},
}


@pytest.mark.parametrize("table", [*HUGE])
async def test_a_number_that_no_column_holds_is_kept_unread(
    config: Config, store: Path, writer: Writer, table: str
) -> None:
    await writer.events(promoted())
    fields = HUGE[table]
    await writer.client.command(
        "XADD", getattr(writer.keys, table), "*", *[text for pair in fields.items() for text in pair]
    )
    await writer.rows([row("r-2", status=2**31)])
    await drain(config)
    (line,) = [line for line in archived(store, table) if line["request_id"] != "r-2"]
    assert (line["request_id"], msgspec.json.decode(line["unread"])) == (None, fields)
    assert (ids(store)[-1], len(archived(store, "events"))) == ("r-2", 1)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """The server's clock, as the drain reads it, is so many seconds ahead."""
    now_ms = Drain._now_ms

    def ahead(seconds: float) -> None:
        async def read(self: Drain) -> int:
            return await now_ms(self) + int(seconds * 1000)

        monkeypatch.setattr(Drain, "_now_ms", read)

    return ahead


async def test_rows_with_ids_of_the_future_are_trimmed_once_they_were_archived_long_enough(
    config: Config, writer: Writer, later: Callable[[float], None]
) -> None:
    await writer.rows([row("r-0")], entry=FUTURE)  # and so all that come after it
    for age, trimmed in ((0, 0), (1800, 0), (3000, 0), (3601, 450), (3602, 0), (5401, 450)):
        later(age)
        await writer.rows([row(f"r-{age}-{n:x}") for n in range(500 if age < 3600 else 1)])
        done = await drain(config)
        assert trimmed <= done.trimmed <= (599 if trimmed else 0), (age, done)


async def test_days_of_the_future_become_one_file_too(
    config: Config, store: Path, writer: Writer, later: Callable[[float], None]
) -> None:
    await writer.rows([row("r-0")], entry=FUTURE)
    for n in range(3):
        await writer.rows([row(f"r-{n + 1}")])
        await drain(config)
    files = Archive(store, GROUP, "rollouts").files
    before = len(files())
    later(86_400)
    await drain(config)
    assert (before, len(files())) == (3, 1)
    assert sorted(ids(store)) == [f"r-{n}" for n in range(4)]


def gone(path: Path) -> None:
    path.unlink()


def garbage(path: Path) -> None:
    path.write_bytes(b"garbage")


def another(path: Path) -> None:
    """A file that can be read, and is not what was archived."""
    pq.write_table(pq.read_table(path, partitioning=None).slice(1), path)


@pytest.mark.parametrize("damage", [gone, garbage, another])
async def test_a_damaged_file_keeps_nothing_from_being_archived_when_all_is_read_again(
    config: Config, store: Path, writer: Writer, damage: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "BATCH", 2)
    monkeypatch.setattr(ledger, "PAGE", 2)
    await writer.rows([row(f"r-{n}") for n in range(4)])
    await drain(config)
    archive = Archive(store, GROUP, "rollouts")
    path = sorted(archive.files())[0]
    damage(archive.root / path)
    await writer.client.command("HSET", writer.keys.control, "incarnation", "another")
    await writer.rows([row("new")])
    await writer.events(promoted())
    with pytest.raises(StoreError, match=r"rollouts: file of the ledger .*damaged=1"):
        await drain(config)
    assert len(archived(store, "events")) == 1
    await drain(config)  # that is said once
    left = [file for file in archive.files().values() if file.path != path]
    found = [line["request_id"] for file in left for line in archive.checked(file).to_pylist()]
    assert sorted(found) == ["new", *(f"r-{n}" for n in range(4))]  # what it held is there once more


async def test_what_was_half_written_goes_when_a_day_is_over(
    config: Config, store: Path, writer: Writer, later: Callable[[float], None]
) -> None:
    await writer.rows([row("r-1")])
    await drain(config)
    archive = Archive(store, GROUP, "rollouts")
    (path,) = archive.files()
    half = (archive.root / path).with_name(f".{Path(path).name}.391ca203")
    half.write_bytes(b"half")
    os.utime(half, (1.0, 1.0))
    await drain(config)
    assert half.exists()  # all that is there is looked at once a day
    await writer.rows([row("r-2")], entry=FUTURE)
    later(86_400)
    await drain(config)
    assert not half.exists()
