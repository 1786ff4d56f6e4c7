"""What users of Redis may do, on real servers: all that their role needs, and none of what is another's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest
import redis

from adaptersync.coordinator.observer import workers
from adaptersync.jobs.ledger import drain
from adaptersync_core import scaling
from adaptersync_core.access import OWNS, READING, RedisUser, rules
from adaptersync_core.config import Config, load_config
from adaptersync_core.errors import ControlError
from adaptersync_core.keys import EVERYBODY, SPECS, Keys, Role
from adaptersync_core.records import Ack, ReplicaReport, Request, RouterReport
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from adaptersync_core.table import Table
from adaptersync_core.unarchived import unarchived_s

GROUP = "test"
KEYS = Keys(GROUP)
NAMES: dict[Role, str] = {"trainer": "run-a", "agent": "replica-0", "router": "router-0"}
V1 = "run-a-v1-0123456789ab"
PARTS = {
    "run": "run-a",
    "version": V1,
    "replica": "replica-0",
    "router": "router-0-0a1b2c",
    "session": "5e55",
    "sha256": "ab",
    "place": "0",
}
OTHERS = PARTS | {
    "run": "run-b",
    "version": "run-b-v1-0123456789ab",
    "replica": "replica-1",
    "router": "router-1-0a1b2c",
}
# a call of each command that is granted to anybody, on one key
CALLS = {
    "set": ("v",), "setnx": ("v",), "getex": (), "get": (), "unlink": (), "del": (), "expire": ("9",),
    "hset": ("f", "v"), "hincrby": ("f", "1"), "hdel": ("f",), "zadd": ("1", "m"), "zrem": ("m",),
    "zremrangebyscore": ("0", "1"), "sadd": ("m",), "xadd": ("*", "f", "v"), "xtrim": ("MAXLEN", "9"),
}  # fmt: skip
DESTRUCTIVE = {"string": "set", "hash": "hset", "zset": "zadd", "set": "sadd", "stream": "xadd"}
SCRIPT = """
local call = KEYS[1] and ARGV or {unpack(ARGV, 2)}
return redis.call(unpack(call))
"""
NOBODYS = (
    ("FLUSHALL",), ("KEYS", "*"), ("CONFIG", "GET", "*"), ("ACL", "LIST"), ("CLIENT", "KILL", "TYPE", "normal"),
    ("SHUTDOWN",), ("DEBUG", "SLEEP", "0"), ("SCRIPT", "FLUSH"), ("MONITOR",), ("REPLICAOF", "NO", "ONE"),
    ("XDEL", KEYS.events, "1-1"), ("XDEL", KEYS.rollouts, "1-1"), ("SAVE",), ("ROLE",),
)  # fmt: skip


def instance(role: Role) -> RedisUser:
    return RedisUser(role, NAMES.get(role, f"{role}-0"))


@pytest.fixture
def admin(redis_url: str) -> Iterator[redis.Redis]:
    """The server, with a user for each role; none is left behind."""
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        users = [instance(role) for role in EVERYBODY]
        for each in users:
            client.execute_command("ACL", "SETUSER", each.user(GROUP), "on", f">{each.file}", *rules(GROUP, each))
        yield client
        client.execute_command("ACL", "DELUSER", *(each.user(GROUP) for each in users))


@pytest.fixture
async def registry(admin: redis.Redis, redis_url: str) -> AsyncIterator[Callable[[Role], Registry]]:
    clients = []

    def of(role: Role) -> Registry:
        user = instance(role)
        parts = urlsplit(redis_url)
        netloc = f"{quote(user.user(GROUP), safe='')}:{user.file}@{parts.netloc.rpartition('@')[2]}"
        clients.append(RedisClient(parts._replace(netloc=netloc).geturl(), name="test"))
        return Registry(clients[-1], KEYS)

    yield of
    for client in clients:
        await client.close()


def dry(admin: redis.Redis, role: Role, *command: str) -> bool:
    return bool(admin.acl_dryrun(instance(role).user(GROUP), *command) == "OK")


@pytest.mark.parametrize("role", EVERYBODY)
def test_a_role_may_do_what_the_table_says_and_nothing_else(admin: redis.Redis, role: Role) -> None:
    """All roles, all kinds of keys, its own and another's, all commands that anybody has."""
    for spec in SPECS:
        allowed = set(spec.access.get(role, "").split())
        reads = role in spec.access or role in spec.readers
        for parts in (PARTS, OTHERS):
            key = f"adaptersync:{{{GROUP}}}:{spec.pattern.format(**parts)}"
            owns = parts is PARTS or not _belongs(spec.pattern, role)
            for command, arguments in CALLS.items():
                if command in READING[spec.type].split():
                    continue
                may = command in allowed and owns
                assert dry(admin, role, command, key, *arguments) == may, (role, command, key, may)
            assert dry(admin, role, "type", key) == reads, (role, key)


