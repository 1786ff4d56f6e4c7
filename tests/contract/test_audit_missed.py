"""Rows that are not in the ledger, and must be by now, are missed."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaptersync.jobs.ledger import drain
from adaptersync_core.config import Config
from adaptersync_core.fates import Fates, write_fates
from adaptersync_core.rollouts import Row
from adaptersync_tools.audit import verify
from adaptersync_tools.audit.verify import Audit
from support.audited import later, told
from support.ledger import GROUP, RUN, Writer, config_of, keep, row

FATE = Fates(run=RUN, epoch=1, fate="trained", requests=("aa-9",))


@pytest.fixture
def config(redis_url: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    keep(tmp_path / "store", tmp_path_factory.mktemp("scratch"))
    return config_of(redis_url, tmp_path / "store")


def refused(request_id: str) -> Row:
    return row(request_id, "refused", status=503, replica="", version="", digest="")


async def test_a_fate_without_a_row_is_a_contradiction_once_the_row_would_be_there(
    config: Config, writer: Writer
) -> None:
    await writer.fates(Fates(run=RUN, epoch=1, fate="trained", requests=("a-1", "a-9")))
    assert await told(config, writer, row("a-1")) == []
    await later(writer)
    await drain(config)
    found = list(Audit(Path(config.store.path), GROUP, RUN).contradictions())
    assert found == ["a-9: its trainer says trained, and no row tells of it"]


async def test_numbers_that_a_router_gave_and_no_row_has_are_missed(config: Config, writer: Writer) -> None:
    rows = [row(f"aa-{n:x}") for n in (1, 2, 5, 6, 9)]
    assert await told(config, writer, *rows, row("bb-t1"), row("cc-7")) == []  # they may be on their way
    await later(writer)
    await drain(config)
    found = list(Audit(Path(config.store.path), GROUP, RUN).contradictions())
    assert found == [
        "aa-3 to aa-4: a router gave these numbers, and no row tells of it",
        "aa-7 to aa-8: a router gave these numbers, and no row tells of it",
        "cc-1 to cc-6: a router gave these numbers, and no row tells of it",
    ]


async def test_first_numbers_that_redis_had_no_more_are_not_missed(config: Config, writer: Writer) -> None:
    """Whoever begins to archive begins with what is there."""
    entries = await writer.rows([refused(f"aa-{n:x}") for n in range(1, 6)])
    await writer.client.command("XDEL", writer.keys.rollouts, *entries[:3])
    await later(writer)
    assert await told(config, writer) == []


async def test_the_end_is_judged_by_when_everything_was_read(
    config: Config, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rollout comes any more."""
    monkeypatch.setattr(verify, "ROW_LATE_S", 1.0)
    now = (await writer.client.command("TIME"))[0] * 1000
    await writer.rows([refused("aa-1"), refused("aa-3")], entry=f"{now - 8000}-*")
    await writer.client.command("XADD", writer.keys.fates, f"{now - 7000}-0", *write_fates(FATE))
    assert await told(config, writer) == [
        "aa-9: its trainer says trained, and no row tells of it",
        "aa-2: a router gave this number, and no row tells of it",
    ]


async def test_a_fate_is_no_rollout_though_there_never_was_a_row(
    config: Config, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "ROW_LATE_S", 1.0)
    now = (await writer.client.command("TIME"))[0] * 1000
    await writer.client.command("XADD", writer.keys.fates, f"{now - 9000}-0", *write_fates(FATE))
    assert await told(config, writer) == ["aa-9: its trainer says trained, and no row tells of it"]
