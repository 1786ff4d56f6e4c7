"""What rq keeps of jobs: those that failed, and those of the clock. Read with commands of ours, as readers may."""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Collection, Iterator

from msgspec import Struct

from adaptersync_core.queue import ROUNDS, evaluation_id, job_id, last_line, queue_name
from adaptersync_core.redis import RedisClient, unless_refused

MOST = 10
FAILED, JOB, RESULTS, ASKED = "rq:failed:", "rq:job:", "rq:results:", "rq:cron_jobs"


class JobFailure(Struct, frozen=True, kw_only=True):
    """`about` is the version, or nothing. `at` is when it ended, as rq writes it: by the worker's clock."""

    job: str
    function: str
    about: str
    reason: str
    at: str


class RoundState(Struct, frozen=True, kw_only=True):
    """A job of the clock. `asked_s` ago it was last asked for by it, None: never. `state` is rq's; empty: forgotten."""

    name: str
    asked_s: float | None
    state: str


async def round_states(client: RedisClient, group: str) -> list[RoundState]:
    """Of each of ROUNDS, in their order."""
    time, *asked = await client.pipeline([("TIME",), *(("ZSCORE", ASKED, f"{group}-{name}") for name in ROUNDS)])
    states = await client.pipeline([("HGET", f"{JOB}{job_id(name, group)}", "status") for name in ROUNDS])
    now = int(time[0])
    return [
        RoundState(name=name, asked_s=None if at is None else max(0.0, now - float(at)), state=state or "")
        for name, at, state in zip(ROUNDS, asked, states, strict=True)
    ]


async def unasked(client: RedisClient, group: str, adapter_ids: Collection[str]) -> frozenset[str]:
    """Of versions at the gate those about which no worker has begun to ask its function.

    None where rq's keys cannot be read: others write them, and no more hangs on it than the words of a reason.
    """
    if not adapter_ids:
        return frozenset()
    reads = [("HGET", f"{JOB}{evaluation_id(group, name)}", "started_at") for name in adapter_ids]
    begun = await unless_refused(client.pipeline(reads), ["unknown"] * len(reads))
    return frozenset(name for name, at in zip(adapter_ids, begun, strict=True) if not at)


async def job_failures(client: RedisClient, group: str) -> list[JobFailure]:
    """Those of the last day, `MOST`, the newest first; without what was asked for again, and ended well."""
    names = await client.command("ZREVRANGE", f"{FAILED}{queue_name(group)}", 0, MOST - 1)
    reads: list[tuple[str | int, ...]] = []
    for name in names:
        reads.append(("HMGET", f"{JOB}{name}", "description", "ended_at"))
        reads.append(("XREVRANGE", f"{RESULTS}{name}", "+", "-", "COUNT", 1))
    replies = iter(await client.pipeline(reads))
    found = zip(names, replies, replies, strict=True)
    return [_failure(name, fields[0], fields[1], dict(_pairs(entries))) for name, fields, entries in found]


def _failure(name: str, description: str | None, ended_at: str | None, result: dict[str, str]) -> JobFailure:
    function, _, arguments = (description or "").partition("(")
    about = arguments.rstrip(")").split(",")[0].strip("'\" ")
    reason = last_line(_unpacked(result.get("exc_string", "")))
    return JobFailure(job=name, function=function.rpartition(".")[2], about=about, reason=reason, at=ended_at or "")


def _pairs(entries: list[tuple[str, dict[str, str]]]) -> Iterator[tuple[str, str]]:
    for _, fields in entries:
        yield from fields.items()


def _unpacked(text: str) -> str:
    try:
        return zlib.decompress(base64.b64decode(text)).decode(errors="replace")
    except (zlib.error, binascii.Error, ValueError):
        return ""
