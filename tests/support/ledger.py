"""A group's ledger with something in it: streams in Redis, and the archive that they are drained into."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from adaptersync_core.archive import Archive
from adaptersync_core.config import Config, load_config
from adaptersync_core.events import Event, ReplicaAcked, VersionPromoted, to_fields
from adaptersync_core.fates import Fates, write_fates
from adaptersync_core.identity import adapter_id
from adaptersync_core.keys import Keys
from adaptersync_core.redis import RedisClient
from adaptersync_core.rollouts import FIELD, Row
from support.adapters import make_adapter
from support.artifacts import manifest_of

RUN = "a.run"
DIGEST = "0123456789ab" + "0" * 52
VERSION = adapter_id(RUN, 1, DIGEST)
GROUP = "g"


def config_of(redis_url: str, store: Path, **more: str) -> Config:
    return load_config(
        environment={
            "ADAPTERSYNC_GROUP__NAME": GROUP,
            "ADAPTERSYNC_REDIS__CONTROL_URL": redis_url,
            "ADAPTERSYNC_STORE__PATH": str(store),
            **more,
        }
    )


def row(request_id: str, outcome: str = "ok", **more: Any) -> Row:
    made: dict[str, Any] = {
        "router": "router-0",
        "path": "/v1/completions",
        "asked": RUN,
        "started_at": 1000.0,
        "status": 200,
        "total_s": 0.5,
        "run": RUN,
        "version": VERSION,
        "digest": DIGEST,
        "replica": "replica-0",
        "engine_epoch": "life-1",
    }
    return Row(request_id=request_id, outcome=outcome, **{**made, **more})


def promoted(version: str = VERSION) -> VersionPromoted:
    return VersionPromoted(version=version, generation=2, replicas="replica-0")


def acked(version: str = VERSION, **more: Any) -> ReplicaAcked:
    told: dict[str, Any] = {"replica": "replica-0", "engine_epoch": "life-1", "accepted": True, "proof": "proved"}
    return ReplicaAcked(version=version, **{**told, **more})


def keep(store: Path, scratch: Path, digest: str = DIGEST) -> None:
    """The version has a manifest in the store."""
    manifest = replace(manifest_of(make_adapter(scratch / "adapter")), run=RUN, seq=1, digest=digest)
    directory = store / RUN / VERSION
    directory.mkdir(parents=True)
    (directory / "manifest.json").write_bytes(msgspec.json.encode(manifest))


class Writer:
    """What routers, trainers and everybody else write."""

    def __init__(self, client: RedisClient) -> None:
        self.client = client
        self.keys = Keys(GROUP)

    async def rows(self, rows: Sequence[Row], *, entry: str = "*") -> list[str]:
        calls = [("XADD", self.keys.rollouts, entry, FIELD, msgspec.json.encode(each)) for each in rows]
        return await self.client.pipeline(calls)

    async def events(self, *events: Event) -> None:
        await self.client.pipeline([("XADD", self.keys.events, "*", *to_fields(event)) for event in events])

    async def fates(self, *fates: Fates) -> None:
        await self.client.pipeline([("XADD", self.keys.fates, "*", *write_fates(each)) for each in fates])


def archived(store: Path, table: str = "rollouts") -> list[dict[str, Any]]:
    """Everything in it, in the order of entries. Every file that lies there is named by a link, and the other way."""
    archive = Archive(store, GROUP, table)
    files = archive.files()
    there = {path.relative_to(archive.root).as_posix() for path in archive.root.rglob("*.parquet")}
    assert there == set(files), there ^ set(files)
    rows = [line for file in files.values() for line in archive.checked(file).to_pylist()]
    return sorted(rows, key=lambda line: tuple(map(int, line["entry"].split("-"))))


def ids(store: Path) -> list[str]:
    """Of all archived rollouts, in the order of the archive."""
    return [line["request_id"] for line in archived(store)]
