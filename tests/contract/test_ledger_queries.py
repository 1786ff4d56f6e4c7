"""The queries of deploy/LEDGER.md, as they stand there, on a ledger that was archived."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import duckdb
import pytest

from adaptersync.jobs.ledger import drain
from adaptersync_core.events import VersionVoided
from adaptersync_core.fates import Fates
from adaptersync_core.redis import RedisClient
from adaptersync_core.rollouts import OPEN
from support.ledger import GROUP, RUN, VERSION, Writer, acked, config_of, promoted, row
from support.redis_servers import KINDS
from support.source import REPOSITORY

VIEWS, FATE, NO_FATE, *QUERIES = re.findall(
    r"```sql\n(.*?)```", (REPOSITORY / "deploy" / "LEDGER.md").read_text(), re.DOTALL
)

ANSWERS: list[list[tuple[Any, ...]]] = [
    [
        (VERSION, "dropped", "too old", 1),
        (VERSION, "not told", None, 1),
        (VERSION, "trained", "", 1),
    ],
    [(VERSION, "replica-0", 2, 0.5, 0.5, 0.5)],
    [
        ("aa-1", VERSION, "replica-0", "proved"),
        ("aa-2", VERSION, "replica-0", "proved"),
        ("aa-3", VERSION, "replica-0", "proved"),
    ],
    [("aa-1", VERSION, "in the wrong language")],
    [("5e1f", 2, 1)],
]


FATES = (
    Fates(run=RUN, epoch=1, step=1, fate="dropped", reason="cut off", requests=("aa-1",)),
    Fates(run=RUN, epoch=1, step=1, fate="trained", requests=("aa-1",)),
    Fates(run=RUN, epoch=1, step=1, fate="dropped", reason="too old", requests=("aa-2",)),
)


async def archived(redis_url: str, tmp_path: Path, *fates: Fates) -> Path:
    client = RedisClient(redis_url, name="test")
    writer = Writer(client)
    voided = VersionVoided(version=VERSION, generation=3, reason="in the wrong language", current="")
    await writer.events(acked(proof="below noise"), acked(), promoted(), voided)
    tokens: dict[str, Any] = {"prompt_tokens": 8, "cached_tokens": 4, "prompt": "5e1f"}
    await writer.rows(
        [row("aa-1", OPEN, **tokens), row("aa-1", **tokens), row("aa-2", **tokens), row("aa-2", **tokens)]
    )
    await writer.rows([row("aa-3", OPEN), row("bb-1", "refused", run="", version="", replica="")])
    if fates:
        await writer.fates(*fates)
    await client.close()
    await drain(config_of(redis_url, tmp_path / "store"))
    return tmp_path / "store" / ".ledger" / GROUP


@pytest.mark.parametrize("redis_kind", KINDS[:1])
async def test_each_query_says_what_is_there(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(await archived(redis_url, tmp_path, *FATES))
    with duckdb.connect() as connection:
        for views in (VIEWS, FATE, NO_FATE):  # the last has nothing to do
            connection.execute(views)
        answers = [connection.execute(query.replace("my-run", RUN)).fetchall() for query in QUERIES]
        partitioned = connection.execute(
            "SELECT DISTINCT run, day::text FROM read_parquet('rollouts/*/*/*.parquet', hive_partitioning = true) "
            "WHERE run IS NOT NULL"
        ).fetchall()
    assert len(answers) == len(ANSWERS)
    assert answers == ANSWERS
    assert [run for run, _ in partitioned if run == RUN] == [RUN]


@pytest.mark.parametrize("redis_kind", KINDS[:1])
async def test_each_query_works_where_no_trainer_told_of_fates(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(await archived(redis_url, tmp_path))
    with duckdb.connect() as connection:
        connection.execute(VIEWS)
        with pytest.raises(duckdb.IOException, match="No files found"):
            connection.execute(FATE)
        connection.execute(NO_FATE)
        answers = [connection.execute(query.replace("my-run", RUN)).fetchall() for query in QUERIES]
    assert answers == [[(VERSION, "not told", None, 3)], *ANSWERS[1:3], [], ANSWERS[4]]
