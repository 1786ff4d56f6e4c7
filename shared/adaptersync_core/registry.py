"""Reading and writing the control server: the one place where records, scripts and the table meet.

Every service speaks to Redis through this: trainers begin runs and publish, agents report and ack, coordinators lead
and decide, routers read the table and report what they serve. It decides nothing itself.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from adaptersync_core.errors import Conflict, ControlError, Fenced, NameTaken
from adaptersync_core.events import AdapterPublished, Event, ReplicaAcked, VersionVerified, to_fields
from adaptersync_core.keys import REPLICA_TTL_S, ROUTER_TTL_S, VERSION_TTL_S, Keys
from adaptersync_core.manifest import Manifest
from adaptersync_core.redis import RedisClient
from adaptersync_core.scripts import Script
from adaptersync_core.table import Table

RecordT = TypeVar("RecordT", bound=Struct)
log = logging.getLogger(__name__)

OPEN_REQUESTS = 64
PUBLICATIONS_AT_ONCE = 64  # newer publications than the coordinator has considered, read in one go


class ReplicaReport(Struct, frozen=True, kw_only=True):
    """What an agent observes of its engine. `loaded` are the adapter ids the engine lists from our directory."""

    url: str
    base_model: str
    engine_epoch: str
    max_loras: int
    max_cpu_loras: int
    max_lora_rank: int
    block_size: int
    loaded: tuple[str, ...] = ()
    draining: bool = False
    engine: str = ""
    host: str = ""


class SeenReplica(Struct, frozen=True, kw_only=True):
    """A report with its age on the control server's clock."""

    report: ReplicaReport
    age_s: float


class Ack(Struct, frozen=True, kw_only=True):
    """A replica's word on a version, good for one life of its engine."""

    accepted: bool
    engine_epoch: str
    reason: str = ""
    phases: dict[str, float] = {}


class RouterReport(Struct, frozen=True, kw_only=True):
    """The generation a router serves, and how many requests it has in flight by version."""

    generation: int
    url: str = ""
    inflight: dict[str, int] = {}


class RunRecord(Struct, frozen=True, kw_only=True):
    """A run as its trainer wrote it."""

    epoch: int
    seq: int
    max_staleness: int


class Request(Struct, frozen=True, kw_only=True):
    """What an operator asks for: `rollback` voids the current version of `run` (to `version`, or the one before).

    Where `version` is on its way in, it is given up and nothing is voided.
    """

    kind: str
    run: str
    version: str = ""
    reason: str = ""


class Fleet(Struct, frozen=True, kw_only=True):
    """All that a decision is made from, read at `now` (the control server's wall clock, seconds)."""

    now: float
    table: Table
    runs: dict[str, RunRecord]
    published: dict[str, tuple[Manifest, ...]]
    replicas: dict[str, SeenReplica]
    acks: dict[str, dict[str, Ack]]
    routers: dict[str, RouterReport]
    requests: dict[str, Request]


class VersionRecord(Struct, frozen=True, kw_only=True):
    """The fate of a version as the coordinator last wrote it."""

    state: str
    reason: str = ""
    generation: int = 0
    at: float = 0.0


class Need(Struct, frozen=True, kw_only=True, array_like=True):
    """A replica that must be alive in this life of its engine and have accepted the version in it."""

    replica: str
    version: str
    engine_epoch: str


class Decision(Struct, frozen=True, kw_only=True):
    """One step of the coordinator: the table as it should be, and everything that must hold or be written with it."""

    table: Table
    needs: tuple[Need, ...] = ()
    records: dict[str, VersionRecord] = {}
    events: tuple[Event, ...] = ()
    answered: tuple[str, ...] = ()


class Leadership(Struct, frozen=True, kw_only=True):
    """`token` is 0 when another coordinator leads."""

    token: int
    generation: int
    incarnation: str
    leader: str


