"""What one choice of a replica costs: the cache server's time for it, and the router's.

The router's own call against a real server, whose slow log tells how long each took it; for prompts and fleets of
several sizes, and beside a table of millions of blocks. While one script runs, the choices of all routers wait.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from adaptersync.router.asked import Asked
from adaptersync.router.ownership import Arrival, Ownership
from adaptersync.router.policy import Policy, turn_of
from adaptersync.router.prompts import Reader
from adaptersync_core.blocks import block_hashes
from adaptersync_core.config import GroupSection, RouterSection
from adaptersync_core.keys import Keys
from adaptersync_core.pipe import Pipe
from adaptersync_core.redis import RedisClient
from adaptersync_tools.bench.result import Figure, Machine, Result, Target, now
from adaptersync_tools.servers import RedisServer, Role
from adaptersync_tools.up import Progress

WORST_S = 0.002  # of the server's time, so that one long prompt does not hold up the rest
BLOCK_SIZE = 16
TOKENS = (128, 2048, 8192, 32_768)
REPLICAS = (2, 16, 256)
VOCABULARY = 150_000
MEMORY_MB = 8192
SLICE = 20_000  # blocks that are made in one call
FILL = """
local fields = {}
for number = tonumber(ARGV[1]), tonumber(ARGV[1]) + tonumber(ARGV[2]) - 1 do
  fields[#fields + 1] = string.format('%016x', number)
  fields[#fields + 1] = '0000:replica-' .. number % 4
  if #fields == 1000 then
    redis.call('HSET', KEYS[1], unpack(fields))
    fields = {}
  end
end
if #fields > 0 then
  redis.call('HSET', KEYS[1], unpack(fields))
end
"""


class Settings(Struct, frozen=True, kw_only=True):
    """`blocks` lie in the tables of as many versions as they fill. `prompts` of each kind, each asked for twice."""

    blocks: int = 10_000_000
    prompts: int = 40
    policy: Policy = GroupSection().policy


class ChoiceResult(Result, frozen=True, kw_only=True):
    """`memory_bytes` is what the server's tables take."""

    memory_bytes: int


def run(settings: Settings, directory: Path, progress: Progress) -> ChoiceResult:
    with RedisServer(Role.CACHE, directory / "cache", maxmemory_mb=MEMORY_MB) as server:
        return asyncio.run(_Bench(settings, server.url, progress).measure())


class _Bench:
    def __init__(self, settings: Settings, url: str, progress: Progress) -> None:
        self._settings = settings
        self._group = GroupSection()
        self._progress = progress
        self._client = RedisClient(url, name="bench", timeout_s=60.0)
        self._pipe = Pipe(url, name="bench-router", timeout_s=5.0)
        self._keys = Keys("bench")
        self._ownership = Ownership(
            self._pipe,
            self._keys,
            router="router-0",
            policy=settings.policy,
            spill=RouterSection().spill,
            blocks_per_version=self._group.blocks_per_version,
        )
        self._chance = random.Random(0)  # noqa: S311 (prompts, not secrets)
        self._figures: list[Figure] = []

    async def measure(self) -> ChoiceResult:
        began_at = now()
        try:
            await self._pipe.connect()
            await self._client.command("CONFIG", "SET", "slowlog-log-slower-than", 0, "slowlog-max-len", 128)
            for tokens in TOKENS:
                for replicas in REPLICAS:
                    self._progress.waiting(f"prompts of {tokens} tokens, {replicas} replicas")
                    await self._choices(f"{tokens} tokens, {replicas} replicas", "small", tokens, replicas)
            await self._fill()
            name = f"beside {self._settings.blocks / 1e6:g} million blocks"
            for tokens in (TOKENS[0], TOKENS[-1]):
                size = f"{tokens} tokens, {REPLICAS[1]} replicas"
                await self._choices(f"{size}, {name}", "new", tokens, REPLICAS[1])
                await self._choices(f"{size}, {name}, own table full", "full-0", tokens, REPLICAS[1])
            self._router_side()
            memory = await self._client.command("INFO", "memory")
        finally:
            await self._pipe.close()
            await self._client.close()
        of_server = [figure for figure in self._figures if figure.name.startswith("server")]
        worst = max(of_server, key=lambda figure: figure.p50_s)
        return ChoiceResult(
            bench="choice",
            began_at=began_at,
            machine=Machine.here(),
            settings=msgspec.to_builtins(self._settings),
            figures=tuple(self._figures),
            targets=(Target.at_most(f"median of {worst.name}", worst.p50_s * 1e3, WORST_S * 1e3, unit="ms"),),
            memory_bytes=int(memory["used_memory"]),
        )

    async def _choices(self, name: str, version: str, tokens: int, replicas: int) -> None:
        candidates = tuple(f"replica-{number}" for number in range(replicas))
        first: list[float] = []
        again: list[float] = []
        for _ in range(self._settings.prompts):
            hashes = self._hashes(version, self._prompt(tokens))
            for found in (first, again):
                await self._client.command("SLOWLOG", "RESET")
                choice = await self._ownership.choose(
                    Arrival(
                        version=version,
                        hashes=hashes,
                        candidates=candidates,
                        turn=turn_of(hashes[-1]),
                        block_size=BLOCK_SIZE,
                    )
                )
                if choice.outcome == "local":
                    raise TimeoutError(f"the server did not decide: {name}")
                found.append(await self._script_s())
                self._ownership.release(choice)
        self._figures += [Figure.of(f"server: {name}, new", first), Figure.of(f"server: {name}, again", again)]

    async def _script_s(self) -> float:
        """Of the one script call since the log was emptied; the server counts microseconds."""
        entries = await self._client.command("SLOWLOG", "GET", 16)
        (taken,) = (duration for _, _, duration, words, *_ in entries if words[0] in ("EVALSHA", "EVAL"))
        return int(taken) / 1e6

    async def _fill(self) -> None:
        """Tables as full as they may be: `full-0` and others."""
        limit, made = self._group.blocks_per_version, 0
        while made < self._settings.blocks:
            self._progress.waiting(f"{made / 1e6:.1f} of {self._settings.blocks / 1e6:g} million blocks")
            key = self._keys.owned(f"full-{made // limit}")
            count = min(SLICE, limit - made % limit, self._settings.blocks - made)
            await self._client.command("EVAL", FILL, 1, key, made, count)
            made += count

    def _router_side(self) -> None:
        """Reading a prompt and hashing its blocks, in this process's time."""
        reader = Reader(None)
        limit = self._group.blocks_per_request * BLOCK_SIZE
        for tokens in TOKENS:
            asked = Asked(prompt=msgspec.Raw(msgspec.json.encode(self._prompt(tokens))))
            samples = []
            for _ in range(self._settings.prompts):
                began = time.process_time()
                looked = reader.read_now(asked, chat=False, limit=limit).first
                block_hashes("bench", looked.tokens, BLOCK_SIZE, self._group.blocks_per_request)
                samples.append(time.process_time() - began)
            self._figures.append(Figure.of(f"router: {tokens} tokens read and hashed", samples))
        reader.close()

    def _prompt(self, tokens: int) -> list[int]:
        return [self._chance.randrange(VOCABULARY) for _ in range(tokens)]

    def _hashes(self, version: str, prompt: Sequence[int]) -> tuple[str, ...]:
        return tuple(block_hashes(version, prompt, BLOCK_SIZE, self._group.blocks_per_request))
