"""An honest ledger is found honest, and whatever contradicts it is a line and an exit status."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from adaptersync.jobs import ledger
from adaptersync.jobs.ledger import drain
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
from adaptersync_core.rollouts import OPEN, UNKNOWN, Row
from adaptersync_tools.audit import rollouts as reading
from adaptersync_tools.audit.verify import Audit
from adaptersync_tools.chaos.audit import audit as of_chaos
from support.audited import HISTORY, published, run, told
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
