"""Every Redis key: its name, type, bound, time to live and who writes it.

All keys of a group share one hash tag, so that one Lua script may touch them. `SPECS` is the table that documentation,
access rules and the leak check of the tests are made from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from adaptersync_core.identity import check_name

PREFIX = "adaptersync"
Server = Literal["control", "cache"]
Role = Literal["trainer", "agent", "coordinator", "router", "worker", "operator", "reader"]
EVERYBODY: tuple[Role, ...] = ("trainer", "agent", "coordinator", "router", "worker", "operator", "reader")


class KeySpec(Struct, frozen=True, kw_only=True):
    """One kind of key. `ttl_s` is 0 for keys that stay; `bound` says what keeps it from growing.

    `access` are the commands beyond reading that each role needs, on keys of its own where the pattern names what it
    is an instance of (`access.py`); `readers` are those who only read.
    """

    pattern: str
    type: Literal["string", "hash", "stream", "zset", "set"]
    server: Server
    writer: str
    bound: str
    ttl_s: int = 0
    access: Mapping[Role, str] = {}
    readers: tuple[Role, ...] = EVERYBODY


REPLICA_TTL_S = 3600  # a replica that said nothing for an hour is forgotten
ROUTER_SERVES_S = 60  # the longest that a router without Redis may go on serving from its last table
ROUTER_MARGIN_S = 5  # for clocks that run at different speeds: a silent router holds up retirement this much longer
ROUTER_TTL_S = ROUTER_SERVES_S + ROUTER_MARGIN_S
TRAINER_ALIVE_S = 15  # a trainer that was heard of within this lives; its run is not ended by somebody else
VERSION_TTL_S = 30 * 86400  # how long the fate of a version that is gone can be asked for
PUBLISHED_KEPT = 10_000  # of the latest versions of a run, by number; what is older is in the archive
OWNERSHIP_TTL_S = 6 * 3600  # ownership of a version of which no new prompt came
LANE_TTL_S = 600  # bytes in the fast lane; long enough for the slowest replica, short enough to leave no heap
INFLIGHT_TTL_S = 60  # in-flight counts when no router is left
PROMISES_TTL_S = 600  # what is expected of a version of which no new prompt came
QUEUES_TTL_S = 3600  # from the first field on, not from the last: so replicas that are gone go, and others come again
REPEATS_TTL_S = 86400  # how often a run's prompts are asked for, when it stands still
SESSION_TTL_S = 3600  # where a conversation is, after its last turn; router.session_s

SPECS = (
    KeySpec(
        pattern="control",
        type="hash",
        server="control",
        writer="coordinator",
        bound="6 fields",
        access={"coordinator": "hset hincrby"},
    ),
    KeySpec(
        pattern="store",
        type="string",
        server="control",
        writer="trainer, coordinator, worker",
        bound="an id",
        access={"trainer": "setnx", "coordinator": "setnx", "worker": "setnx"},
    ),
    KeySpec(
        pattern="table",
        type="string",
        server="control",
        writer="coordinator",
        bound="live versions and members",
        access={"coordinator": "set"},
    ),
    KeySpec(
        pattern="events",
        type="stream",
        server="control",
        writer="all",
        bound="20000 and those of the last jobs.ledger_kept_s; trimmed once archived",
        access={**dict.fromkeys(("trainer", "agent", "coordinator", "operator"), "xadd"), "worker": "xadd xtrim"},
    ),
    KeySpec(
        pattern="rollouts",
        type="stream",
        server="control",
        writer="router",
        bound="those of the last jobs.ledger_kept_s; trimmed once archived",
        access={"router": "xadd", "worker": "xtrim"},
        readers=("trainer", "coordinator", "router", "worker", "operator", "reader"),
    ),
    KeySpec(
        pattern="fates",
        type="stream",
        server="control",
        writer="trainer",
        bound="those of the last jobs.ledger_kept_s; trimmed once archived",
        access={"trainer": "xadd", "worker": "xtrim"},
        readers=("coordinator", "worker", "operator", "reader"),
    ),
    KeySpec(
        pattern="archived",
        type="hash",
        server="control",
        writer="worker",
        bound="3 fields",
        access={"worker": "hset"},
    ),
    KeySpec(
        pattern="runs",
        type="set",
        server="control",
        writer="trainer",
        bound="one a run",
        access={"trainer": "sadd", "coordinator": "sadd"},
    ),
    KeySpec(
        pattern="run:{run}",
        type="hash",
        server="control",
        writer="trainer",
        bound="12 fields",
        access={"trainer": "hset hdel", "coordinator": "hset hdel", "operator": "hset"},
    ),
    KeySpec(
        pattern="published:{run}",
        type="zset",
        server="control",
        writer="trainer",
        bound="10000, and those that were not considered yet",
        access={"trainer": "zadd", "coordinator": "zadd zremrangebyscore"},
    ),
    KeySpec(
        pattern="manifest:{version}",
        type="string",
        server="control",
        writer="trainer",
        bound="8 MiB",
        ttl_s=VERSION_TTL_S,
        access={"trainer": "set", "coordinator": "set"},
    ),
    KeySpec(
        pattern="version:{version}",
        type="hash",
        server="control",
        writer="coordinator",
        bound="20 fields",
        ttl_s=VERSION_TTL_S,
        access={"coordinator": "hset expire"},
    ),
    KeySpec(
        pattern="verified:{version}",
        type="hash",
        server="control",
        writer="worker",
        bound="3 fields",
        ttl_s=VERSION_TTL_S,
        access={"worker": "hset expire"},
    ),
    KeySpec(
        pattern="requests",
        type="hash",
        server="control",
        writer="operator",
        bound="64 requests",
        # coordinators are asked through their page, too; workers say what the gate's function has said
        access={"operator": "hset", "coordinator": "hset hdel", "worker": "hset"},
    ),
    KeySpec(
        pattern="scale",
        type="hash",
        server="control",
        writer="operator",
        bound="64 hosts",
        access={"operator": "hset hdel"},
        readers=("coordinator", "operator", "reader"),
    ),
    KeySpec(
        pattern="replicas",
        type="zset",
        server="control",
        writer="agent",
        bound="one a replica",
        access={"agent": "zadd zremrangebyscore"},
    ),
    KeySpec(
        pattern="replica:{replica}",
        type="hash",
        server="control",
        writer="agent",
        bound="15 fields",
        ttl_s=REPLICA_TTL_S,
        access={"agent": "del hset expire"},
    ),
    KeySpec(
        pattern="acks:{replica}",
        type="hash",
        server="control",
        writer="agent",
        bound="live versions",
        ttl_s=REPLICA_TTL_S,
        access={"agent": "hset hdel expire"},
    ),
    KeySpec(
        pattern="routers",
        type="zset",
        server="control",
        writer="router",
        bound="one a router",
        access={"router": "zadd zremrangebyscore zrem"},
    ),
    KeySpec(
        pattern="router:{router}",
        type="hash",
        server="control",
        writer="router",
        bound="8 fields",
        ttl_s=ROUTER_TTL_S,
        access={"router": "del hset expire"},
    ),
    KeySpec(
        pattern="lane:{sha256}:{place}",
        type="string",
        server="cache",
        writer="trainer",
        bound="1 MiB each, redis.lane_bytes a version",
        ttl_s=LANE_TTL_S,
        access={"trainer": "set"},
        readers=("agent",),
    ),
    KeySpec(
        pattern="owned:{version}",
        type="hash",
        server="cache",
        writer="router, agent",
        bound="group.blocks_per_version",
        ttl_s=OWNERSHIP_TTL_S,
        access={"router": "hset hdel expire unlink", "agent": "hset hdel expire unlink"},
        readers=(),
    ),
    KeySpec(
        pattern="inflight",
        type="hash",
        server="cache",
        writer="router",
        bound="routers x ranks of replicas",
        ttl_s=INFLIGHT_TTL_S,
        access={"router": "hset hincrby hdel del expire"},
        readers=(),
    ),
    KeySpec(
        pattern="queues",
        type="hash",
        server="cache",
        writer="router, agent",
        bound="2 fields for each rank of a replica of an hour",
        ttl_s=QUEUES_TTL_S,
        access={"router": "hset expire", "agent": "hset expire"},
        readers=(),
    ),
    KeySpec(
        pattern="promises:{version}",
        type="hash",
        server="cache",
        writer="router",
        bound="4096 prompts and one a rank of a replica",
        ttl_s=PROMISES_TTL_S,
        access={"router": "hset hincrby hdel expire unlink"},
        readers=(),
    ),
    KeySpec(
        pattern="repeats:{run}",
        type="hash",
        server="cache",
        writer="router",
        bound="2 fields",
        ttl_s=REPEATS_TTL_S,
        access={"router": "hset hincrby expire"},
        readers=(),
    ),
    KeySpec(
        pattern="session:{session}",
        type="string",
        server="cache",
        writer="router",
        bound="300 bytes, one a session of the last router.session_s",
        ttl_s=SESSION_TTL_S,
        access={"router": "set getex"},
        readers=(),
    ),
)


class Keys:
    """The keys of one group."""

    def __init__(self, group: str) -> None:
        self.group = check_name("group", group)
        self._head = f"{PREFIX}:{{{group}}}:"
        self.control = self._head + "control"
        self.store = self._head + "store"
        self.table = self._head + "table"
        self.events = self._head + "events"
        self.rollouts = self._head + "rollouts"
        self.fates = self._head + "fates"
        self.archived = self._head + "archived"
        self.runs = self._head + "runs"
        self.requests = self._head + "requests"
        self.scale = self._head + "scale"
        self.replicas = self._head + "replicas"
        self.routers = self._head + "routers"
        self.inflight = self._head + "inflight"
        self.queues = self._head + "queues"

    def run(self, run: str) -> str:
        return f"{self._head}run:{run}"

    def published(self, run: str) -> str:
        return f"{self._head}published:{run}"

    def manifest(self, adapter_id: str) -> str:
        return f"{self._head}manifest:{adapter_id}"

    def version(self, adapter_id: str) -> str:
        return f"{self._head}version:{adapter_id}"

    def verified(self, adapter_id: str) -> str:
        return f"{self._head}verified:{adapter_id}"

    def replica(self, replica: str) -> str:
        return f"{self._head}replica:{replica}"

    def acks(self, replica: str) -> str:
        return f"{self._head}acks:{replica}"

    def router(self, router: str) -> str:
        return f"{self._head}router:{router}"

    def lane(self, sha256: str, place: int) -> str:
        return f"{self._head}lane:{sha256}:{place}"

    def owned(self, adapter_id: str) -> str:
        return f"{self._head}owned:{adapter_id}"

    def promises(self, adapter_id: str) -> str:
        return f"{self._head}promises:{adapter_id}"

    def repeats(self, run: str) -> str:
        return f"{self._head}repeats:{run}"

    def session(self, session: str) -> str:
        return f"{self._head}session:{session}"
