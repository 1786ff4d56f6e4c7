"""What is kept in Redis, as structs, and how each is written as text.

A report is one hash with a field a value, structured values as JSON; an ack and a request are JSON. What cannot be read
is left out with a warning: one bad record must not stop the whole group.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Literal, TypeVar

import msgspec
from msgspec import Struct

from adaptersync_core.events import Event
from adaptersync_core.keys import ROUTER_MARGIN_S, ROUTER_SERVES_S
from adaptersync_core.manifest import Manifest
from adaptersync_core.proof import Proof
from adaptersync_core.ranks import Ranks
from adaptersync_core.table import Table

RecordT = TypeVar("RecordT", bound=Struct)
Fault = Literal["version", "replica"]
log = logging.getLogger(__name__)


class CacheReport(Struct, frozen=True, kw_only=True):
    """How well an agent knows what its engine has cached. Not followed: ownership is where routers sent prompts.

    `blocks` are owned in truth, `lag_s` seconds behind the engine at the last change. `gaps` were filled from the
    engine's buffer; after a loss all was forgotten, since it could not be filled. `orphans` follow what is not known.
    """

    followed: bool = False
    why: str = ""
    blocks: int = 0
    lag_s: float = 0.0
    gaps: int = 0
    losses: int = 0
    orphans: int = 0


class RequestTimes(Struct, frozen=True, kw_only=True):
    """What the latest requests of an engine came to, by its own counters: sums over `requests` that ended in `over_s`.

    vLLM counts them by engine, not by request or adapter.
    """

    requests: int = 0
    over_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


class DecodeRate(Struct, frozen=True, kw_only=True):
    """How fast an engine decoded for `over_s` while it decoded about `batch` sequences at once, all ranks together."""

    batch: float
    tokens_per_s: float
    over_s: float


class Decoding(Struct, frozen=True, kw_only=True):
    """Whether an engine would decode more if it had more at once: `rates` by batch, ascending, of the last hour.

    `batch` is what it decodes at once lately, `batch_max` what it would at most; 0 where nobody knows.
    """

    batch: float = 0.0
    batch_max: int = 0
    rates: tuple[DecodeRate, ...] = ()


class ReplicaReport(Struct, frozen=True, kw_only=True):
    """What an agent observes of its engine. `loaded` are the adapter ids the engine lists from our directory.

    `ranks` are the engines behind its address, each with a cache of its own. `root` is where it has its base model
    from, a path on its host or a hub's name; limits are 0 where it does not say.
    """

    url: str
    base_model: str
    engine_epoch: str
    max_loras: int
    max_cpu_loras: int
    max_lora_rank: int
    block_size: int
    loaded: tuple[str, ...] = ()
    ranks: Ranks = 1
    draining: bool = False
    engine: str = ""
    host: str = ""
    root: str = ""
    cache: CacheReport = CacheReport()
    request_times: RequestTimes = RequestTimes()
    decoding: Decoding = Decoding()


class SeenReplica(Struct, frozen=True, kw_only=True):
    """A report with its age on the control server's clock."""

    report: ReplicaReport
    age_s: float


class Holding(Struct, frozen=True, kw_only=True):
    """What an agent last said that its engine holds: listed, and accepted in this life. By the server's clock."""

    heard_ms: int
    versions: frozenset[str]


class Ack(Struct, frozen=True, kw_only=True):
    """A replica's word on a version, good for one life of its engine, and the proof it rests on.

    `fault` is whose a refusal is: a replica that could not do its own part says nothing of the version.
    """

    accepted: bool
    engine_epoch: str
    proof: Proof = Proof(verdict="not probed")
    reason: str = ""
    fault: Fault = "version"
    phases: dict[str, float] = {}


class Traffic(Struct, frozen=True, kw_only=True):
    """Of a router process since it began: requests by how they ended and by how they were routed, and their tokens.

    `tokens` are `prompt`, of them `cached`, and `completion`, as replicas told them. `at` are sequences in flight now,
    by replica.
    """

    ended: dict[str, int] = {}
    routed: dict[str, int] = {}
    tokens: dict[str, int] = {}
    at: dict[str, int] = {}


class RouterReport(Struct, frozen=True, kw_only=True):
    """The table a router serves, and how many requests it has in flight by version.

    Without a word from Redis it goes on serving that table for `max_age_s` after this report. `missing` are versions
    that replicas did not know when they were asked for them, by replica; their agents have not confirmed them since.
    `host` is where it runs.
    """

    generation: int
    incarnation: str = ""
    max_age_s: float = ROUTER_SERVES_S
    url: str = ""
    host: str = ""
    inflight: dict[str, int] = {}
    missing: dict[str, list[str]] = {}
    traffic: Traffic = Traffic()


class SeenRouter(Struct, frozen=True, kw_only=True):
    """A report with its age on the control server's clock."""

    report: RouterReport
    age_s: float

    @property
    def may_serve(self) -> bool:
        """False once it cannot serve from the table it last read, wherever it is."""
        return self.serves_s >= 0

    @property
    def serves_s(self) -> float:
        """How much longer it may serve that table if it is not heard of again."""
        return self.report.max_age_s + ROUTER_MARGIN_S - self.age_s


