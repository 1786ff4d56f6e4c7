"""Continuous load: a fixed number of answers in flight, streamed, with the time of every token.

An answer that ends is followed by the next one. Knows one OpenAI-compatible address and the name to ask it for.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from types import TracebackType
from typing import Self

import aiohttp

from adaptersync_core.errors import Unroutable
from adaptersync_tools.bench.gaps import TokenStream

PROMPT_TOKENS = 40
TOKEN_IDS = (3, 30)  # in any vocabulary
ANSWER_S = 120.0
GIVE_UP = 50  # failed answers, after which there is nothing to measure
PAUSE_S = 0.1  # after a failed answer
_SO_FAR = re.compile(rb'"completion_tokens":\s*(\d+)')


class Load:
    """`streams` holds every answer that was begun, those that still run among them. A context manager."""

    def __init__(self, url: str, model: str, *, concurrency: int, answer_tokens: int) -> None:
        self.streams: list[TokenStream] = []
        self.failures: list[str] = []
        self._url = f"{url}/v1/completions"
        self._model = model
        self._concurrency = concurrency
        self._answer_tokens = answer_tokens
        self._random = random.Random(0)  # noqa: S311 (prompts, not secrets)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=ANSWER_S), connector=aiohttp.TCPConnector(limit=0)
        )
        self._tasks = [asyncio.create_task(self._ask()) for _ in range(self._concurrency)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    async def run_for(self, seconds: float) -> None:
        """Let the load run on; Unroutable when it does not."""
        await asyncio.sleep(seconds)
        if len(self.failures) >= GIVE_UP:
            raise Unroutable(f"answers fail, so nothing can be measured: {self.failures[-1]}", status=503)

    async def _ask(self) -> None:
        while len(self.failures) < GIVE_UP:
            failure = await self._answer()
            if failure:
                self.failures.append(failure)
                await asyncio.sleep(PAUSE_S)

    async def _answer(self) -> str:
        """Read one answer to its end; why it failed, or nothing."""
        body = {
            "model": self._model,
            "prompt": [self._random.randint(*TOKEN_IDS) for _ in range(PROMPT_TOKENS)],
            "max_tokens": self._answer_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        try:
            async with self._session.post(self._url, json=body) as answer:
                if answer.status != 200:
                    return f"{answer.status} {(await answer.text())[:200]}"
                stream = TokenStream(
                    replica=answer.headers.get("x-adaptersync-replica", ""),
                    version=answer.headers.get("x-adaptersync-version", ""),
                )
                self.streams.append(stream)
                rest = b""
                async for piece in answer.content.iter_any():
                    now = time.monotonic()
                    whole, _, rest = (rest + piece).rpartition(b"\n\n")
                    if said := _SO_FAR.findall(whole):
                        count = int(said[-1])
                        if count > (stream.tokens[-1] if stream.tokens else 0):
                            stream.at.append(now)
                            stream.tokens.append(count)
        except (aiohttp.ClientError, TimeoutError) as error:
            return str(error) or type(error).__name__
        if not stream.tokens or stream.tokens[-1] != self._answer_tokens:
            return f"answer ended after {stream.tokens[-1] if stream.tokens else 0} of {self._answer_tokens} tokens"
        return ""
