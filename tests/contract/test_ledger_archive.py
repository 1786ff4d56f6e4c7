"""The ledger's way from Redis into the store: nothing lost, nothing twice, nothing trimmed too early."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
from msgspec.structs import replace

from adaptersync.jobs import ledger
from adaptersync.jobs.ledger import drain
from adaptersync_core.archive import NO_RUN, Archive
from adaptersync_core.archived import TABLES, ArchiveTable
from adaptersync_core.config import Config
from adaptersync_core.errors import ConfigError, StoreError, StoreGone
from adaptersync_core.fates import Fates
from adaptersync_core.rollouts import OPEN
from support.ledger import GROUP, RUN, VERSION, Writer, acked, archived, config_of, ids, promoted, row
from support.redis_servers import KINDS


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def config(redis_url: str, store: Path) -> Config:
    return config_of(redis_url, store)


async def test_every_entry_is_archived_once_as_it_was(config: Config, store: Path, writer: Writer, small: None) -> None:
    rows = [row(f"r-{n:x}", prompt_tokens=n, voided=n == 3, hold_s=0.25) for n in range(20)]
    entries = await writer.rows(rows)
    assert (await drain(config)).entries == 20
    found = archived(store)
    assert [line["entry"] for line in found] == entries
    assert [line["request_id"] for line in found] == [each.request_id for each in rows]
    assert [line["prompt_tokens"] for line in found] == list(range(20))
    assert [line["voided"] for line in found].index(True) == 3
    assert found[0]["rank"] is None
    assert found[0]["written_at"].timestamp() == int(entries[0].partition("-")[0]) / 1000
    assert (await drain(config)).entries == 0
    await writer.rows([row("r-14")])
    assert (await drain(config)).entries == 1
    assert len(ids(store)) == 21


async def test_files_are_by_run_and_day(config: Config, store: Path, writer: Writer) -> None:
    await writer.rows([row("a")], entry="1700000000000-0")
    await writer.rows([row("b", run="other", version="", digest="")], entry="1700000000000-1")
    await writer.rows([row("c", run="../out", outcome="refused")], entry="1700100000000-0")
    await writer.rows([row("d", run="", version="")], entry="1700100000000-1")
    await drain(config)
    files = Archive(store, GROUP, "rollouts").files()
    assert [path.rpartition("_")[0] for path in sorted(files)] == [
        f"run={NO_RUN}/day=2023-11-16/1700000000000-0_1700100000000-1_1",
        "run=a.run/day=2023-11-14/1700000000000-0_1700100000000-1_1",
        "run=other/day=2023-11-14/1700000000000-0_1700100000000-1_1",
    ]
    assert all(path.endswith(f"_{file.sha256[:12]}.parquet") for path, file in files.items())
    assert ids(store) == ["a", "b", "c", "d"]


async def test_fates_and_events_are_archived_too(config: Config, store: Path, writer: Writer) -> None:
    await writer.events(promoted(), acked())
    await writer.fates(
        Fates(run=RUN, epoch=1, step=7, fate="trained", requests=("a", "b")),
        Fates(run=RUN, epoch=1, fate="dropped", reason="too old", requests=("c",)),
    )
    await drain(config)
    fates = [(line["request_id"], line["fate"], line["reason"], line["step"]) for line in archived(store, "fates")]
    assert fates == [("a", "trained", "", 7), ("b", "trained", "", 7), ("c", "dropped", "too old", 0)]
    told = [(line["type"], line["run"], line["version"], line["engine_epoch"]) for line in archived(store, "events")]
    assert told == [("version.promoted", RUN, VERSION, ""), ("replica.acked", RUN, VERSION, "life-1")]
    assert '"proof":"proved"' in archived(store, "events")[1]["fields"]


async def test_what_cannot_be_read_is_kept_as_it_is(config: Config, store: Path, writer: Writer) -> None:
    await writer.client.command("XADD", writer.keys.rollouts, "*", "row", "{", "more", "\udcff")
    await writer.client.command("XADD", writer.keys.fates, "*", "fate", "eaten")
    await drain(config)
    (line,) = archived(store)
    assert line["request_id"] is None
    assert line["unread"].startswith('{"row":"{"')
    assert archived(store, "fates")[0]["unread"] == '{"fate":"eaten"}'


async def old(writer: Writer, numbers: range, *, stream: str = "") -> None:
    """Rows of some time ago."""
    for n in numbers:
        await writer.rows([row(f"r-{n:x}")], entry=f"{1_700_000_000_000 + n}-0")


async def length(writer: Writer) -> int:
    return int(await writer.client.command("XLEN", writer.keys.rollouts))


async def test_it_trims_what_is_archived_and_old(config: Config, store: Path, writer: Writer) -> None:
    await old(writer, range(1000))
    await writer.rows([row("new")])
    done = await drain(config)
    assert done.trimmed >= 800  # whole nodes of the stream
    assert await length(writer) + done.trimmed == 1001
    assert len(ids(store)) == 1001
    await drain(config)
    assert len(ids(store)) == 1001


async def test_what_is_young_stays_in_redis(config: Config, writer: Writer) -> None:
    await writer.rows([row(f"r-{n:x}") for n in range(1000)])
    assert (await drain(config)).trimmed == 0
    assert await length(writer) == 1000


async def test_nothing_is_trimmed_that_is_not_archived(
    config: Config, store: Path, writer: Writer, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "BATCHES", 100)
    await old(writer, range(1000))
    await drain(config)
    kept = 1000 - 600
    assert len(ids(store)) == 600
    left = await writer.client.command("XRANGE", writer.keys.rollouts, "-", "+")
    assert len(left) >= kept
    await drain(config)
    assert ids(store) == [f"r-{n:x}" for n in range(1000)]


async def test_many_events_stay_whatever_their_age(
    config: Config, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "EVENTS_KEPT", 200)
    for n in range(1000):
        await writer.client.command("XADD", writer.keys.events, f"{1_700_000_000_000 + n}-0", "type", "x")
    await drain(config)
    assert 200 <= await writer.client.command("XLEN", writer.keys.events) < 500


async def set_back(writer: Writer, keep: int) -> None:
    """As a server that was put back to an older file: the stream ends earlier, and so does what it counts."""
    entries = await writer.client.command("XRANGE", writer.keys.rollouts, "-", "+", "COUNT", keep)
    await writer.client.command("DEL", writer.keys.rollouts)
    for entry, fields in entries:
        pairs = [text for pair in fields.items() for text in pair]
        await writer.client.command("XADD", writer.keys.rollouts, entry, *pairs)


async def test_a_stream_that_was_set_back_is_read_again(
    config: Config, store: Path, writer: Writer, small: None
) -> None:
    """By a server whose clock is behind: what comes in has ids that were read over."""
    for n in range(10):
        await writer.rows([row(f"r-{n:x}")], entry=f"{5000 + n * 10}-0")
    await drain(config)
    await set_back(writer, 4)
    await writer.rows([row("late")], entry="5035-0")
    assert (await drain(config)).entries == 1
    await writer.rows([row("later")], entry="5036-0")
    await writer.rows([row("r-9")], entry="5095-0")  # by its router, once more
    await drain(config)
    assert sorted(ids(store)) == sorted([*(f"r-{n:x}" for n in range(10)), "late", "later", "r-9"])


async def test_a_stream_of_another_term_is_read_again(config: Config, store: Path, writer: Writer) -> None:
    """What was lost, and what came since, may have reached beyond where it was read."""
    for n in range(10):
        await writer.rows([row(f"r-{n:x}")], entry=f"{5000 + n * 10}-0")
    await drain(config)
    await set_back(writer, 4)
    await writer.rows([row("late")], entry="5035-0")
    await writer.rows([row("new")], entry="6000-0")
    await writer.client.command("HSET", writer.keys.control, "incarnation", "another")
    await drain(config)
    assert ids(store).count("late") == ids(store).count("new") == 1
    assert len(ids(store)) == 12
    assert (await drain(config)).entries == 0


async def test_a_stream_that_was_emptied_is_followed_from_its_beginning(
    config: Config, store: Path, writer: Writer
) -> None:
    await writer.rows([row("a")])
    await drain(config)
    await writer.client.command("DEL", writer.keys.rollouts)
    await drain(config)
    await writer.rows([row("b")], entry="7-0")
    await drain(config)
    links = [head.link.number for _, head in Archive(store, GROUP, "rollouts").links()]
    assert links == [1, 2, 3]
    assert sorted(ids(store)) == ["a", "b"]


async def test_two_at_once_archive_it_once(config: Config, store: Path, writer: Writer, small: None) -> None:
    await writer.rows([row(f"r-{n:x}") for n in range(60)])
    await asyncio.gather(drain(config), drain(config), drain(config))
    assert ids(store) == [f"r-{n:x}" for n in range(60)]
    numbers = [head.link.number for _, head in Archive(store, GROUP, "rollouts").links()]
    assert numbers == list(range(1, len(numbers) + 1))


class Killed(BaseException):
    pass


def killed(*_: object) -> None:
    raise Killed


async def test_what_a_death_left_goes_when_its_batch_has_grown_meanwhile(
    config: Config, store: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await writer.rows([row("r-1")])
    with monkeypatch.context() as dying:
        dying.setattr(Archive, "append", killed)
        with pytest.raises(Killed):
            await drain(config)
    assert len(list(store.rglob("*.parquet"))) == 1  # noqa: ASYNC240
    await writer.rows([row("r-2")])
    await drain(config)
    assert ids(store) == ["r-1", "r-2"]
    assert list(store.rglob("*.noted")) == []  # noqa: ASYNC240


async def test_days_that_are_over_become_one_file(config: Config, store: Path, writer: Writer, small: None) -> None:
    await old(writer, range(50))
    await drain(config)
    before = archived(store)
    assert len(Archive(store, GROUP, "rollouts").files()) == 9
    await writer.rows([row("new")])
    assert (await drain(config)).merged == 9
    assert len(Archive(store, GROUP, "rollouts").files()) == 2
    assert archived(store)[:50] == before


async def test_files_of_a_release_before_are_merged_and_known_too(
    config: Config, store: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = TABLES["rollouts"]
    before = {name: kind for name, kind in table.columns.items() if name != "prompt"}
    await old(writer, range(2))
    with monkeypatch.context() as earlier:
        earlier.setitem(cast(dict[str, ArchiveTable], TABLES), "rollouts", replace(table, columns=before))
        await drain(config)
    await writer.rows([row("r-2", prompt="5e1f")], entry=f"{1_700_000_000_005}-0")
    await drain(config)
    await writer.client.command("HSET", writer.keys.control, "incarnation", "another")
    await writer.rows([row("new")])
    assert (await drain(config)).merged == 2
    assert [(line["request_id"], line["prompt"]) for line in archived(store)] == [
        ("r-0", None),
        ("r-1", None),
        ("r-2", "5e1f"),
        ("new", ""),
    ]


async def test_what_was_changed_is_not_merged_and_all_else_is(
    config: Config, store: Path, writer: Writer, small: None
) -> None:
    await old(writer, range(50))
    await drain(config)
    archive = Archive(store, GROUP, "rollouts")
    path = archive.root / next(iter(archive.files()))
    path.write_bytes(path.read_bytes() + b"x")
    await writer.rows([row("new")])
    await writer.events(promoted())
    with pytest.raises(StoreError, match=r"rollouts: file of the ledger is not what was archived .*damaged=1"):
        await drain(config)
    assert len(archive.files()) == 3  # the damaged one, the rest of its day, and today's
    assert len(archived(store, "events")) == 1
    await drain(config)  # that is said once a day
    assert len(archive.files()) == 3


async def test_what_one_run_cannot_merge_the_next_one_does(
    config: Config, store: Path, writer: Writer, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "FILES", 3)
    monkeypatch.setattr(ledger, "MERGES", 5)
    await old(writer, range(50))
    await drain(config)
    before = archived(store)
    await writer.rows([row("new")])
    assert [(await drain(config)).merged for _ in range(4)] == [3, 3, 5, 0]
    assert archived(store)[:50] == before
    links = len(list(Archive(store, GROUP, "rollouts").links()))
    await drain(config)
    assert len(list(Archive(store, GROUP, "rollouts").links())) == links


async def test_what_a_death_left_is_archived_later_and_stays(
    config: Config, store: Path, writer: Writer, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch that was on its way becomes that of another link, since all was read again in between."""
    await writer.rows([row(f"r-{n:x}") for n in range(12)])
    await drain(config)
    await writer.rows([row("left")])
    with monkeypatch.context() as dying:
        dying.setattr(Archive, "append", killed)
        with pytest.raises(Killed):
            await drain(config)
    await writer.client.command("HSET", writer.keys.control, "incarnation", "another")
    await drain(config)
    assert ids(store) == [*(f"r-{n:x}" for n in range(12)), "left"]
    assert list(store.rglob("*.noted")) == []  # noqa: ASYNC240


