"""The two Redis servers: version, persistence, memory, rights and clock."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from adaptersync_core.address import Credentials, credentials
from adaptersync_core.config import Config
from adaptersync_core.errors import AdapterSyncError, ControlError
from adaptersync_core.keys import Keys
from adaptersync_core.redis import RedisClient
from adaptersync_core.scripts import Script
from adaptersync_tools.doctor.finding import Verdict

ANSWER_S = 3.0
FLOOR = {"redis": (7, 0), "valkey": (8, 0)}
SKEW_S = 1.0  # a clock that is off by more makes ages and waits wrong; nothing that decides uses it
FULL = 0.8  # of maxmemory
FAR_S = 0.05  # of a round trip: each request of a router waits for one
LOOPBACK = ("127.0.0.1", "::1", "localhost")
EVICTS = ("volatile-lru", "volatile-lfu", "volatile-random")


async def examine(verdict: Verdict, config: Config) -> None:
    control, cache = config.redis.control_url, config.redis.cache_url
    keys = Keys(config.group.name)
    await _server(verdict, "control server", control, keys)
    verdict.check(
        "cache server",
        bool(cache) and cache != control,
        "it is the control server: bytes on their way wait for its disk, and fill its memory",
        "start a second server without persistence, and set redis.cache_url",
        level="warning",
    )
    if cache and cache != control:
        await _server(verdict, "cache server", cache, keys)


async def _server(verdict: Verdict, about: str, url: str, keys: Keys) -> None:
    client = RedisClient(url, name="doctor", timeout_s=ANSWER_S)
    try:
        try:
            await client.command("PING")
        except ControlError as error:
            verdict.check(about, False, error.reason, error.next_step or "see its log")
            return
        where = urlsplit(url)
        safe = where.scheme in ("unix", "rediss") or where.hostname in LOOPBACK
        fix = "use rediss:// and a user for each service, or a network of its own"
        verdict.check(about, safe, "it is reached without encryption, from other hosts", fix, level="warning")
        verdict.check(
            about,
            safe or credentials(url) != Credentials(),
            "it takes commands without a password, from other hosts",
            "give it users: adaptersync acl, then redis.user and redis.password_file",
        )
        if about == "control server":  # what a user may do on the other one depends on its role
            await _rights(verdict, about, client, keys)
        await _clock(verdict, about, client)
        told = await _told(verdict, about, client)
        if told:
            _version(verdict, about, told)
            _memory(verdict, about, told)
            if about == "control server":
                await _persistence(verdict, about, client, told)
            else:
                _evicts(verdict, about, told)
    finally:
        await client.close()


async def _rights(verdict: Verdict, about: str, client: RedisClient, keys: Keys) -> None:
    """Every kind of command that services use, in forms that change nothing."""
    for what, command in {
        "read its keys": ("GET", keys.table),
        "read records": ("HGETALL", keys.control),
        "follow events": ("XREVRANGE", keys.events, "+", "-", "COUNT", 1),
    }.items():
        await _may(verdict, about, what, partial(client.command, *command))
    await _may(verdict, about, "run scripts", lambda: client.script(Script("look"), [keys.control], []))


async def _may(verdict: Verdict, about: str, what: str, call: Callable[[], Awaitable[Any]]) -> None:
    try:
        await call()
        refused = ""
    except ControlError as error:
        # a script that finds nothing to do may complain; only a refusal of the right counts
        refused = error.reason if "permission" in error.reason.lower() or "NOPERM" in error.reason else ""
    verdict.check(about, not refused, f"this user may not {what}: {refused}", "see the users of the ACL file")


async def _clock(verdict: Verdict, about: str, client: RedisClient) -> None:
    began, sent_at = time.monotonic(), time.time()
    try:
        seconds, microseconds = await client.command("TIME")
    except AdapterSyncError as error:
        verdict.check(about, False, f"its clock cannot be read: {error.reason}", "see the users of the ACL file")
        return
    spent = time.monotonic() - began
    off = int(seconds) + int(microseconds) / 1e6 - (sent_at + spent / 2)
    verdict.check(
        about,
        abs(off) <= SKEW_S + spent,
        f"its clock is {abs(off):.1f} s {'ahead of' if off > 0 else 'behind'} this host's",
        "run chrony or systemd-timesyncd on both: ages and waits are wrong otherwise",
        level="warning",
    )
    verdict.check(
        about, spent <= FAR_S, f"an answer takes {spent * 1000:.0f} ms", "routers wait for it: move it nearer",
        level="warning",
    )  # fmt: skip


async def _told(verdict: Verdict, about: str, client: RedisClient) -> dict[str, str]:
    try:
        told = await client.command("INFO")
    except ControlError as error:
        what = f"it does not say how it is set up: {error.reason}"
        verdict.check(about, False, what, "allow INFO to this user, or look yourself", level="warning")
        return {}
    return {name: str(value) for name, value in told.items()}


def _version(verdict: Verdict, about: str, told: dict[str, str]) -> None:
    kind = "valkey" if told.get("valkey_version") else "redis"
    text = told.get(f"{kind}_version", "0")
    version = tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
    least = ".".join(map(str, FLOOR[kind]))
    verdict.check(about, version >= FLOOR[kind], f"it is too old: {kind} {text}", f"run {kind} {least} or newer")


def _memory(verdict: Verdict, about: str, told: dict[str, str]) -> None:
    most, used = int(told.get("maxmemory", 0)), int(told.get("used_memory", 0))
    verdict.check(
        about, most > 0, "its memory is not bounded", "set maxmemory: adaptersync plan says to what", level="warning"
    )
    verdict.check(
        about,
        not most or used <= FULL * most,
        f"{used >> 20} of {most >> 20} MiB are taken",
        "raise maxmemory, or see what fills it (redis-cli --bigkeys)",
    )


async def _persistence(verdict: Verdict, about: str, client: RedisClient, told: dict[str, str]) -> None:
    fix = "set maxmemory-policy noeviction"
    policy = told.get("maxmemory_policy", "")
    verdict.check(about, policy == "noeviction", f"it evicts what must not be lost ({policy})", fix)
    written = told.get("aof_enabled") == "1"
    verdict.check(about, written, "it loses what was decided when it ends", "set appendonly yes, appendfsync always")
    verdict.check(
        about,
        told.get("aof_last_write_status", "ok") == "ok",
        "its last write to disk failed",
        "see its log, and whether its disk is full",
    )
    try:
        found = await client.command("CONFIG", "GET", "appendfsync")
    except ControlError:
        return  # not for everyone
    values = list(found.values()) if isinstance(found, dict) else list(found[1::2])
    fsync = str(values[0]) if values else ""
    verdict.check(
        about,
        not written or fsync == "always",
        f"what it acknowledged in the last second may be lost (appendfsync {fsync})",
        "set appendfsync always; without it, a decision may be taken twice after a crash, and is found to be",
        level="warning",
    )


def _evicts(verdict: Verdict, about: str, told: dict[str, str]) -> None:
    policy, bounded = told.get("maxmemory_policy", ""), int(told.get("maxmemory", 0)) > 0
    verdict.check(
        about,
        not bounded or policy != "noeviction",
        "at its bound it refuses bytes and choices instead of forgetting old ones (noeviction)",
        "set maxmemory-policy volatile-lru",
    )
    verdict.check(
        about,
        not bounded or policy == "noeviction" or policy in EVICTS,
        f"it may forget counts that are in use ({policy})",
        "set maxmemory-policy volatile-lru",
        level="warning",
    )
    verdict.check(
        about,
        told.get("aof_enabled") != "1",
        "it writes to disk what may be forgotten, and is slow for it",
        "set appendonly no",
        level="warning",
    )
