"""Tables as a coordinator would write them, without a coordinator."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from adaptersync_core.identity import adapter_id, parse_adapter_id
from adaptersync_core.keys import Keys
from adaptersync_core.redis import RedisClient
from adaptersync_core.table import LiveState, LiveVersion, Member, RunEntry, Table

RUN = "run-a"


def version_name(seq: int, *, run: str = RUN) -> str:
    return adapter_id(run, seq, f"{seq:012x}" + "0" * 52)


def live(name: str, state: LiveState) -> LiveVersion:
    parts = parse_adapter_id(name)
    return LiveVersion(
        run=parts.run,
        seq=parts.seq,
        epoch=1,
        digest=parts.digest12 + "0" * 52,
        state=state,
        published_at=1.0,
        since=1.0,
        changed_in=1,
    )


def make_table(
    versions: Mapping[str, LiveState],
    urls: Mapping[str, str],
    *,
    generation: int = 1,
    block_size: int = 16,
    min_ready: int = 1,
    runs: Mapping[str, str | None] | None = None,
    voided: Collection[str] = (),
    members: Mapping[str, Mapping[str, Any]] | None = None,
) -> Table:
    """`versions` by state, `urls` by replica; each run's current is its version in that state.

    Replicas are ready and in their first life, but for what `members` says of them.
    """
    current: dict[str, str | None] = {}
    considered: dict[str, int] = {}
    for name, state in versions.items():
        run, seq = parse_adapter_id(name).run, parse_adapter_id(name).seq
        considered[run] = max(seq, considered.get(run, 0))
        current[run] = name if state == "current" else current.get(run)
    current |= dict(runs or {})
    return Table(
        incarnation="test",
        generation=generation,
        written_at=time.time(),
        min_ready=min_ready,
        runs={
            run: RunEntry(epoch=1, max_staleness=2, current=name, considered=considered.get(run, 0))
            for run, name in current.items()
        },
        versions={
            name: replace(live(name, state), fate="voided" if name in voided else "retired")
            for name, state in versions.items()
        },
        members={
            name: replace(
                Member(state="ready", url=url, engine_epoch=f"{name}-life-1", since=1.0, block_size=block_size),
                **(members or {}).get(name, {}),
            )
            for name, url in urls.items()
        },
    )


class TableWriter:
    """Writes tables to a control server and rings the events stream, one generation after another."""

    def __init__(self, client: RedisClient, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self._generation = 0

    async def write(self, versions: Mapping[str, LiveState], urls: Mapping[str, str], **more: Any) -> int:
        """The generation of the table that is now the present one."""
        self._generation += 1
        table = make_table(versions, urls, generation=self._generation, **more)
        await self._client.command("SET", self._keys.table, msgspec.json.encode(table))
        await self._client.command("XADD", self._keys.events, "*", "type", "test.table")
        return self._generation

    async def record(self, name: str, state: str, reason: str = "") -> None:
        """The fate of a version, as the coordinator leaves it."""
        key = self._keys.version(name)
        await self._client.command("HSET", key, "state", state, "reason", reason, "generation", 1, "at", 1.0)
        await self._client.command("EXPIRE", key, 60)
        parts = parse_adapter_id(name)
        await self._client.command("ZADD", self._keys.published(parts.run), parts.seq, name)
        await self._client.command("SADD", self._keys.runs, parts.run)

    async def announce(self, name: str) -> None:
        """A version that was published and not yet taken up."""
        parts = parse_adapter_id(name)
        await self._client.command("SET", self._keys.manifest(name), "{}", "EX", 60)
        await self._client.command("ZADD", self._keys.published(parts.run), parts.seq, name)
        await self._client.command("SADD", self._keys.runs, parts.run)
