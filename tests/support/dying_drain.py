"""A drain that is killed at every call it makes to the system: run as a program, in a process of its own.

    python dying_drain.py REDIS STORE

For each k, a fork drains some entries and kills itself with SIGKILL before the k-th call that may change something
outside, until one gets to the end. After each, another drains to its end, and what is archived is what there was, once.
Before that, after every other death, the coordinators' term becomes another one, so that all of it is read again.
Prints how many died, how many of them had archived something, and how many had trimmed something.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType

import msgspec
import pyarrow.parquet  # noqa: F401 - before the forks

from adaptersync.jobs import ledger
from adaptersync_core.events import to_fields
from adaptersync_core.fates import Fates, write_fates
from adaptersync_core.redis import RedisClient
from adaptersync_core.rollouts import FIELD
from support.ledger import RUN, Writer, archived, config_of, promoted, row

AFRESH = 10  # deaths after which everything begins anew: all that was archived is read after each

# what changes something outside, or asks for it
CALLS = frozenset(
    ("open", "write", "fsync", "rename", "replace", "mkdir", "rmdir", "unlink", "remove", "chmod", "fchmod", "close")
) | {"send", "sendall", "recv", "recv_into"}


def main(redis_url: str, store: str) -> None:
    ledger.PAGE, ledger.BATCH = 4, 8
    root = Path(store)
    config = config_of(redis_url, root)
    died = there = trimmed = 0
    wanted: list[str] = []
    while True:
        names = [f"{died}-{n}" for n in range(12)]
        length = asyncio.run(_more(redis_url, names, first=died * 1000))
        wanted += names
        before = _links(root)
        child = os.fork()
        if child == 0:
            _kill_at(died)
            asyncio.run(ledger.drain(config))
            sys.setprofile(None)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        there += _links(root) > before
        trimmed += asyncio.run(_length(redis_url)) < length
        if died % 2:
            asyncio.run(_another_term(redis_url, died))
        asyncio.run(ledger.drain(config))
        found = [line["request_id"] for line in archived(root)]
        assert found == wanted, (died, set(found) ^ set(wanted), len(found), len(wanted))
        for table in ("events", "fates"):
            assert len(archived(root, table)) == died % AFRESH + 1
        leftovers = [path for path in root.rglob("*") if ".making" in path.name or path.suffix in (".noted", ".half")]
        assert len(leftovers) <= 1 + died % AFRESH, leftovers
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        died += 1
        if died % AFRESH == 0:
            wanted.clear()
            shutil.rmtree(root / ".ledger")
            asyncio.run(_empty(redis_url))
    print(died, there, trimmed)


def _links(root: Path) -> int:
    return len(list((root / ".ledger").rglob("link.json")))


async def _more(redis_url: str, names: list[str], *, first: int) -> int:
    client = RedisClient(redis_url, name="more")
    await client.command("CONFIG", "SET", "stream-node-max-entries", 3)  # so that something is trimmed
    keys = Writer(client).keys
    calls = [
        ("XADD", keys.rollouts, f"{1_700_000_000_000 + first + n}-0", FIELD, msgspec.json.encode(row(name)))
        for n, name in enumerate(names)
    ]
    fates = Fates(run=RUN, epoch=1, fate="trained", requests=(names[0],))
    told = ("XADD", keys.events, "*", *to_fields(promoted())), ("XADD", keys.fates, "*", *write_fates(fates))
    await client.pipeline([*calls, *told])
    length = int(await client.command("XLEN", keys.rollouts))
    await client.close()
    return length


async def _length(redis_url: str) -> int:
    client = RedisClient(redis_url, name="more")
    length = int(await client.command("XLEN", Writer(client).keys.rollouts))
    await client.close()
    return length


async def _another_term(redis_url: str, number: int) -> None:
    client = RedisClient(redis_url, name="more")
    await client.command("HSET", Writer(client).keys.control, "incarnation", f"term-{number}")
    await client.close()


async def _empty(redis_url: str) -> None:
    client = RedisClient(redis_url, name="more")
    keys = Writer(client).keys
    await client.command("DEL", keys.rollouts, keys.fates, keys.events)
    await client.close()


def _kill_at(step: int) -> None:
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        if event == "c_call" and getattr(argument, "__name__", "") in CALLS:
            if calls == step:
                os.kill(os.getpid(), signal.SIGKILL)
            calls += 1

    sys.setprofile(count)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
