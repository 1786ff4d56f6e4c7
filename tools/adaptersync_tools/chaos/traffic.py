"""Rollouts as training asks for them: groups of one prompt, under a run's name, a number or a version's id.

Every answer carries its tokens, so that it can be told afterwards which weights wrote them. Errors of the network are
answers with status 0: routers are killed, too.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence

import aiohttp
import orjson

from adaptersync_tools.chaos.history import Rollout

GROUP = 4  # answers to one prompt, as GRPO wants them
LIMIT = 16  # tokens of one answer
PROMPT_TOKENS = 48
REST_S = 0.1  # between two groups of one client
TIMEOUT_S = 30.0


class Traffic:
    """Clients that ask until stopped. `take` gets every answer; `pinned` says which versions a client may name."""

    def __init__(
        self,
        routers: Sequence[str],
        runs: Sequence[str],
        *,
        seed: int,
        take: Callable[[Rollout], None],
        pinned: Callable[[str], Sequence[str]],
    ) -> None:
        self._routers = routers
        self._runs = runs
        self._seed = seed
        self._take = take
        self._pinned = pinned
        self._stopped = False

    async def run(self, clients: int) -> None:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as tasks:
            for number in range(clients):
                tasks.create_task(self._client(session, number))

    def stop(self) -> None:
        self._stopped = True

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        rng = random.Random(f"{self._seed} {number}")  # noqa: S311
        while not self._stopped:
            run = rng.choice(self._runs)
            prompt = [rng.randrange(33, 127) for _ in range(PROMPT_TOKENS)]
            asked = self._name(rng, run)
            calls = [
                self._ask(session, rng.choice(self._routers), asked, prompt, rng.getrandbits(62)) for _ in range(GROUP)
            ]
            for rollout in await asyncio.gather(*calls):
                self._take(rollout)
            await asyncio.sleep(REST_S)

    def _name(self, rng: random.Random, run: str) -> str:
        pinned = self._pinned(run)
        if not pinned or rng.random() < 0.5:
            return run
        version = rng.choice(pinned)
        return version if rng.random() < 0.5 else f"{run}@v{version.rsplit('-', 2)[1].removeprefix('v')}"

    async def _ask(
        self, session: aiohttp.ClientSession, router: str, asked: str, prompt: list[int], seed: int
    ) -> Rollout:
        body = {
            "model": asked,
            "prompt": prompt,
            "max_tokens": LIMIT,
            "temperature": 1.0,
            "seed": seed,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        sent_at = time.time()
        status, headers, raw = 0, dict[str, str](), b""
        try:
            async with session.post(f"{router}/v1/completions", json=body) as answer:
                raw = await answer.read()
                status, headers = answer.status, dict(answer.headers)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raw = repr(error).encode()
        said = orjson.loads(raw) if status == 200 else {}
        return Rollout(
            asked=asked,
            prompt=tuple(prompt),
            seed=seed,
            limit=LIMIT,
            sent_at=sent_at,
            got_at=time.time(),
            status=status,
            request_id=headers.get("x-adaptersync-request-id", ""),
            version=headers.get("x-adaptersync-version", ""),
            model=said.get("model", ""),
            replica=headers.get("x-adaptersync-replica", ""),
            tokens=tuple(said["choices"][0]["token_ids"]) if said else (),
            reason="" if status == 200 else raw[:200].decode(errors="replace"),
        )
