"""Whatever is changed in the archive is a line and an exit status; what a worker left there is none."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

from adaptersync.jobs import ledger
from adaptersync.jobs.ledger import drain
from adaptersync_core import chain
from adaptersync_core.archive import Archive
from adaptersync_core.chain import Head
from adaptersync_core.config import Config
from adaptersync_core.fates import Fates
from adaptersync_tools.audit import chain as read
from support.audited import run, told
from support.ledger import GROUP, RUN, Writer, config_of, keep, promoted, row


@pytest.fixture
def config(redis_url: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    keep(tmp_path / "store", tmp_path_factory.mktemp("scratch"))
    return config_of(redis_url, tmp_path / "store")


@pytest.fixture
async def honest(config: Config, writer: Writer, monkeypatch: pytest.MonkeyPatch) -> Archive:
    """Several links and files; no contradiction."""
    monkeypatch.setattr(ledger, "PAGE", 2)
    monkeypatch.setattr(ledger, "BATCH", 2)
    rows = [row(f"aa-{n:x}", prompt_tokens=n) for n in range(1, 9)]
    await writer.fates(Fates(run=RUN, epoch=1, step=1, fate="trained", requests=("aa-7", "aa-8")))
    assert await told(config, writer, *rows) == []
    return Archive(Path(config.store.path), GROUP, "rollouts")


def link(archive: Archive, number: int) -> Path:
    return archive.root / ".chain" / "000000" / f"{number:09d}"


def one(archive: Archive, number: int = 2) -> Path:
    return archive.root / [head for _, head in archive.links()][number - 1].link.files[0].path


def rewrite(archive: Archive, change: Callable[[pa.Table], pa.Table]) -> None:
    pq.write_table(change(pq.read_table(one(archive), partitioning=None)), one(archive), compression="zstd")


def row_changed(archive: Archive) -> None:
    def change(table: pa.Table) -> pa.Table:
        place = table.schema.get_field_index("prompt_tokens")
        return table.set_column(place, "prompt_tokens", pa.array([7] * table.num_rows, pa.int64()))

    rewrite(archive, change)


def row_missing(archive: Archive) -> None:
    rewrite(archive, lambda table: table.slice(1))


def row_doubled(archive: Archive) -> None:
    rewrite(archive, lambda table: pa.concat_tables([table, table.slice(0, 1)]))


def file_missing(archive: Archive, number: int = 2) -> None:
    one(archive, number).unlink()


def file_copied(archive: Archive) -> None:
    shutil.copy(one(archive), one(archive).with_name("1-0_2-0.parquet"))


def file_added(archive: Archive, number: int) -> str:
    """By somebody who knows how names are made."""
    path = one(archive).with_name(f"1-0_2-0_{number}_0123456789ab.parquet")
    shutil.copy(one(archive), path)
    return path.relative_to(archive.root).as_posix()


def file_hidden_by_a_note(archive: Archive) -> None:
    """Of a link that does not come next, so that nothing ever ends it."""
    number = len(list(archive.links())) + 2
    note = {"number": number, "paths": [file_added(archive, number)]}
    (archive.root / ".chain" / f"{number:09d}-0.noted").write_text(json.dumps(note))


def file_hidden_by_a_torn_note(archive: Archive) -> None:
    number = len(list(archive.links())) + 1
    file_added(archive, number)
    (archive.root / ".chain" / f"{number:09d}-0.noted").write_text('{"number":')


def link_missing(archive: Archive) -> None:
    shutil.rmtree(link(archive, 2))


def link_changed(archive: Archive) -> None:
    path = link(archive, 2) / "link.json"
    path.write_text(path.read_text().replace('"entries":2', '"entries":3'))


def link_torn(archive: Archive) -> None:
    path = link(archive, 2) / "link.json"
    path.write_text(path.read_text()[:20])


def entry_archived_again(archive: Archive) -> None:
    """By somebody who knows how: a file of the same rows, and a link that follows the last."""
    head = archive.head()
    assert isinstance(head, Head)
    file = [each for _, each in archive.links()][1].link.files[0]
    path = file.path.replace(".parquet", "_1.parquet")
    shutil.copy(archive.root / file.path, archive.root / path)
    again = replace(head.link, number=head.link.number + 1, previous=head.sha256, files=(replace(file, path=path),))
    assert archive.append(again)


def table_removed(archive: Archive) -> None:
    shutil.rmtree(archive.root)


def tail_cut(archive: Archive) -> None:
    one(archive, 4).unlink()
    shutil.rmtree(link(archive, 4))


def tail_cut_and_gone_on(archive: Archive) -> None:
    """By somebody who knows how: the chain agrees with itself."""
    tail_cut(archive)
    assert archive.write([], archive.head())


def events(archive: Archive) -> Archive:
    return Archive(archive.root.parents[2], GROUP, "events")


def end_of_events_cut(archive: Archive) -> None:
    """The last table of a drain."""
    number = len(list(events(archive).links()))
    file_missing(events(archive), number)
    shutil.rmtree(link(events(archive), number))


def end_of_events_cut_and_gone_on(archive: Archive) -> None:
    end_of_events_cut(archive)
    assert events(archive).write([], events(archive).head())


def ends_torn(archive: Archive) -> None:
    (archive.root.parent / ".ends.json").write_text("{")


def file_hidden_by_its_name(archive: Archive) -> None:
    shutil.copy(one(archive), one(archive).with_name(".1-0_2-0.parquet"))


def run_elsewhere(archive: Archive) -> None:
    """Whoever queries the files follows it."""
    elsewhere = archive.root.parents[2] / "elsewhere" / "day=2026-01-01"
    elsewhere.mkdir(parents=True)
    shutil.copy(one(archive), elsewhere)
    (archive.root / "run=evil").symlink_to(elsewhere.parent)


def file_is_a_directory(archive: Archive) -> None:
    path = one(archive)
    path.unlink()
    path.mkdir()


def file_is_a_pipe(archive: Archive) -> None:
    path = one(archive)
    path.unlink()
    os.mkfifo(path)


def file_is_no_parquet(archive: Archive) -> None:
    """And its link knows its digest."""
    content = b"junk"
    one(archive).write_bytes(content)
    place = link(archive, 2) / "link.json"
    told = json.loads(place.read_text())
    told["files"][0]["sha256"] = hashlib.sha256(content).hexdigest()
    place.write_text(json.dumps(told))


def link_is_a_pipe(archive: Archive) -> None:
    path = link(archive, 2) / "link.json"
    path.unlink()
    os.mkfifo(path)


def link_is_empty(archive: Archive) -> None:
    link(archive, 5).mkdir()


def link_of_no_entry(archive: Archive) -> None:
    path = link(archive, 4) / "link.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "highest": "abc"}))


def link_of_another_number(archive: Archive) -> None:
    link(archive, 4).with_name("²").mkdir()
    file_missing(archive)


def thousand_is_a_file(archive: Archive) -> None:
    (archive.root / ".chain" / "000001").write_text("")


def note_is_a_pipe(archive: Archive) -> None:
    os.mkfifo(archive.root / ".chain" / "000000005-0.noted")
    file_copied(archive)


TAMPERING = [
    (end_of_events_cut, "events: .ends.json tells of link"),
    (end_of_events_cut_and_gone_on, "is not the one that .ends.json tells of"),
    (ends_torn, "file that tells where the chains end cannot be read"),
    (file_hidden_by_its_name, ".1-0_2-0.parquet was added"),
    (run_elsewhere, "run=evil was added: it leads elsewhere"),
    (file_is_a_directory, "cannot be read: Is a directory"),
    (file_is_a_pipe, "cannot be read: no plain file"),
    (file_is_no_parquet, "link 3 does not follow the one before"),
    (link_is_a_pipe, "link of the ledger's chain cannot be read"),
    (link_is_empty, "link of the ledger's chain cannot be read"),
    (link_of_no_entry, "link of the ledger's chain cannot be read"),
    (link_of_another_number, "is missing, with 2 rows"),
    (thousand_is_a_file, ".chain/000001 is no directory"),
    (note_is_a_pipe, "was added"),
    (table_removed, "table events tells of link 4, and the table is gone"),
    (tail_cut, "table events tells of link 4, and the chain ends at 3"),
    (tail_cut_and_gone_on, "link 4 is not the one that table events tells of"),
    (row_changed, "was changed"),
    (row_missing, "was changed"),
    (row_doubled, "was changed"),
    (file_missing, "is missing, with 2 rows"),
    (file_copied, "was added"),
    (file_hidden_by_a_note, "was added"),
    (file_hidden_by_a_torn_note, "was added"),
    (link_missing, "link 2 of the chain missing"),
    (link_changed, "link 3 does not follow the one before"),
    (link_torn, "cannot be read"),
    (entry_archived_again, "is archived twice"),
]


@pytest.mark.parametrize(("change", "line"), TAMPERING, ids=[change.__name__ for change, _ in TAMPERING])
async def test_tampering_is_found(
    config: Config, honest: Archive, change: Callable[[Archive], None], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run(config, "verify", RUN) == 0
    assert "no contradiction" in capsys.readouterr().out
    change(honest)
    assert await run(config, "verify", RUN) == 1
    assert line in capsys.readouterr().out


async def test_what_was_changed_is_not_exported(config: Config, honest: Archive, tmp_path: Path) -> None:
    row_changed(honest)
    out = tmp_path / "run.parquet"
    assert await run(config, "export", RUN, "--out", str(out)) == 74
    assert await run(config, "show", RUN) == 74
    assert [path.name for path in tmp_path.glob("*run.parquet*")] == []  # noqa: ASYNC240


async def test_chains_that_were_all_set_back_are_found_by_a_head_that_was_noted(
    config: Config, honest: Archive, writer: Writer, capsys: pytest.CaptureFixture[str]
) -> None:
    group = honest.root.parent
    await asyncio.to_thread(shutil.copytree, group, group.with_name("before"))
    await writer.rows([row("aa-9")])
    await drain(config)
    head = honest.head()
    assert head is not None
    noted = f"rollouts:{head.link.number}:{head.sha256[:12]}"
    assert await run(config, "verify", RUN, "--head", noted) == 0
    await asyncio.to_thread(shutil.rmtree, group)
    await asyncio.to_thread(group.with_name("before").rename, group)
    assert await run(config, "verify", RUN) == 0  # nothing in the store tells of it
    assert await run(config, "verify", RUN, "--head", noted) == 1
    assert f"link {head.link.number} was noted, and the chain ends at 4" in capsys.readouterr().out
    assert await run(config, "verify", RUN, "--head", "rollouts:1:abcdef") == 1


async def test_a_worker_may_go_on_meanwhile(config: Config, honest: Archive, writer: Writer) -> None:
    ends = read.Ends()
    assert list(read.contradictions(honest, {}, ends)) == []
    await writer.rows([row("aa-9")])
    await drain(config)
    events = Archive(Path(config.store.path), GROUP, "events")
    assert list(read.contradictions(events, {}, ends)) == []
    assert list(ends.contradictions()) == []


async def test_what_was_told_of_an_end_is_not_unsaid(config: Config, honest: Archive, writer: Writer) -> None:
    end_of_events_cut(honest)
    await writer.rows([row("aa-9")])
    await writer.events(promoted())
    await drain(config)
    assert await run(config, "verify", RUN) == 1
    (honest.root.parent / ".ends.json").unlink()  # by who knows why; Redis still had those events
    assert await run(config, "verify", RUN) == 0


class Killed(BaseException):
    pass


def killed(*_: object) -> None:
    raise Killed


async def test_what_a_worker_left_as_it_died_is_no_tampering(
    config: Config,
    honest: Archive,
    writer: Writer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    await writer.rows([row("aa-9")])
    with monkeypatch.context() as dying:
        dying.setattr(Archive, "append", killed)
        with pytest.raises(Killed):
            await drain(config)
    assert len(list(honest.root.rglob("*.parquet"))) == 5
    assert await run(config, "verify", RUN) == 0
    assert "1 files are of no link yet" in capsys.readouterr().out
    await drain(config)
    assert await run(config, "verify", RUN) == 0
    assert "of no link" not in capsys.readouterr().out


async def test_what_was_merged_and_is_not_removed_yet_is_no_tampering(
    config: Config, honest: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, files = honest.head(), list(honest.files().values())[:2]
    assert head is not None
    with monkeypatch.context() as dying:
        dying.setattr(Archive, "_discard", killed)
        with pytest.raises(Killed):
            honest.merge(files, [honest.checked(file) for file in files], head)
    assert all((honest.root / file.path).exists() for file in files)
    assert await run(config, "verify", RUN) == 0


async def test_what_is_wrong_elsewhere_is_told_though_a_chain_cannot_be_read(
    config: Config, honest: Archive, capsys: pytest.CaptureFixture[str]
) -> None:
    for archive, number in ((events(honest), 1), (Archive(Path(config.store.path), GROUP, "fates"), 1), (honest, 4)):
        file_missing(archive, number)
    link_torn(honest)
    assert await run(config, "verify", RUN) == 1
    told = capsys.readouterr().out
    assert "rollouts: run=a.run" in told
    assert all(f"{table}: run=" in told for table in ("events", "fates")), told
    assert "rollouts: link of the ledger's chain cannot be read" in told
    assert await run(config, "verify", RUN, "--json") == 1
    assert json.loads(capsys.readouterr().out)["rollouts"] == 4  # but for what that link and that file had


async def test_files_that_are_merged_meanwhile_are_not_missed(honest: Archive) -> None:
    """Between what was read of the chain and the look at its files."""
    before, head = honest.files(), honest.head()
    assert head is not None
    files = list(before.values())[:2]
    assert honest.merge(files, [honest.checked(file) for file in files], head) is not None
    assert list(read.files(honest, before)) == []
    (honest.root / next(reversed(before))).unlink()
    assert [line.rpartition(" is ")[2] for line in read.files(honest, before)] == ["missing, with 2 rows"]


async def test_a_link_that_is_torn_meanwhile_is_a_line(honest: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the chain and the one at its files."""
    pending = honest.pending

    def torn() -> set[str]:
        link_torn(honest)
        return pending()

    file_copied(honest)
    monkeypatch.setattr(honest, "pending", torn)
    (line,) = read.contradictions(honest, {}, read.Ends())
    assert line.startswith("rollouts: link of the ledger's chain cannot be read")


