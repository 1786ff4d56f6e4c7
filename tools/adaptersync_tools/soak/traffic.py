"""Rollouts in all the forms there are: groups, streams, conversations, by a version's id, and clients that go away.

All of it is to be answered, and to the end: nobody asks for what is not there. A client that goes away does so on
purpose and has no answer.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import aiohttp
import orjson
from msgspec import Struct

from adaptersync_core.headers import SESSION, VERSION

KINDS = ("group", "stream", "conversation", "by id", "aborted")
GROUP = 4  # answers to one prompt, as GRPO wants them
TURNS = 3
PROMPT_TOKENS = 80  # more than two blocks
TOKENS = 16
LONG = 400  # tokens of what nobody waits for
REST_S = 0.4  # between two things a client does
TIMEOUT_S = 40.0
SHOWN = 20  # failures that are kept


class Failure(Struct, frozen=True, kw_only=True):
    kind: str
    what: str


class Traffic:
    """Clients that ask until stopped. `asked` counts requests by kind; `failed` those that were not answered."""

    def __init__(self, routers: Sequence[str], run: str, *, seed: int) -> None:
        self._routers = routers
        self._run = run
        self._seed = seed
        self._stopped = False
        self._latest = ""
        self.asked: Counter[str] = Counter()
        self.failed = 0
        self.failures: list[Failure] = []

    async def run(self, clients: int) -> None:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as tasks:
            for number in range(clients):
                tasks.create_task(self._client(session, number))

    def stop(self) -> None:
        self._stopped = True

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        rng = random.Random(f"{self._seed} {number}")  # noqa: S311
        turn = 0
        while not self._stopped:
            kind = KINDS[turn % len(KINDS)]
            turn += 1
            router = rng.choice(self._routers)
            prompt = [rng.randrange(33, 127) for _ in range(PROMPT_TOKENS)]
            match kind:
                case "group":
                    seeds = [rng.getrandbits(31) for _ in range(GROUP)]
                    await asyncio.gather(*(self._complete(session, kind, router, prompt, seed) for seed in seeds))
                case "conversation":
                    await self._converse(session, router, f"{self._seed}-{number}-{turn}", rng)
                case "by id":
                    await self._complete(session, kind, router, prompt, 0, model=self._latest)
                case _:
                    await self._stream(session, kind, router, prompt)
            await asyncio.sleep(REST_S)

    async def _complete(
        self, session: aiohttp.ClientSession, kind: str, router: str, prompt: list[int], seed: int, model: str = ""
    ) -> None:
        body = self._body(prompt, model=model, seed=seed)
        async with Asked(self, kind), session.post(f"{router}/v1/completions", json=body) as answer:
            _check(answer.status, await answer.read())
            self._latest = answer.headers[VERSION]

    async def _converse(self, session: aiohttp.ClientSession, router: str, name: str, rng: random.Random) -> None:
        messages = [{"role": "user", "content": f"{rng.getrandbits(300)} and?"}]
        for _ in range(TURNS):
            body = {"model": self._run, "messages": messages, "max_tokens": TOKENS, "ignore_eos": True}
            async with (
                Asked(self, "conversation"),
                session.post(f"{router}/v1/chat/completions", json=body, headers={SESSION: name}) as answer,
            ):
                raw = await answer.read()
                _check(answer.status, raw)
                messages += [orjson.loads(raw)["choices"][0]["message"], {"role": "user", "content": "and then?"}]

    async def _stream(self, session: aiohttp.ClientSession, kind: str, router: str, prompt: list[int]) -> None:
        aborted = kind == "aborted"
        body = self._body(prompt, stream=True, max_tokens=LONG if aborted else TOKENS)
        async with Asked(self, kind), session.post(f"{router}/v1/completions", json=body) as answer:
            if answer.status != 200:
                _check(answer.status, await answer.read())
            if aborted:
                await answer.content.readany()
                answer.close()
                return
            last = b""
            async for line in answer.content:
                last = line.strip() or last
            if last != b"data: [DONE]":
                raise ValueError(f"stream ends with {last[:120]!r}")

    def _body(self, prompt: list[int], *, model: str = "", **more: Any) -> dict[str, Any]:
        name = model or self._run
        return {"model": name, "prompt": prompt, "max_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True, **more}

    def note(self, kind: str, error: BaseException | None) -> None:
        self.asked[kind] += 1
        if error is not None:
            self.failed += 1
            if len(self.failures) < SHOWN:
                self.failures.append(Failure(kind=kind, what=f"{type(error).__name__}: {error}"[:300]))


class Asked:
    """Counts one request, and takes what it failed by. Others than these clients may ask, too, and are counted so."""

    def __init__(self, traffic: Traffic, kind: str) -> None:
        self._traffic = traffic
        self._kind = kind

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if error is not None and not isinstance(error, (aiohttp.ClientError, TimeoutError, OSError, ValueError)):
            return False
        self._traffic.note(self._kind, error)
        return error is not None


def _check(status: int, raw: bytes) -> None:
    if status != 200:
        raise ValueError(f"{status} {raw[:200].decode(errors='replace')}")
