"""Who may do what in Redis: one user for each instance of each role, made from `keys.SPECS`.

A user reaches keys of its group only, writes those of its own instance where a key belongs to one, and on each kind of
key with the commands that its role needs. Scripts run with the rights of whoever calls them: every command in them is
checked like any other, so to run them is granted for the whole group and gives nothing by itself. Knows no server.

What the rules cannot say, since Redis knows no fields and no values: see `deploy/THREAT_MODEL.md`.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from msgspec import Struct

from adaptersync_core.identity import check_name
from adaptersync_core.keys import EVERYBODY, PREFIX, SPECS, KeySpec, Role, Server

ROUTER_PROCESS = "-??????"  # each process of a router adds six characters to its name
SEQ_DIGITS = 9  # of a sequence number that a trainer may publish under
DIGEST12 = "?" * 12

KEYLESS = "ping time select hello multi exec discard client|setname client|id"
READING = {
    "string": "get",
    "hash": "hget hgetall hmget hexists hlen hscan",
    "zset": "zrange zrangebyscore zscore zcard",
    "set": "smembers scard",
    "stream": "xread xrange xrevrange xlen xinfo|stream",
}
ANY_TYPE = "exists type ttl"
SCRIPTS = "eval evalsha"

# rq's own keys: whoever asks for jobs, or does them, shares them all
QUEUE_ROLES: tuple[Role, ...] = ("coordinator", "worker", "operator")
QUEUE_KEYS = "rq:*"
WORKERS = "rq:workers:adaptersync-{group}"  # those that look for jobs of a group
QUEUE_CHANNELS = "rq:pubsub:*"
# not @write, nor @read: they have commands without keys, such as FLUSHALL
QUEUE_COMMANDS = (
    "@hash @list @set @sortedset @stream @string watch del unlink exists type rename "
    "expire expireat pexpire persist ttl eval evalsha"
)
QUEUE_KEYLESS = "unwatch info publish subscribe unsubscribe psubscribe punsubscribe script|load script|exists"
WORKING_KEYLESS = "client|info"  # a worker of rq looks itself up
LOOKING_KEYLESS = "info"  # for `status`: what kind of server this is
LOOKING = "zrange zrevrange zcard zscore hget hmget xrevrange"  # and at which jobs have failed

# Of which part of a key's name an instance of a role is the owner. A trainer owns its run's versions, too.
OWNS: dict[Role, str] = {"trainer": "run", "agent": "replica", "router": "router"}


class RedisUser(Struct, frozen=True, order=True):
    """One user: an agent by its replica's name, a trainer by its run, others by their own."""

    role: Role
    name: str

    def user(self, group: str) -> str:
        """Names have no colon, so no two users are called the same."""
        return f"{group}:{self.role}:{self.name}"

    @property
    def file(self) -> str:
        return f"{self.role}-{self.name}"


def parse(text: str) -> RedisUser:
    """ "agent:replica-0" as an instance; NameInvalid."""
    role, _, name = text.partition(":")
    if role not in EVERYBODY:
        check_name(f"role (one of {', '.join(EVERYBODY)}) and", text)
    return RedisUser(role, check_name(role, name))  # type: ignore[arg-type]


def acl_file(group: str, passwords: dict[RedisUser, str], *, admin: str, server: Server | None = None) -> str:
    """The whole file. `admin` is the password of the user `admin`, who may do everything; `default` is nobody.

    `server` leaves out what is not on that one of the two servers.
    """
    lines = ["user default off resetpass resetkeys resetchannels -@all", f"user admin on {hashed(admin)} ~* &* +@all"]
    for instance, password in sorted(passwords.items()):
        rights = " ".join(rules(group, instance, server=server))
        lines.append(f"user {instance.user(group)} on {hashed(password)} {rights}")
    return "\n".join(lines) + "\n"


def hashed(password: str) -> str:
    return f"#{hashlib.sha256(password.encode()).hexdigest()}"


def rules(group: str, instance: RedisUser, *, server: Server | None = None) -> Iterator[str]:
    """What one user may do, as the arguments of ACL SETUSER."""
    head, role = f"{PREFIX}:{{{check_name('group', group)}}}:", instance.role
    yield from ("resetkeys", "resetchannels", "-@all")
    queues = role in QUEUE_ROLES and server != "cache"
    keyless = [KEYLESS]
    if queues:
        keyless.append(QUEUE_KEYLESS)
        yield f"&{QUEUE_CHANNELS}"
    if role == "worker":
        keyless.append(WORKING_KEYLESS)
    if role == "reader":
        keyless.append(LOOKING_KEYLESS)
    yield from _allowed(" ".join(keyless)).split()
    reads: dict[str, list[str]] = defaultdict(list)  # keys by command
    writes: dict[str, list[str]] = defaultdict(list)
    for spec in SPECS:
        if server is not None and spec.server != server:
            continue
        if role in spec.access:
            for command in spec.access[role].split():
                writes[command] += [head + name for name in owned(spec, instance)]
        if role in spec.access or role in spec.readers:
            for command in f"{READING[spec.type]} {ANY_TYPE}".split():
                reads[command].append(head + re.sub(r"\{\w+\}", "*", spec.pattern))
    if role == "reader" and server != "cache":
        reads["smembers"].append(WORKERS.format(group=group))
    yield from _selectors(reads, "%R~")
    yield from _selectors(writes, "~")
    if reads:
        yield f"({_allowed(SCRIPTS)} ~{head}*)"
    if role == "reader" and server != "cache":
        yield f"({_allowed(LOOKING)} %R~{QUEUE_KEYS})"
    if queues:
        yield f"({_allowed(QUEUE_COMMANDS)} ~{QUEUE_KEYS})"


def owned(spec: KeySpec, instance: RedisUser) -> Iterable[str]:
    """The names of keys of this kind that are this instance's to write, as Redis' patterns."""
    own, name = OWNS.get(instance.role), instance.name
    pattern = spec.pattern
    if own == "run" and "{version}" in pattern:
        # digits are counted out, for a pattern of any number of them is one of anything: another run may be called so
        for digits in range(SEQ_DIGITS):
            yield pattern.replace("{version}", f"{name}-v[1-9]{'[0-9]' * digits}-{DIGEST12}")
        return
    if own is not None:
        pattern = pattern.replace(f"{{{own}}}", name + (ROUTER_PROCESS if own == "router" else ""))
    yield re.sub(r"\{\w+\}", "*", pattern)


def _selectors(keys_of: dict[str, list[str]], mark: str) -> Iterator[str]:
    """One for each set of keys, with all commands for exactly these: a call with several keys needs one for all."""
    together: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for command, names in keys_of.items():
        together[tuple(names)].append(command)
    for keys, commands in together.items():
        yield f"({_allowed(' '.join(commands))} {' '.join(mark + key for key in keys)})"


def _allowed(commands: str) -> str:
    return " ".join(f"+{command}" for command in commands.split())
