"""Clients behind a balancer, until SIGTERM: `python -m adaptersync_tools.day.traffic --run RUN --told FILE URL ...`

A connection that nobody takes is tried at the next router, as balancers do, and then at the first again; everything
else that is not a whole answer is an error, and is told. Every second answer streams: once begun, it cannot be asked
for elsewhere. Counts are in FILE, written anew twice a second.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import aiohttp
import click
import orjson

from adaptersync_tools.cli.common import run_command

TELL_S = 0.5
TIMEOUT_S = 60.0
ERRORS_KEPT = 20
ROUNDS = 3  # tries of each router, before a client says that nobody is there
PAUSE_S = 0.2
PROMPT_TOKENS = 48
STREAM_END = b"data: [DONE]"


class Clients:
    def __init__(self, urls: tuple[str, ...], run: str, tokens: int) -> None:
        self._urls = urls
        self._run = run
        self._tokens = tokens
        self._stopped = asyncio.Event()
        self.answered: Counter[str] = Counter()  # by version
        self.replicas: Counter[str] = Counter()
        self.errors: list[str] = []
        self.failed = 0
        self.slowest_s = 0.0

    def stop(self) -> None:
        self._stopped.set()

    async def run(self, count: int, told: Path) -> None:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        # a connection for each request: one that a router is about to close is never written to
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session, asyncio.TaskGroup() as tasks:
            for number in range(count):
                tasks.create_task(self._client(session, number))
            tasks.create_task(self._tell(told))
        self._write(told)

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        for turn in itertools.count(number):
            if self._stopped.is_set():
                return
            prompt = [33 + (turn * 7 + place) % 90 for place in range(PROMPT_TOKENS)]
            began = time.monotonic()
            error = await self._ask(session, turn, prompt)
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            if error:
                self.failed += 1
                self.errors = [*self.errors, f"{time.time():.3f} {error}"][:ERRORS_KEPT]

    async def _ask(self, session: aiohttp.ClientSession, turn: int, prompt: list[int]) -> str:
        body = {"model": self._run, "prompt": prompt, "max_tokens": self._tokens, "ignore_eos": True, "seed": turn}
        body["stream"] = streams = bool(turn % 2)  # an answer that has begun cannot be asked for elsewhere
        error = "no router"
        for place in range(turn, turn + ROUNDS * len(self._urls)):
            try:
                async with session.post(f"{self._urls[place % len(self._urls)]}/v1/completions", json=body) as answer:
                    raw = await answer.read()
                    if answer.status != 200 or not _whole(raw, streams):
                        return f"{answer.status} {raw[:300].decode(errors='replace')}"
                    self.answered[answer.headers["x-adaptersync-version"]] += 1
                    self.replicas[answer.headers["x-adaptersync-replica"]] += 1
                    return ""
            except aiohttp.ClientConnectorError as refused:
                error = repr(refused)
                if place % len(self._urls) == len(self._urls) - 1:
                    await asyncio.sleep(PAUSE_S)
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as broken:
                return repr(broken)
        return error

    async def _tell(self, told: Path) -> None:
        while not self._stopped.is_set():
            self._write(told)
            await asyncio.sleep(TELL_S)

    def _write(self, told: Path) -> None:
        scratch = told.with_suffix(".new")
        document = {
            "answered": self.answered.total(),
            "failed": self.failed,
            "errors": self.errors,
            "versions": self.answered,
            "replicas": self.replicas,
            "slowest_s": self.slowest_s,
        }
        scratch.write_bytes(orjson.dumps(document))
        scratch.rename(told)


def _whole(raw: bytes, streams: bool) -> bool:
    """Whether this is all of an answer."""
    return raw.rstrip().endswith(STREAM_END) if streams else bool(orjson.loads(raw)["choices"][0]["text"])


@click.command()
@click.argument("urls", nargs=-1, required=True)
@click.option("--run", "name", required=True)
@click.option("--told", type=click.Path(path_type=Path), required=True)
@click.option("--clients", type=click.IntRange(1, 64), default=4)
@click.option("--tokens", type=click.IntRange(1, 4096), default=16)
def traffic(urls: tuple[str, ...], name: str, told: Path, clients: int, tokens: int) -> None:
    """Ask without a pause until SIGTERM, then let the last answers come."""

    async def run() -> None:
        made = Clients(urls, name, tokens)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, made.stop)
        await made.run(clients, told)

    asyncio.run(run())


if __name__ == "__main__":
    sys.exit(run_command(traffic, None, "traffic"))