class Registry:
    """Control state of one group."""

    def __init__(self, client: RedisClient, keys: Keys) -> None:
        self.client = client
        self.keys = keys
        names = ("begin_run", "reserve", "publish", "report", "ack", "lead", "decide", "request", "verified")
        self._scripts = {name: Script(name) for name in names}

    # trainer

    async def begin_run(self, run: str, *, nonce: str, max_staleness: int, trainer: str) -> tuple[int, int]:
        """A new epoch for this incarnation of the trainer; returns (epoch, latest sequence number)."""
        keys = (self.keys.run(run), self.keys.runs, self.keys.events)
        epoch, seq = await self._run("begin_run", keys, run, nonce, max_staleness, trainer)
        return int(epoch), int(seq)

    async def reserve(self, run: str, *, epoch: int, nonce: str) -> int:
        """The next sequence number; Fenced when a newer trainer has begun."""
        reply = await self._run("reserve", (self.keys.run(run),), epoch, nonce)
        if reply[0] == "fenced":
            raise self._fenced(run, epoch, reply[1])
        return int(reply[1])

    async def publish(self, manifest: Manifest, *, published_at: float) -> None:
        """Announce a stored version. A repeat is a no-op; NameTaken when the name stands for something else."""
        name = manifest.adapter_id
        keys = (
            self.keys.run(manifest.run),
            self.keys.manifest(name),
            self.keys.published(manifest.run),
            self.keys.events,
        )
        event = AdapterPublished(
            version=name,
            run=manifest.run,
            seq=manifest.seq,
            epoch=manifest.epoch,
            digest=manifest.digest,
            size=manifest.size,
            rank=manifest.shape.rank,
            noop=manifest.shape.noop,
            step=manifest.step,
            published_at=published_at,
        )
        text = msgspec.json.encode(manifest)
        reply = await self._run(
            "publish", keys, manifest.epoch, manifest.seq, name, text, VERSION_TTL_S, *to_fields(event)
        )
        if reply[0] == "fenced":
            raise self._fenced(manifest.run, manifest.epoch, reply[1])
        if reply[0] == "taken":
            raise NameTaken("name was announced with another manifest", version=name)

    # agent

    async def report_replica(self, replica: str, report: ReplicaReport) -> float:
        """Heartbeat and observation in one; returns the server's time in seconds."""
        keys = (self.keys.replica(replica), self.keys.replicas)
        return int(await self._run("report", keys, replica, REPLICA_TTL_S, *_hash_fields(report))) / 1000

    async def ack(self, replica: str, adapter_id: str, ack: Ack) -> bool:
        """Say whether this replica holds a version; False when the same was said before."""
        keys = (self.keys.acks(replica), self.keys.events)
        event = ReplicaAcked(
            version=adapter_id,
            replica=replica,
            engine_epoch=ack.engine_epoch,
            accepted=ack.accepted,
            reason=ack.reason,
            **{name: ack.phases.get(name) for name in ("staged_s", "verified_s", "loaded_s", "proved_s")},
        )
        return bool(
            await self._run("ack", keys, adapter_id, msgspec.json.encode(ack), REPLICA_TTL_S, *to_fields(event))
        )

    async def acks(self, replica: str) -> dict[str, Ack]:
        return _acks(await self.client.command("HGETALL", self.keys.acks(replica)))

    async def forget_acks(self, replica: str, adapter_ids: Sequence[str]) -> None:
        if adapter_ids:
            await self.client.command("HDEL", self.keys.acks(replica), *adapter_ids)

    # router

    async def report_router(self, router: str, report: RouterReport) -> None:
        keys = (self.keys.router(router), self.keys.routers)
        await self._run("report", keys, router, ROUTER_TTL_S, *_hash_fields(report))

    async def forget_router(self, router: str) -> None:
        """A router that stopped in order holds nothing up any more."""
        await self.client.pipeline([("DEL", self.keys.router(router)), ("ZREM", self.keys.routers, router)])

    # coordinator

    async def lead(self, coordinator: str, *, lease_s: float) -> Leadership:
        """Take or renew the lease."""
        keys = (self.keys.control, self.keys.events)
        reply = await self._run("lead", keys, coordinator, int(lease_s * 1000), secrets.token_hex(8))
        if reply[0] == 0:
            return Leadership(token=0, generation=0, incarnation="", leader=reply[1])
        return Leadership(token=reply[0], generation=reply[1], incarnation=reply[2], leader=coordinator)

    async def fleet(self) -> Fleet:
        """Everything a decision needs. Not one snapshot: `decide` checks again what it must."""
        keys = self.keys
        time, table_text, runs, replicas, routers, requests = await self.client.pipeline(
            [
                ("TIME",),
                ("GET", keys.table),
                ("SMEMBERS", keys.runs),
                ("ZRANGE", keys.replicas, 0, -1),
                ("ZRANGE", keys.routers, 0, -1),
                ("HGETALL", keys.requests),
            ]
        )
        now = time[0] + time[1] / 1e6
        table = _table(table_text)
        runs = sorted(runs)
        reads: list[tuple[Any, ...]] = []
        for run in runs:
            considered = table.runs[run].considered if run in table.runs else 0
            reads.append(("HGETALL", keys.run(run)))
            newer = (
                "ZRANGE",
                keys.published(run),
                f"({considered}",
                "+inf",
                "BYSCORE",
                "LIMIT",
                0,
                PUBLICATIONS_AT_ONCE + 1,  # one more tells that they are not all
            )
            reads.append(newer)
        reads += [
            command for name in replicas for command in (("HGETALL", keys.replica(name)), ("HGETALL", keys.acks(name)))
        ]
        reads += [("HGETALL", keys.router(name)) for name in routers]
        replies = iter(await self.client.pipeline(reads))
        records = {run: (next(replies), next(replies)) for run in runs}
        seen = {name: (next(replies), next(replies)) for name in replicas}
        published = {}
        for run, (_, names) in records.items():
            texts = await self.client.pipeline([("GET", keys.manifest(name)) for name in names])
            found = [_from_json(name, text, Manifest) for name, text in zip(names, texts, strict=True) if text]
            published[run] = tuple(manifest for manifest in found if manifest is not None)
        return Fleet(
            now=now,
            table=table,
            runs={
                run: known
                for run, (record, _) in records.items()
                if record and (known := _from_text(run, record, RunRecord)) is not None
            },
            published=published,
            replicas={
                name: SeenReplica(report=report, age_s=now - int(record["heartbeat_ms"]) / 1000)
                for name, (record, _) in seen.items()
                if record and (report := _from_hash(name, record, ReplicaReport)) is not None
            },
            acks={name: _acks(acks) for name, (_, acks) in seen.items()},
            routers={
                name: router
                for name in routers
                if (record := next(replies)) and (router := _from_hash(name, record, RouterReport)) is not None
            },
            requests={
                name: _from_json(name, text, Request) or Request(kind="unreadable", run="")
                for name, text in requests.items()
            },
        )

    async def decide(self, decision: Decision, *, token: int, alive_s: float) -> None:
        """Commit a decision. Fenced when another coordinator leads, Conflict when the fleet moved on meanwhile."""
        keys = [self.keys.control, self.keys.table, self.keys.events, self.keys.requests]

        def place(key: str) -> int:
            keys.append(key)
            return len(keys)

        text = msgspec.json.encode(
            {
                "acks": [
                    (
                        place(self.keys.replica(need.replica)),
                        place(self.keys.acks(need.replica)),
                        need.version,
                        need.engine_epoch,
                    )
                    for need in decision.needs
                ],
                "records": [
                    (place(self.keys.version(name)), VERSION_TTL_S, _record_fields(record))
                    for name, record in decision.records.items()
                ],
                "events": [to_fields(event) for event in decision.events],
                "answered": decision.answered,
                "alive_ms": int(alive_s * 1000),
            }
        )
        before = decision.table.generation - 1
        reply = await self._run("decide", keys, token, before, text, msgspec.json.encode(decision.table))
        if reply[0] == "fenced":
            raise Fenced("another coordinator leads", token=token)
        if reply[0] != "ok":
            raise Conflict(f"decision no longer holds: {' '.join(str(part) for part in reply)}", generation=before)

    # everyone

    async def table(self) -> Table:
        """The present table; an empty one before the first decision."""
        return _table(await self.client.command("GET", self.keys.table))

    async def manifest(self, adapter_id: str) -> Manifest | None:
        text = await self.client.command("GET", self.keys.manifest(adapter_id))
        return None if text is None else _from_json(adapter_id, text, Manifest)

    async def version(self, adapter_id: str) -> VersionRecord | None:
        """The fate of a version; `published` when it was announced and not yet taken up, None when it is unknown."""
        record, known = await self.client.pipeline(
            [("HGETALL", self.keys.version(adapter_id)), ("EXISTS", self.keys.manifest(adapter_id))]
        )
        if record:
            try:
                return msgspec.convert(record, VersionRecord, strict=False)
            except msgspec.ValidationError as error:
                raise ControlError(f"record cannot be read: {error}", version=adapter_id) from error
        return VersionRecord(state="published") if known else None

    async def published(self, run: str) -> list[tuple[str, int]]:
        """(adapter id, sequence number) of all announced versions of a run, oldest first."""
        reply = await self.client.command("ZRANGE", self.keys.published(run), 0, -1, "WITHSCORES")
        pairs = iter(reply)  # name, score, name, score, ...
        return [(name, int(score)) for name, score in zip(pairs, pairs, strict=True)]

    async def records(self, adapter_ids: Sequence[str]) -> list[tuple[Manifest | None, dict[str, str]]]:
        """Manifest and all fields of the record of each version, as far as they are still kept."""
        reads = [(("GET", self.keys.manifest(name)), ("HGETALL", self.keys.version(name))) for name in adapter_ids]
        replies = iter(await self.client.pipeline([command for pair in reads for command in pair]))
        return [
            (None if text is None else _from_json(name, text, Manifest), fields)
            for name, text, fields in zip(adapter_ids, replies, replies, strict=True)
        ]

    async def verified(self, adapter_id: str, *, ok: bool, reason: str) -> bool:
        """Note that the stored bytes were read again; False when the same was noted before."""
        keys = (self.keys.version(adapter_id), self.keys.events)
        event = VersionVerified(version=adapter_id, ok=ok, reason=reason)
        verdict = "true" if ok else "false"
        return bool(await self._run("verified", keys, verdict, reason, VERSION_TTL_S, *to_fields(event)))

    async def leader(self) -> tuple[str, float]:
        """Who led last, and how many seconds of the lease are left; negative when it ran out, no name if nobody did."""
        time, (leader, until_ms) = await self.client.pipeline(
            [("TIME",), ("HMGET", self.keys.control, "leader", "lease_until_ms")]
        )
        return leader or "", int(until_ms or 0) / 1000 - time[0] - time[1] / 1e6

    async def runs(self) -> list[str]:
        return sorted(await self.client.command("SMEMBERS", self.keys.runs))

    async def find_seq(self, run: str, seq: int) -> str | None:
        """The adapter id announced with a sequence number of a run."""
        names = await self.client.command("ZRANGE", self.keys.published(run), seq, seq, "BYSCORE")
        return names[0] if names else None

    async def request(self, request: Request, *, request_id: str = "") -> str:
        """Ask the coordinator for something; returns the request's id. To repeat a call, give it the id it had."""
        request_id = request_id or f"{request.kind}-{secrets.token_hex(4)}"
        reply = await self._run(
            "request", (self.keys.requests,), request_id, msgspec.json.encode(request), OPEN_REQUESTS
        )
        if reply[0] == "full":
            raise ControlError("too many open requests", next_step="check that a coordinator leads", open=OPEN_REQUESTS)
        return request_id

    async def _run(self, name: str, keys: Sequence[str], *arguments: str | bytes | int | float) -> Any:
        return await self.client.script(self._scripts[name], keys, arguments)

    @staticmethod
    def _fenced(run: str, mine: int, present: object) -> Fenced:
        return Fenced(
            "a newer trainer has begun this run",
            next_step="stop this trainer, or start it again to take over",
            run=run,
            epoch=mine,
            present=str(present),
        )