async def test_a_list_of_files_that_was_changed_is_found(
    config: Config, honest: Archive, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chain, "SHARD", 6)
    for _ in range(2):
        assert honest.write([], honest.head())
    assert await run(config, "verify", RUN) == 0
    path = honest.root / ".chain" / "000001" / "000000006" / "files.json"
    listed = path.read_text()
    path.write_text(listed.replace('"rows":2', '"rows":3'))
    assert await run(config, "verify", RUN) == 1
    assert "the list of files beside link 6 was changed" in capsys.readouterr().out


async def test_a_run_whose_whole_ledger_was_removed_is_not_found_clean(config: Config, honest: Archive) -> None:
    shutil.rmtree(honest.root.parent)
    assert await run(config, "verify", RUN) == 64


async def test_verify_tells_programs_what_it_found(
    config: Config, honest: Archive, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run(config, "verify", RUN, "--json") == 0
    view = json.loads(capsys.readouterr().out)
    assert (view["ok"], view["rollouts"], view["contradictions"]) == (True, 8, 0)
    assert view["heads"]["rollouts"].startswith("4:")
    file_missing(honest)
    assert await run(config, "verify", RUN, "--json") == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


async def test_a_run_that_nobody_knows_is_no_clean_run(config: Config, honest: Archive) -> None:
    assert await run(config, "verify", "unknown") == 64
