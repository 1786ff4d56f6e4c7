"""An honest ledger is found honest, and whatever is changed in it, or contradicts it, is a line and an exit status."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
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
from adaptersync_core.events import (
    ControlRestored,
    Event,
    VersionReady,
    VersionRetired,
    VersionVoided,
    to_fields,
)
from adaptersync_core.fates import Fates
from adaptersync_core.identity import adapter_id
from adaptersync_core.redis import RedisClient
from adaptersync_core.rollouts import OPEN, UNKNOWN, Row
from adaptersync_tools.audit import chain as read
from adaptersync_tools.audit import rollouts as reading
from adaptersync_tools.audit.verify import Audit
from adaptersync_tools.chaos.audit import audit as of_chaos
from adaptersync_tools.cli import adaptersync
from adaptersync_tools.cli.common import run_command
from support.audited import HISTORY, published, told
from support.ledger import DIGEST, GROUP, RUN, VERSION, Writer, acked, config_of, keep, promoted, row

OTHER = adapter_id(RUN, 2, "f" * 64)
LONG_AGO = 1_700_000_000_000


@pytest.fixture
def store(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    keep(tmp_path / "store", tmp_path_factory.mktemp("scratch"))
    return tmp_path / "store"


@pytest.fixture
def config(redis_url: str, store: Path) -> Config:
    return config_of(redis_url, store)


@pytest.fixture
async def writer(redis_url: str) -> AsyncIterator[Writer]:
    client = RedisClient(redis_url, name="test")
    yield Writer(client)
    await client.close()


async def test_an_honest_ledger_has_no_contradiction(
    config: Config, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "PAGE", 3)
    monkeypatch.setattr(ledger, "BATCH", 6)
    monkeypatch.setattr(reading, "ROWS", 7)  # several passes
    rows = [row(f"aa-{n:x}", prompt_tokens=4) for n in range(1, 20)]
    rows += [row("bb-1", OPEN, status=0), row("bb-2", OPEN), row("bb-1"), rows[3]]
    rows += [row("bb-3", "refused", status=503, replica="", version="", digest="")]
    await writer.fates(
        Fates(run=RUN, epoch=1, step=3, fate="dropped", reason="too old", requests=("aa-1", "aa-2")),
        Fates(run=RUN, epoch=1, step=4, fate="trained", requests=("aa-2", "aa-3")),
    )
    await writer.events(*HISTORY)
    await writer.rows(rows)
    await drain(config)
    audit = Audit(Path(config.store.path), GROUP, RUN)
    assert list(audit.contradictions()) == []
    counts = audit.counts
    assert (counts.rollouts, counts.rows, counts.unknown, counts.unproven) == (22, 24, 1, 0)
    assert (counts.trained, counts.dropped) == (2, 1)


WRONG: list[tuple[str, tuple[Row, ...], tuple[Event, ...], str]] = [
    ("digest", (row("a-1", digest="0123456789ab" + "1" * 52),), HISTORY, f"announced is {DIGEST}"),
    ("name", (row("a-1", digest="f" * 64),), (), "and was served by"),
    ("run", (row("a-1", version=adapter_id("b", 1, DIGEST)),), HISTORY, "which is not of run a.run"),
    ("no version", (row("a-1", version="what"),), HISTORY, "cannot name a version"),
    ("never promoted", (row("a-1"),), HISTORY[:2], "before that was promoted"),
    ("at the gate", (row("a-1", gated=True),), HISTORY[:2], "before that was ready"),
    ("never held", (row("a-1", replica="replica-1"),), HISTORY, "never said that it holds it"),
    ("another life", (row("a-1", engine_epoch="life-2"),), HISTORY, "life-2 of its engine, which never said"),
    ("refused", (row("a-1"),), (*HISTORY, acked(accepted=False, reason="no")), "which had refused it"),
    ("two ends", (row("a-1"), row("a-1", version=OTHER, digest="f" * 64)), HISTORY, "rows differ in how it ended"),
    ("announced twice", (), (*HISTORY, published(digest="0123456789ab" + "1" * 52)), "and before with"),
    (
        "voided and promoted",
        (),
        (*HISTORY, VersionVoided(version=VERSION, generation=3, reason="", current=""), promoted()),
        "promoted after it was voided",
    ),
]


@pytest.mark.parametrize(("rows", "events", "line"), [each[1:] for each in WRONG], ids=[each[0] for each in WRONG])
async def test_a_contradiction_is_a_line(
    config: Config, writer: Writer, rows: tuple[Row, ...], events: tuple[Event, ...], line: str
) -> None:
    found = await told(config, writer, *rows, events=events)
    assert any(line in each for each in found), found
    assert all("\n" not in each for each in found)


async def test_the_manifest_in_the_store_speaks_of_the_same_bytes(
    config: Config, writer: Writer, store: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shutil.rmtree(store / RUN)
    other = "0123456789ab" + "1" * 52
    keep(store, tmp_path_factory.mktemp("other"), digest=other)
    assert await told(config, writer, row("a-1")) == [
        f"{VERSION}: manifest in the store has digest {other}, announced was {DIGEST}",
        f"a-1: has digest {DIGEST}, in the store is {other}",
    ]


async def test_a_version_that_is_nowhere_must_have_been_given_up(config: Config, writer: Writer, store: Path) -> None:
    shutil.rmtree(store / RUN)
    assert await told(config, writer, row("a-1")) == [
        f"{VERSION}: store has no such version, and nothing says that it was retired"
    ]
    await writer.events(VersionRetired(version=VERSION, generation=3))
    assert await told(config, writer, events=(promoted(),)) == []


async def test_who_asks_at_the_gate_may_be_served_before_promotion(config: Config, writer: Writer) -> None:
    ready = VersionReady(version=VERSION, generation=1, replicas="replica-0")
    assert await told(config, writer, row("a-1", gated=True), events=(*HISTORY[:2], ready)) == []


@pytest.mark.parametrize("gone", ["retired", "voided"])
async def test_a_version_that_is_gone_admits_nothing(config: Config, writer: Writer, gone: str) -> None:
    event: Event = VersionRetired(version=VERSION, generation=3)
    if gone == "voided":
        event = VersionVoided(version=VERSION, generation=3, reason="bad", current="")
    await writer.events(*HISTORY, event)
    now = (await writer.client.command("TIME"))[0]
    late = {"started_at": now + 4000.0}
    await writer.rows([row("a-1", started_at=now - 5.0)])  # in flight, or by a router that had not heard of it
    await writer.rows([row("a-2", started_at=now - 5.0)], entry=f"{(now + 4000) * 1000}-0")  # came in late
    await writer.rows([row("a-3", **late, total_s=1.0)], entry=f"{(now + 4001) * 1000}-0")
    await drain(config)
    found = list(Audit(Path(config.store.path), GROUP, RUN).contradictions())
    assert found == [f"a-3: was admitted to {VERSION} after that was {gone}"]


async def test_entries_of_one_millisecond_have_no_order(config: Config, writer: Writer) -> None:
    """Of two streams, each of which numbers its own."""
    now = (await writer.client.command("TIME"))[0] * 1000
    for number, event in enumerate(HISTORY):
        await writer.client.command("XADD", writer.keys.events, f"{now}-{number + 5}", *to_fields(event))
    await writer.rows([row("a-1")], entry=f"{now}-1")
    assert await told(config, writer, events=(acked("a.run-v9-0123456789ab"),)) == []


async def test_what_redis_lost_cannot_be_missed(config: Config, writer: Writer) -> None:
    await writer.events(HISTORY[0], ControlRestored(incarnation="i", generation=9))
    await writer.rows([row("a-1")])
    await drain(config)
    audit = Audit(Path(config.store.path), GROUP, RUN)
    assert list(audit.contradictions()) == []
    assert audit.counts.unproven == 1


async def test_what_failed_was_not_trained_on(config: Config, writer: Writer) -> None:
    await writer.fates(Fates(run=RUN, epoch=1, fate="trained", requests=("a-1", "a-2")))
    found = await told(config, writer, row("a-1", "upstream_error", status=502), row("a-2", UNKNOWN))
    assert found == ["a-1: trained on, and its outcome is upstream_error"]


async def test_what_is_no_row_is_told(config: Config, writer: Writer) -> None:
    entry = await writer.client.command("XADD", writer.keys.rollouts, "*", "row", "{")
    assert await told(config, writer, row("a-1")) == [f"rollouts: entry {entry} is no row that can be read"]


# --- tampering --------------------------------------------------------------------------------------------------------


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


def file_missing(archive: Archive) -> None:
    one(archive).unlink()


def file_copied(archive: Archive) -> None:
    shutil.copy(one(archive), one(archive).with_name("1-0_2-0.parquet"))


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


TAMPERING = [
    (table_removed, "table events tells of link 4, and the table is gone"),
    (tail_cut, "table events tells of link 4, and the chain ends at 3"),
    (tail_cut_and_gone_on, "link 4 is not the one that table events tells of"),
    (row_changed, "was changed"),
    (row_missing, "was changed"),
    (row_doubled, "was changed"),
    (file_missing, "is missing, with 2 rows"),
    (file_copied, "was added"),
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
    assert await run(config, "verify", RUN) != 0
    told = capsys.readouterr()
    assert line in told.out + told.err


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


async def test_what_a_worker_left_as_it_died_is_no_tampering(
    config: Config, honest: Archive, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    await writer.rows([row("aa-9")])
    with monkeypatch.context() as dying:
        dying.setattr(Archive, "append", killed)
        with pytest.raises(Killed):
            await drain(config)
    assert len(list(honest.root.rglob("*.parquet"))) == 5
    assert await run(config, "verify", RUN) == 0


async def test_files_that_are_merged_meanwhile_are_not_missed(honest: Archive) -> None:
    """Between what was read of the chain and the look at its files."""
    before, head = honest.files(), honest.head()
    assert head is not None
    files = list(before.values())[:2]
    assert honest.merge(files, [honest.checked(file) for file in files], head) is not None
    assert list(read.files(honest, before)) == []
    (honest.root / next(reversed(before))).unlink()
    assert [line.rpartition(" is ")[2] for line in read.files(honest, before)] == ["missing, with 2 rows"]


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


async def run(config: Config, *arguments: str) -> int:
    """`adaptersync audit`, as an operator calls it; of the store alone."""
    path = Path(config.store.path).with_name("adaptersync.toml")
    if not path.exists():
        url = "redis://127.0.0.1:1/0" if arguments[0] != "drain" else config.redis.control_url
        path.write_text(
            f'[group]\nname = "{GROUP}"\n[redis]\ncontrol_url = "{url}"\n[store]\npath = "{config.store.path}"\n'
        )
    call = ["audit", *arguments, "--config", str(path)]
    return await asyncio.to_thread(run_command, adaptersync, call, "adaptersync")


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


async def test_chaos_is_told_what_a_ledger_contradicts(config: Config, writer: Writer) -> None:
    found: list[str] = []
    await writer.events(*HISTORY)
    await writer.rows([row("aa-1"), row("aa-2")])
    assert (await of_chaos(config, [RUN], found.append))[RUN].rollouts == 2
    assert found == []
    await writer.rows([row("aa-3", engine_epoch="another life")])
    assert (await of_chaos(config, [RUN, "unknown"], found.append))[RUN].rollouts == 3
    assert [line.partition(":")[0] for line in found] == [RUN, "unknown"]
    assert "aa-3: was served by" in found[0]


async def test_a_run_that_nobody_knows_is_no_clean_run(config: Config, honest: Archive) -> None:
    assert await run(config, "verify", "unknown") == 64


async def test_one_rollout_is_shown_with_proof_and_fate(
    config: Config, writer: Writer, capsys: pytest.CaptureFixture[str]
) -> None:
    await writer.fates(Fates(run=RUN, epoch=1, step=5, fate="trained", requests=("aa-1",)))
    assert await told(config, writer, row("aa-1", prompt="5e1f"), row("aa-2")) == []
    assert await run(config, "show", "aa-1", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert {name: shown[name] for name in ("version", "digest", "proof", "fate", "fate_step", "prompt")} == {
        "version": VERSION,
        "digest": DIGEST,
        "proof": "proved",
        "fate": "trained",
        "fate_step": 5,
        "prompt": "5e1f",
    }
    assert await run(config, "show", RUN, "--json") == 0
    assert json.loads(capsys.readouterr().out)[VERSION]["fate trained"] == 1
    assert await run(config, "show", "nobody") == 64


async def test_an_export_has_one_row_a_rollout(config: Config, writer: Writer, tmp_path: Path) -> None:
    voided = VersionVoided(version=VERSION, generation=3, reason="bad", current="")
    rows = (row("aa-1", OPEN), row("aa-1"), row("aa-1"), row("aa-2", OPEN), row("aa-3", started_at=1.0))
    assert await told(config, writer, *rows, events=(*HISTORY, voided)) == []
    out = tmp_path / "run.parquet"
    assert await run(config, "export", RUN, "--out", str(out)) == 0
    lines = pq.read_table(out).to_pylist()
    assert [(line["request_id"], line["outcome"], line["fate"], line["voided"]) for line in lines] == [
        ("aa-1", "ok", "voided", True),
        ("aa-2", "unknown", "voided", True),
        ("aa-3", "ok", "voided", True),
    ]
    assert await run(config, "export", RUN, "--out", str(out)) == 78
    assert await run(config, "export", "unknown", "--out", str(tmp_path / "other.parquet")) == 64
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adaptersync.toml", "run.parquet", "store"]  # noqa: ASYNC240


async def test_drain_is_a_command_too(config: Config, writer: Writer, capsys: pytest.CaptureFixture[str]) -> None:
    await writer.rows([row("aa-1")])
    assert await run(config, "drain", "--json") == 0
    assert json.loads(capsys.readouterr().out)["entries"] == 1