def _belongs(pattern: str, role: Role) -> bool:
    """Whether a key of this kind belongs to one instance of the role."""
    own = OWNS.get(role)
    return own is not None and any(f"{{{part}}}" in pattern for part in ((own, "version") if own == "run" else (own,)))


@pytest.mark.parametrize("role", EVERYBODY)
def test_nobody_may_reach_the_server_another_group_or_a_key_of_nobody(admin: redis.Redis, role: Role) -> None:
    for command in NOBODYS:
        assert not dry(admin, role, *command), command
    other = Keys("other")
    for spec in SPECS:
        key = f"adaptersync:{{other}}:{spec.pattern.format(**PARTS)}"
        assert not dry(admin, role, DESTRUCTIVE[spec.type], key, *CALLS[DESTRUCTIVE[spec.type]])
        assert not dry(admin, role, "type", key)
    assert not dry(admin, role, "eval", "return 1", "1", other.table)
    assert not dry(admin, role, "set", "foreign", "v")
    if role not in ("coordinator", "worker", "operator"):
        assert not dry(admin, role, "lpush", "rq:queue:adaptersync-test", "job")


@pytest.mark.parametrize("role", EVERYBODY)
async def test_a_script_gives_nobody_more(registry: Callable[[Role], Registry], role: Role) -> None:
    """To run a script is granted for the whole group, of which the commands in it are refused all the same."""
    client = registry(role).client
    for spec in SPECS:
        command = DESTRUCTIVE[spec.type]
        key = f"adaptersync:{{{GROUP}}}:{spec.pattern.format(**OTHERS)}"
        if command in spec.access.get(role, "").split() and not _belongs(spec.pattern, role):
            continue  # it may
        for keys in ((1, key), (0, key)):  # declared, and not
            with pytest.raises(ControlError, match=r"permission|The user executing the script can't"):
                await client.command("EVAL", SCRIPT, *keys, command, key, *CALLS[command])


def ack(accepted: bool = True) -> Ack:
    return Ack(accepted=accepted, engine_epoch="e1")


def report() -> ReplicaReport:
    return ReplicaReport(
        url="http://127.0.0.1:1", base_model="base", engine_epoch="e1", max_loras=1, max_cpu_loras=1, max_lora_rank=8,
        block_size=16, loaded=(),
    )  # fmt: skip


async def test_an_agent_speaks_for_its_replica_only(registry: Callable[[Role], Registry]) -> None:
    agent = registry("agent")
    await agent.report_replica("replica-0", report())
    assert await agent.ack("replica-0", V1, ack())
    await agent.forget_acks("replica-0", [V1])
    with pytest.raises(ControlError):
        await agent.ack("replica-1", V1, ack())
    with pytest.raises(ControlError):
        await agent.report_replica("replica-1", report())
    with pytest.raises(ControlError):
        await agent.lead("coordinator-9", "term", lease_s=1.0)
    with pytest.raises(ControlError):
        await agent.request(Request(kind="rollback", run="run-a"))
    assert await registry("reader").acks("replica-1") == {}
    assert await registry("coordinator").table() == Table()


async def test_who_leads_and_who_looks_on_learn_what_is_not_archived(registry: Callable[[Role], Registry]) -> None:
    for role in EVERYBODY:
        asked = unarchived_s(registry(role).client, KEYS, Config())
        if role in ("agent", "router"):
            with pytest.raises(ControlError):  # which is not that nothing waits
                await asked
        else:
            assert await asked is not None, role


