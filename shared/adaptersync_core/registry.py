"""Reading and writing the control server: the one place where records, scripts and the table meet.

Every service speaks to Redis through this: trainers begin runs and publish, agents report and ack, coordinators lead
and decide, routers read the table and report what they serve. It decides nothing itself.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from adaptersync_core.errors import Conflict, ControlError, Fenced, Forgotten, NameInvalid, NameTaken
from adaptersync_core.events import PHASES, AdapterPublished, ReplicaAcked, VersionVerified, to_fields
from adaptersync_core.keys import PUBLISHED_KEPT, REPLICA_TTL_S, ROUTER_TTL_S, VERSION_TTL_S, Keys
from adaptersync_core.manifest import Manifest
from adaptersync_core.records import (
    Ack,
    Decision,
    Fleet,
    Holding,
    Leadership,
    ReplicaReport,
    Request,
    RouterReport,
    RunRecord,
    SeenRouter,
    VersionRecord,
    from_hash,
    from_json,
    from_text,
    hash_fields,
    heartbeat_ms,
    read_acks,
    record_fields,
)
from adaptersync_core.redis import RedisClient
from adaptersync_core.scripts import Script
from adaptersync_core.sightings import Sightings
from adaptersync_core.table import Table, read_table

SCRIPTS = (
    *("begin_run", "beat", "end_run", "close_run", "reserve", "publish", "report", "ack", "request", "verified"),
    *("lead", "resign", "decide", "restore", "announce_again"),
    *("look", "forget_acks"),
)
OPEN_REQUESTS = 64
NUMBERS_GAP = 100  # given out before a loss and not written down anywhere: more than any trainer can have in hand
PUBLICATIONS_AT_ONCE = 64  # newer publications than the coordinator has considered, read in one go


class Registry:
    """Control state of one group."""

    def __init__(self, client: RedisClient, keys: Keys) -> None:
        self.client = client
        self.keys = keys
        self._scripts = {name: Script(name) for name in SCRIPTS}

    # trainer

    async def begin_run(
        self, run: str, *, nonce: str, max_staleness: int, trainer: str, stored: tuple[int, int] = (0, 0)
    ) -> tuple[int, int]:
        """A new epoch for this incarnation of the trainer; returns (epoch, latest sequence number).

        `stored` are the highest epoch and sequence number in the store: a Redis that lost them gives none again.
        """
        keys = (self.keys.run(run), self.keys.runs, self.keys.events)
        epoch, seq = await self._run("begin_run", keys, run, nonce, max_staleness, trainer, *stored)
        return int(epoch), int(seq)

    async def end_run(self, run: str, *, epoch: int) -> bool:
        """Say that nothing more will be published; False when it was said before, or a newer trainer has begun."""
        return bool(await self._run("end_run", (self.keys.run(run), self.keys.events), run, epoch))

    async def beat(self, run: str, *, epoch: int, trainer: str) -> bool:
        """Say that the trainer lives; False when another has begun the run."""
        return bool(await self._run("beat", (self.keys.run(run),), epoch, trainer))

    async def close_run(self, run: str, *, reason: str, alive_s: float) -> bool:
        """End a run in its trainer's place; False when it had ended. Conflict when the trainer spoke in `alive_s`."""
        reply = await self._run("close_run", (self.keys.run(run), self.keys.events), run, reason, int(alive_s * 1000))
        if reply[0] == "alive":
            raise Conflict(
                "trainer of this run lives", next_step="stop it, or use --force", run=run, heard_s_ago=reply[1] / 1000
            )
        if reply[0] == "unknown":
            raise NameInvalid("no such run", next_step=f"known runs: {', '.join(await self.runs()) or 'none'}", run=run)
        return bool(reply[0] == "ok")

    async def reserve(self, run: str, *, epoch: int, nonce: str, trainer: str = "", latest: int = 0) -> int:
        """The next sequence number, above the `latest` this trainer had; Fenced when a newer trainer has begun.

        `trainer` is the nonce it began with.
        """
        reply = await self._run("reserve", (self.keys.run(run),), epoch, nonce, latest, trainer)
        self._refused(run, epoch, reply)
        return int(reply[1])

    async def publish(
        self, manifest: Manifest, *, published_at: float, trainer: str = "", stored_s: float | None = None
    ) -> None:
        """Announce a stored version. A repeat is a no-op; NameTaken when the name stands for something else."""
        name = manifest.adapter_id
        keys = (
            self.keys.run(manifest.run),
            self.keys.manifest(name),
            self.keys.published(manifest.run),
            self.keys.events,
        )
        event = _published(manifest, published_at, stored_s)
        text = msgspec.json.encode(manifest)
        reply = await self._run(
            "publish", keys, manifest.epoch, manifest.seq, name, text, VERSION_TTL_S, trainer, *to_fields(event)
        )
        self._refused(manifest.run, manifest.epoch, reply)
        if reply[0] == "taken":
            raise NameTaken("name was announced with another manifest", version=name)

    # agent

    async def report_replica(self, replica: str, report: ReplicaReport) -> float:
        """Heartbeat and observation in one; returns the server's time in seconds."""
        keys = (self.keys.replica(replica), self.keys.replicas)
        return int(await self._run("report", keys, replica, REPLICA_TTL_S, *hash_fields(report))) / 1000

    async def ack(self, replica: str, adapter_id: str, ack: Ack) -> bool:
        """Say whether this replica holds a version; False when the same was said before."""
        keys = (self.keys.acks(replica), self.keys.replicas, self.keys.events)
        event = ReplicaAcked(
            version=adapter_id,
            replica=replica,
            engine_epoch=ack.engine_epoch,
            accepted=ack.accepted,
            proof=ack.proof.verdict,
            reason=ack.reason,
            fault="replica" if not ack.accepted and ack.fault == "replica" else "",
            **{name: ack.phases.get(name) for name in PHASES},
        )
        text = msgspec.json.encode(ack)
        return bool(await self._run("ack", keys, replica, adapter_id, text, REPLICA_TTL_S, *to_fields(event)))

    async def acks(self, replica: str) -> dict[str, Ack]:
        return read_acks(await self.client.command("HGETALL", self.keys.acks(replica)))

    async def forget_acks(self, replica: str, adapter_ids: Sequence[str]) -> None:
        if adapter_ids:
            await self._run("forget_acks", (self.keys.acks(replica), self.keys.replicas), replica, *adapter_ids)

    # router

    async def report_router(self, router: str, report: RouterReport) -> int:
        """The server's time in milliseconds."""
        keys = (self.keys.router(router), self.keys.routers)
        return int(await self._run("report", keys, router, ROUTER_TTL_S, *hash_fields(report)))

    async def holdings(self, replicas: Collection[str]) -> dict[str, Holding]:
        """What their agents last said that they hold, in one call; without those that are not heard of."""
        keys = self.keys
        said = iter(await self._look([key for name in replicas for key in (keys.replica(name), keys.acks(name))]))
        found = {}
        for replica, record, acks in zip(replicas, said, said, strict=True):
            report = from_hash(replica, record, ReplicaReport) if record else None
            if report is None:
                continue
            life = report.engine_epoch
            accepted = {name for name, ack in read_acks(acks).items() if ack.accepted and ack.engine_epoch == life}
            held = frozenset(accepted.intersection(report.loaded))
            found[replica] = Holding(heard_ms=heartbeat_ms(replica, record), versions=held)
        return found

    async def forget_router(self, router: str) -> None:
        """A router that stopped in order holds nothing up any more."""
        await self.client.pipeline([("DEL", self.keys.router(router)), ("ZREM", self.keys.routers, router)])

    # coordinator

    async def lead(self, coordinator: str, term: str, *, lease_s: float, former: str = "") -> Leadership:
        """Take the lease for a new term, renew it, or pass from the `former` term to another without a gap."""
        keys = (self.keys.control, self.keys.events)
        reply = await self._run("lead", keys, coordinator, int(lease_s * 1000), term, former)
        if reply[0] == 0:
            return Leadership(token=0, generation=0, incarnation="", leader=reply[1])
        return Leadership(token=reply[0], generation=reply[1], incarnation=reply[2], leader=coordinator)

    async def resign(self, lease: Leadership) -> None:
        """Let another lead at once."""
        await self._run("resign", (self.keys.control,), lease.fence)

    async def fleet(self, sightings: Sightings | None = None) -> Fleet:
        """Everything a decision needs. Not one snapshot: `decide` checks again what it must.

        With the `sightings` of the last look only those replicas are read that said something since.
        """
        keys = self.keys
        sightings = Sightings() if sightings is None else sightings
        time, table_text, runs, replicas, routers, (_, requests) = await self.client.pipeline(
            [
                ("TIME",),
                ("GET", keys.table),
                ("SMEMBERS", keys.runs),
                ("ZRANGE", keys.replicas, 0, -1, "WITHSCORES"),
                ("ZRANGE", keys.routers, 0, -1),
                ("HSCAN", keys.requests, 0, "COUNT", OPEN_REQUESTS),
            ]
        )
        now, now_ms = time[0] + time[1] / 1e6, time[0] * 1000 + time[1] // 1000
        table = read_table(table_text)
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
        reads += [("HGETALL", keys.router(name)) for name in routers]
        replies = iter(await self.client.pipeline(reads))
        records = {run: (next(replies), next(replies)) for run in runs}
        dates = dict(zip(replicas[::2], map(float, replicas[1::2]), strict=True))
        due = sightings.due(dates)
        said = iter(await self._look([key for name in due for key in (keys.replica(name), keys.acks(name))]))
        for name in due:
            sightings.note(name, dates[name], now_ms, next(said), next(said))
        published = {}
        for run, (_, names) in records.items():
            texts = await self.client.pipeline([("GET", keys.manifest(name)) for name in names])
            found = [from_json(name, text, Manifest) for name, text in zip(names, texts, strict=True) if text]
            published[run] = tuple(manifest for manifest in found if manifest is not None)
        return Fleet(
            now=now,
            table=table,
            runs={
                run: known
                for run, (record, _) in records.items()
                if record and (known := from_text(run, record, RunRecord)) is not None
            },
            published=published,
            replicas=sightings.replicas(now),
            acks=sightings.acks(),
            routers={
                name: SeenRouter(report=router, age_s=now - heartbeat_ms(name, record) / 1000)
                for name in routers
                if (record := next(replies)) and (router := from_hash(name, record, RouterReport)) is not None
            },
            requests={
                name: from_json("a request", text, Request) or Request(kind="unreadable", run="")
                for name, text in sorted(requests.items())[:OPEN_REQUESTS]  # who wrote past `request` may have put more
            },
        )

    async def _look(self, keys: Sequence[str]) -> list[dict[str, str]]:
        """Several hashes in one call."""
        flat = await self._run("look", keys) if keys else []
        return [dict(zip(fields[::2], fields[1::2], strict=True)) for fields in flat]

    async def decide(self, decision: Decision, lease: Leadership, *, alive_s: float) -> None:
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
                    (place(self.keys.version(name)), VERSION_TTL_S, *record_fields(record))
                    for name, record in decision.records.items()
                ],
                "events": [to_fields(event) for event in decision.events],
                "answered": decision.answered,
                "alive_ms": int(alive_s * 1000),
            }
        )
        before = decision.table.generation - 1
        reply = await self._run("decide", keys, lease.fence, before, text, msgspec.json.encode(decision.table))
        if reply[0] == "fenced":
            raise Fenced("another coordinator leads", token=lease.token)
        if reply[0] != "ok":
            raise Conflict(f"decision no longer holds: {' '.join(str(part) for part in reply)}", generation=before)

    async def restore(
        self, lease: Leadership, table: Table, runs: Mapping[str, RunRecord], records: Mapping[str, VersionRecord]
    ) -> None:
        """Put back a control state that was lost; `table` carries its new incarnation and generation."""
        keys = [self.keys.control, self.keys.table, self.keys.events, self.keys.runs]

        def place(key: str) -> int:
            keys.append(key)
            return len(keys)

        state = {
            "runs": [
                (
                    place(self.keys.run(name)),
                    name,
                    run.epoch,
                    run.seq,
                    run.max_staleness,
                    run.ended_at,
                    run.ended_by,
                )
                for name, run in runs.items()
            ],
            "records": [
                (place(self.keys.version(name)), VERSION_TTL_S, *record_fields(record))
                for name, record in records.items()
            ],
        }
        text = msgspec.json.encode(state)
        encoded = msgspec.json.encode(table)
        head = (lease.fence, table.incarnation, table.generation, encoded, text, NUMBERS_GAP)
        reply = await self._run("restore", keys, *head)
        if reply[0] == "fenced":
            raise Fenced("another coordinator leads", token=lease.token)

    async def announce_again(self, manifests: Sequence[Manifest], considered: Mapping[str, int]) -> None:
        """Make stored versions known that Redis forgot; what it knows stays as it is.

        Of two with one number, which a trainer stored and could not announce any more, the newer trainer's counts. What
        is beyond the number `considered` of its run has its life before it: an event tells of it.
        """
        for manifest in sorted(manifests, key=lambda one: -one.epoch):
            name = manifest.adapter_id
            keys = (self.keys.manifest(name), self.keys.published(manifest.run), self.keys.events)
            ahead = manifest.seq > considered.get(manifest.run, 0)
            event = to_fields(_published(manifest, manifest.created_at)) if ahead else ()
            text = msgspec.json.encode(manifest)
            await self._run("announce_again", keys, manifest.seq, name, text, VERSION_TTL_S, *event)

    async def forget_published(self, run: str, considered: int) -> None:
        """Keep the numbers of a run's latest versions, PUBLISHED_KEPT of them, and of all beyond `considered`."""
        key, last = self.keys.published(run), PUBLISHED_KEPT - 1
        oldest = await self.client.command("ZRANGE", key, last, last, "REV", "WITHSCORES")
        if oldest:
            await self.client.command("ZREMRANGEBYSCORE", key, "-inf", f"({min(int(oldest[1]), considered)}")

    # everyone

    async def store_id(self) -> str:
        """What the group knows its store by; nothing before anybody wrote there."""
        return await self.client.command("GET", self.keys.store) or ""

    async def settle_store_id(self, mine: str) -> str:
        """The same, and it is `mine` from now on where there was none."""
        key = self.keys.store
        _, known = await self.client.pipeline([("SETNX", key, mine), ("GET", key)])
        return known or mine

    async def table(self) -> Table:
        """The present table; an empty one before the first decision."""
        return read_table(await self.client.command("GET", self.keys.table))

    async def manifest(self, adapter_id: str) -> Manifest | None:
        text = await self.client.command("GET", self.keys.manifest(adapter_id))
        return None if text is None else from_json(adapter_id, text, Manifest)

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

    async def newest(self, run: str, count: int) -> list[str]:
        """Adapter ids of the latest announced versions of a run, newest first."""
        names: list[str] = await self.client.command("ZRANGE", self.keys.published(run), 0, count - 1, "REV")
        return names

    async def records(self, adapter_ids: Sequence[str]) -> list[tuple[Manifest | None, dict[str, str]]]:
        """Manifest, and fate and verdict as the fields of one record, of each version, as far as they are kept."""
        keys = self.keys
        hashes = [(keys.version, "HGETALL"), (keys.verified, "HGETALL")]
        reads = [(how, key(name)) for name in adapter_ids for key, how in ((keys.manifest, "GET"), *hashes)]
        replies = iter(await self.client.pipeline(reads))
        return [
            (None if text is None else from_json(name, text, Manifest), {**fate, **verdict})
            for name, text, fate, verdict in zip(adapter_ids, replies, replies, replies, strict=True)
        ]

    async def verified(self, adapter_id: str, *, ok: bool, reason: str) -> bool:
        """Note that the stored bytes were read again; False when the same was noted before."""
        keys = (self.keys.verified(adapter_id), self.keys.events)
        event = VersionVerified(version=adapter_id, ok=ok, reason=reason)
        verdict = "true" if ok else "false"
        return bool(await self._run("verified", keys, verdict, reason, VERSION_TTL_S, *to_fields(event)))

    async def leader(self) -> tuple[str, float]:
        """Who led last, and how many seconds of the lease are left; negative when it ran out, no name if nobody did."""
        time, (leader, until_ms) = await self.client.pipeline(
            [("TIME",), ("HMGET", self.keys.control, "leader", "lease_until_ms")]
        )
        return leader or "", int(until_ms or 0) / 1000 - time[0] - time[1] / 1e6

    async def ready(self) -> dict[str, ReplicaReport]:
        """What the replicas that may be sent requests last said of themselves."""
        names = (await self.table()).ready()
        records = await self._look([self.keys.replica(name) for name in names])
        found = [(name, fields) for name, fields in zip(names, records, strict=True) if fields]
        reports = {name: from_hash(name, fields, ReplicaReport) for name, fields in found}
        return {name: report for name, report in reports.items() if report is not None}

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
    def _refused(run: str, mine: int, reply: list[Any]) -> None:
        """Raise what a trainer is told that may not go on."""
        if reply[0] == "ended":
            next_step = "start the trainer again to go on with the run"
            raise Fenced(f"an operator ended this run: {reply[1]}", next_step=next_step, run=run, epoch=mine)
        if reply[0] != "fenced":
            return
        present = reply[1]
        if present < mine:
            raise Forgotten("Redis stands at an older state than this trainer", run=run, epoch=mine, present=present)
        raise Fenced(
            "a newer trainer has begun this run",
            next_step="stop this trainer, or start it again to take over",
            run=run,
            epoch=mine,
            present=present,
        )


def _published(manifest: Manifest, published_at: float, stored_s: float | None = None) -> AdapterPublished:
    return AdapterPublished(
        version=manifest.adapter_id,
        run=manifest.run,
        seq=manifest.seq,
        epoch=manifest.epoch,
        digest=manifest.digest,
        size=manifest.size,
        rank=manifest.shape.rank,
        noop=bool(manifest.noop),
        step=manifest.step,
        published_at=published_at,
        stored_s=stored_s,
        traceparent=manifest.traceparent,
    )