def _table(text: str | None) -> Table:
    """Without a table nobody can go on: unlike other records it is not left out."""
    try:
        return Table() if text is None else msgspec.json.decode(text, type=Table)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ControlError(f"table cannot be read: {error}", next_step="see what wrote it") from error


def _acks(fields: dict[str, str]) -> dict[str, Ack]:
    found = {name: _from_json(name, text, Ack) for name, text in fields.items()}
    return {name: ack for name, ack in found.items() if ack is not None}


def _record_fields(record: VersionRecord) -> list[str]:
    fields = msgspec.to_builtins(record)
    fields[f"{record.state}_at"] = record.at
    return [text for name, value in fields.items() for text in (name, str(value))]


def _hash_fields(report: Struct) -> list[str]:
    """Flat fields for a hash: plain values as text, structured ones as JSON."""
    fields: list[str] = []
    for name, value in msgspec.to_builtins(report).items():
        fields += name, value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return fields


def _from_hash(name: str, fields: dict[str, str], kind: type[RecordT]) -> RecordT | None:
    structured = {field.name for field in msgspec.structs.fields(kind) if field.type is not str}
    raw = {key: msgspec.Raw(text.encode()) if key in structured else text for key, text in fields.items()}
    return _from_json(name, msgspec.json.encode(raw), kind)


def _from_text(name: str, fields: dict[str, str], kind: type[RecordT]) -> RecordT | None:
    return _understood(name, lambda: msgspec.convert(fields, kind, strict=False))


def _from_json(name: str, text: str | bytes, kind: type[RecordT]) -> RecordT | None:
    return _understood(name, lambda: msgspec.json.decode(text, type=kind))


def _understood(name: str, read: Callable[[], RecordT]) -> RecordT | None:
    """What a record says; None, with a warning, for one that cannot be read: it must not stop the whole group."""
    try:
        return read()
    except (msgspec.MsgspecError, RecursionError) as error:
        log.warning("record of %s is left out, it cannot be read: %s", name, error)
        return None