async def test_a_trainer_has_its_run_only(registry: Callable[[Role], Registry]) -> None:
    trainer = registry("trainer")
    epoch, _ = await trainer.begin_run("run-a", nonce="n", max_staleness=1, trainer="host")
    assert await trainer.reserve("run-a", epoch=epoch, nonce="p", trainer="n") == 1
    assert await trainer.settle_store_id("mine") == "mine"
    with pytest.raises(ControlError):
        await trainer.begin_run("run-b", nonce="n", max_staleness=1, trainer="host")
    with pytest.raises(ControlError):
        await trainer.client.command("SET", KEYS.store, "another")
    assert await registry("coordinator").settle_store_id("another") == "mine"


async def test_a_router_reports_and_forgets_itself_only(registry: Callable[[Role], Registry]) -> None:
    router, said = registry("router"), RouterReport(generation=0)
    await router.report_router("router-0-0a1b2c", said)
    with pytest.raises(ControlError):
        await router.report_router("router-1-0a1b2c", said)
    with pytest.raises(ControlError):
        await router.forget_router("router-1-0a1b2c")
    await router.forget_router("router-0-0a1b2c")


async def test_who_verifies_cannot_say_what_became_of_a_version(registry: Callable[[Role], Registry]) -> None:
    worker = registry("worker")
    assert await worker.verified(V1, ok=False, reason="bytes differ")
    assert not await worker.verified(V1, ok=False, reason="bytes differ")
    with pytest.raises(ControlError):
        await worker.client.command("HSET", KEYS.version(V1), "state", "voided")
    ((_, record),) = await registry("reader").records([V1])
    assert record["verified_ok"] == "false"
    assert await registry("reader").version(V1) is None


async def test_a_reader_sees_everything_and_changes_nothing(registry: Callable[[Role], Registry]) -> None:
    reader = registry("reader")
    await reader.fleet()
    await reader.leader()
    await reader.ready()
    await reader.client.read_stream(KEYS.rollouts, "0")
    assert await scaling.asked(reader.client, KEYS) == {}
    assert await workers(reader) == {}
    assert await workers(registry("router")) is None
    for call in (
        reader.request(Request(kind="rollback", run="run-a")),
        scaling.ask(reader.client, KEYS, "host", scaling.Scale(replicas=1)),
        scaling.forget(registry("coordinator").client, KEYS, "host"),
        reader.begin_run("run-a", nonce="n", max_staleness=1, trainer="host"),
        reader.verified(V1, ok=True, reason=""),
    ):
        with pytest.raises(ControlError):
            await call


async def test_an_operator_ends_a_run_and_nobody_else_does(registry: Callable[[Role], Registry]) -> None:
    await registry("trainer").begin_run("run-a", nonce="n", max_staleness=1, trainer="host")
    for role in ("agent", "reader", "router", "worker"):
        with pytest.raises(ControlError):
            await registry(role).close_run("run-a", reason="x", alive_s=0)
    assert await registry("operator").close_run("run-a", reason="x", alive_s=0)


async def test_an_operator_asks_and_does_not_decide(registry: Callable[[Role], Registry]) -> None:
    operator = registry("operator")
    assert await operator.request(Request(kind="rollback", run="run-a"))
    with pytest.raises(ControlError):
        await operator.client.command("HDEL", KEYS.requests, "x")
    with pytest.raises(ControlError):
        await operator.lead("operator", "term", lease_s=1.0)
    assert await registry("coordinator").request(Request(kind="rollback", run="run-a"))  # what its page was asked for
    assert await registry("coordinator").lead("coordinator-0", "term", lease_s=1.0)


async def test_a_worker_archives_the_ledger_and_nobody_else_trims_it(
    registry: Callable[[Role], Registry], admin: redis.Redis, tmp_path: Path
) -> None:
    for number in range(1000):
        admin.xadd(KEYS.rollouts, {"row": "{}"}, id=f"{1_700_000_000_000 + number}-0")
    worker = registry("worker").client.url
    environment = {
        "ADAPTERSYNC_GROUP__NAME": GROUP,
        "ADAPTERSYNC_REDIS__CONTROL_URL": worker,
        "ADAPTERSYNC_STORE__PATH": str(tmp_path / "store"),
    }
    done = await drain(load_config(environment=environment))
    assert done.entries == 1000
    assert done.trimmed > 0
    for role in EVERYBODY:
        assert dry(admin, role, "XTRIM", KEYS.rollouts, "MINID", "~", "1-0", "LIMIT", "9") == (role == "worker")
