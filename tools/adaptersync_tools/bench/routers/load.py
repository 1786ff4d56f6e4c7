"""What clients send, and what they see: by wrk where it is speed that counts, by clients of our own where each answer
does. Knows no router.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import aiohttp
import msgspec
from msgspec import Struct

from adaptersync_core import headers
from adaptersync_core.errors import ConfigError
from adaptersync_tools.bench.routers.parties import BenchFailed, Party

SCRIPT = Path(__file__).with_name("load.lua")
ANSWER_S = 30.0  # longer than any answer here takes
END_S = 30.0  # for wrk to end, after its time
PAUSE_S = 0.02  # of a client whose request failed: errors are quick, and would be most of what is counted
BYTES = 256  # token ids below it are tokens of simulated replicas, too


class Load(Struct, frozen=True, kw_only=True):
    """`connections` keep as many requests in flight. `window` prompts are asked for at once, in shuffled order."""

    connections: int = 128
    window: int = 16
    completions: int = 8
    tokens: int = 135
    template: int = 23
    """Tokens that all prompts begin with."""


class Found(Struct, frozen=True, kw_only=True):
    """What wrk says. `errors`: answers that are none, and connections that broke."""

    requests: int
    seconds: float
    p50_s: float
    p99_s: float
    errors: int

    @property
    def rate(self) -> float:
        return self.requests / self.seconds


def find_wrk() -> str:
    """ConfigError when it is missing."""
    found = shutil.which("wrk")
    if found is None:
        raise ConfigError("wrk is missing, which makes the load", next_step="apt-get install wrk")
    return found


async def press(url: str, load: Load, party: Party, model: str, *, seconds: float, seed: int = 1) -> Found:
    """Send `load` to one router for `seconds`; loads of one seed ask for the same prompts."""
    told = {
        "model": model,
        "api": party.api,
        "session": int(party.session),
        "seed": seed,
        "window": load.window,
        "completions": load.completions,
        "tokens": load.tokens,
        "template": load.template,
    }
    command = [find_wrk(), "-t1", f"-c{load.connections}", f"-d{max(1, round(seconds))}s", f"--timeout={ANSWER_S:g}s"]
    command += ["-s", str(SCRIPT), url, "--", *(f"{name}={value}" for name, value in told.items())]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(seconds + END_S):
            text, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    for line in text.decode(errors="replace").splitlines():
        if line.startswith("FOUND "):
            return msgspec.json.decode(line.removeprefix("FOUND "), type=Found)
    raise BenchFailed(f"wrk said nothing of use: {text.decode(errors='replace')[-300:]}", router=party.name)


class Seen:
    """What clients saw: statuses, or the name of what went wrong; and who answered well since the last `mark`."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.since: Counter[str] = Counter()

    def mark(self) -> None:
        self.since.clear()

    @property
    def failed(self) -> int:
        return self.outcomes.total() - self.outcomes["200"]


class _Request(NamedTuple):
    url: str
    headers: dict[str, str]
    body: bytes


@contextlib.asynccontextmanager
async def clients(urls: Sequence[str], load: Load, party: Party, model: str, *, seed: int = 1) -> AsyncIterator[Seen]:
    """As many clients as `load` has connections ask while the context lasts; each waits for its last answer.

    They are one trainer's: the completions of a prompt go to the routers in turn.
    """
    seen, stop = Seen(), asyncio.Event()
    asking = _requests(load, urls, party, model, random.Random(seed))  # noqa: S311 (a load, no secret)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as session,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(load.connections):
            group.create_task(_client(session, asking, seen, stop))
        try:
            yield seen
        finally:
            stop.set()


async def _client(session: aiohttp.ClientSession, asking: Iterator[_Request], seen: Seen, stop: asyncio.Event) -> None:
    while not stop.is_set():
        request = next(asking)
        try:
            async with session.post(request.url, data=request.body, headers=request.headers) as answer:
                text = await answer.read()
            outcome = str(answer.status)
        except (aiohttp.ClientError, TimeoutError) as error:
            outcome = type(error).__name__
        seen.outcomes[outcome] += 1
        if outcome == "200":
            seen.since[answer.headers.get(headers.REPLICA) or _replica(text)] += 1
        else:
            await asyncio.sleep(PAUSE_S)


def _requests(load: Load, urls: Sequence[str], party: Party, model: str, chance: random.Random) -> Iterator[_Request]:
    path = "/generate" if party.api == "generate" else "/v1/completions"
    template = [chance.randrange(BYTES) for _ in range(load.template)]
    number = 0
    while True:
        window: list[_Request] = []
        for _ in range(load.window):
            number += 1
            prompt = template + [chance.randrange(BYTES) for _ in range(load.tokens - load.template)]
            asked: dict[str, object] = {"model": model, "prompt": prompt, "max_tokens": 2}
            if party.api == "generate":
                asked = {"lora_path": model, "input_ids": prompt, "sampling_params": {"max_new_tokens": 2}}
            sent = {"content-type": "application/json"}
            if party.session:
                sent["x-session-id"] = f"prompt-{number}"
            body = msgspec.json.encode(asked)
            window += [_Request(f"{urls[each % len(urls)]}{path}", sent, body) for each in range(load.completions)]
        chance.shuffle(window)
        yield from window


class _Answer(Struct, frozen=True):
    system_fingerprint: str = ""


def _replica(text: bytes) -> str:
    """Whose answer it was, where its router does not say."""
    return msgspec.json.decode(text, type=_Answer).system_fingerprint