async def test_nothing_is_written_where_the_store_is_not(config: Config, store: Path, writer: Writer) -> None:
    await writer.rows([row("a")])
    await drain(config)
    await asyncio.to_thread(store.rename, store.with_name("unmounted"))
    await asyncio.to_thread(store.mkdir)
    with pytest.raises(StoreGone):
        await drain(config)
    assert os.listdir(store) == []


async def test_without_pyarrow_it_says_what_to_install(
    config: Config, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adaptersync_core.archive.installed", lambda: False)
    with pytest.raises(ConfigError, match=r"adaptersync\[ledger\]"):
        await drain(config)


async def test_an_open_row_and_its_end_are_both_kept(config: Config, store: Path, writer: Writer) -> None:
    await writer.rows([row("a", OPEN, status=0)])
    await drain(config)
    await writer.rows([row("a")])
    await drain(config)
    assert [line["outcome"] for line in archived(store)] == [OPEN, "ok"]


@pytest.mark.parametrize("redis_kind", KINDS[:1])  # what the server is makes no difference here, and it takes long
@pytest.mark.timeout(300)
async def test_killed_at_any_call_it_loses_nothing_and_keeps_nothing_twice(
    config: Config, store: Path, writer: Writer
) -> None:
    program = Path(__file__).parents[1] / "support" / "dying_drain.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [sys.executable, str(program), config.redis.control_url, str(store)]
    nodes = await writer.client.command("CONFIG", "GET", "stream-node-max-entries")
    try:
        run = await asyncio.to_thread(
            subprocess.run, arguments, capture_output=True, text=True, timeout=280, env=environment
        )
    finally:
        await writer.client.command("CONFIG", "SET", *nodes)
    assert run.returncode == 0, run.stderr[-3000:]
    died, written, trimmed = map(int, run.stdout.split())
    assert died > 100
    assert written > 20
    assert trimmed > 0