class RunRecord(Struct, frozen=True, kw_only=True):
    """A run as its trainer wrote it. `ended_by` is an operator's reason, where the trainer did not end it itself.

    `heartbeat_ms` is when its trainer was last heard of, by the control server's clock; 0 when it was not.
    """

    epoch: int
    seq: int
    max_staleness: int
    ended_at: float = 0.0
    ended_by: str = ""
    heartbeat_ms: int = 0


class Request(Struct, frozen=True, kw_only=True):
    """What an operator asks for: `rollback` voids the current version of `run` (to `version`, or the one before).

    Where `version` is on its way in, it is given up and nothing is voided. `admit` promotes a version that waits at
    the gate, `refuse` rolls it back, `inconclusive` leaves it to what the settings say. `retire` gives up all that a
    run that has ended still serves. `current` is what whoever asks for a rollback saw as the run's current version,
    empty for none: once another is, the request is refused. None voids whatever is current when it is answered.
    """

    kind: str
    run: str
    version: str = ""
    reason: str = ""
    current: str | None = None


Want = Literal["", "room", "time"]


class VersionRecord(Struct, frozen=True, kw_only=True):
    """The fate of a version as the coordinator last wrote it.

    `want` is set on one rolled back for want of room, or of time, in the fleet: nobody said that it is bad.
    """

    state: str
    reason: str = ""
    want: Want = ""
    generation: int = 0
    at: float = 0.0


class Fleet(Struct, frozen=True, kw_only=True):
    """All that a decision is made from, read at `now` (the control server's wall clock, seconds).

    `fates` are those that the journal keeps: Redis may have lost that it was told of them. `unasked` are versions at
    the gate about which no worker has begun to ask its function, as far as one looked: reasons say so.
    """

    now: float
    table: Table
    runs: dict[str, RunRecord]
    published: dict[str, tuple[Manifest, ...]]
    replicas: dict[str, SeenReplica]
    acks: dict[str, dict[str, Ack]]
    routers: dict[str, SeenRouter]
    requests: dict[str, Request]
    fates: dict[str, VersionRecord] = {}
    unasked: frozenset[str] = frozenset()


class Need(Struct, frozen=True, kw_only=True, array_like=True):
    """A replica that must be alive in this life of its engine and have accepted the version in it, if one is named."""

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

    @property
    def fence(self) -> str:
        """What a write must show: a token of this incarnation of the control state."""
        return f"{self.incarnation}:{self.token}"


def read_acks(fields: dict[str, str]) -> dict[str, Ack]:
    found = {name: from_json(name, text, Ack) for name, text in fields.items()}
    return {name: ack for name, ack in found.items() if ack is not None}


def record_fields(record: VersionRecord) -> tuple[list[str], list[str]]:
    """Flat fields for its hash: those that are written, and the moment that stays as it was when the state was first
    entered. A version that is rolled back to was current before."""
    fields = [text for name, value in msgspec.to_builtins(record).items() for text in (name, str(value))]
    return fields, [f"{record.state}_at", str(record.at)]


def hash_fields(report: Struct) -> list[str]:
    """Flat fields for a hash: plain values as text, structured ones as JSON."""
    fields: list[str] = []
    for name, value in msgspec.to_builtins(report).items():
        fields += name, value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return fields


def from_hash(name: str, fields: dict[str, str], kind: type[RecordT]) -> RecordT | None:
    structured = _structured(kind)
    raw = {key: msgspec.Raw(text.encode()) if key in structured else text for key, text in fields.items()}
    return from_json(name, msgspec.json.encode(raw), kind)


class Heard(Struct, frozen=True, kw_only=True):
    """The one field of a report that the script writes, on the server's clock."""

    heartbeat_ms: int = 0


def heartbeat_ms(name: str, fields: dict[str, str]) -> int:
    """When a replica or router was last heard of; 0, long ago, where no report of ours says so."""
    heard = from_text(name, fields, Heard)
    return heard.heartbeat_ms if heard else 0


@cache
def _structured(kind: type[Struct]) -> frozenset[str]:
    """Fields kept as JSON. Asked for every record of every look at a fleet, and slow to find out: it compiles types."""
    return frozenset(field.name for field in msgspec.structs.fields(kind) if field.type is not str)


def from_text(name: str, fields: dict[str, str], kind: type[RecordT]) -> RecordT | None:
    return _understood(name, lambda: msgspec.convert(fields, kind, strict=False))


def from_json(name: str, text: str | bytes, kind: type[RecordT]) -> RecordT | None:
    return _understood(name, lambda: msgspec.json.decode(text, type=kind))


def _understood(name: str, read: Callable[[], RecordT]) -> RecordT | None:
    """What a record says; None, with a warning, for one that cannot be read: it must not stop the whole group."""
    try:
        return read()
    except (msgspec.MsgspecError, RecursionError) as error:
        _warn(name, str(error))
        return None


@lru_cache(maxsize=256)
def _warn(name: str, reason: str) -> None:
    """Once for each cause: records are read several times a second, for as long as they are there."""
    log.warning("record of %s is left out, it cannot be read: %s", name, reason)
