"""An engine with 63 blocks, simulated or real, an agent that follows its cache, and what the engine itself has said."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import redis
import zmq

from adaptersync_core.blocks import block_hashes
from adaptersync_core.config import ProofSection
from adaptersync_core.keys import Keys
from adaptersync_core.records import CacheReport, SeenReplica
from adaptersync_tools.engines import EventPorts
from adaptersync_tools.up import free_ports
from support import engines
from support.adapters import make_adapter
from support.agent_bench import Bench, bench_on
from support.engines import BLOCK_SIZE, MODEL, NUM_BLOCKS, Engine
from support.kv import Listener, chain
from support.tiny_model import build_tiny_model, write_sizes
from support.wait import wait_until

START_TIMEOUT_S = 300
TARGETS = ["simulator", pytest.param("vllm", marks=pytest.mark.vllm)]
ANY_PROOF = ProofSection(promote_on=("proved", "below noise", "not probed"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.timeout(START_TIMEOUT_S))


class Lives:
    """An engine that may be started anew under the same addresses, as `up` starts one: it connects to its agent."""

    engine: Engine

    def __init__(self, kind: str, model: Path, directory: Path) -> None:
        self._kind = kind
        self._model = model
        self._directory = directory
        self._port, events, replay = free_ports(3)
        self.ports = EventPorts(events=events, replay=replay)
        self._life = contextlib.ExitStack()
        self.known: dict[int, tuple[str, str]] = {}  # version and block of ours by vLLM's own hash

    def start(self) -> None:
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.ports.endpoint,
            "replay_endpoint": self.ports.replay_endpoint,
        }
        if self._kind == "simulator":
            flags = ["--port", str(self._port), "--num-blocks", str(NUM_BLOCKS)]
            flags += ["--kv-events-endpoint", self.ports.endpoint, "--kv-replay-endpoint", self.ports.replay_endpoint]
            life = engines.simulator(self._directory, self._model, *flags, guarded=True)
        else:
            flags = ["--kv-events-config", json.dumps(events)]
            life = engines.vllm_cpu(self._directory, self._model, *flags, guarded=True, port=self._port)
        self.engine = self._life.enter_context(life)

    def stop(self) -> None:
        self._life.close()

    def restart(self) -> None:
        """Under the eyes of an agent, whose token stays where it is."""
        token = self.engine.token
        self.stop()
        self.start()
        assert self.engine.token_file is not None
        self.engine.token_file.write_text(token)


@pytest.fixture(scope="module", params=TARGETS)
def lives(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    model = tmp_path_factory.mktemp("cache") / "model"
    (write_sizes if request.param == "simulator" else build_tiny_model)(model)
    with TemporaryDirectory(prefix="engine-") as directory:
        lives = Lives(request.param, model, Path(directory))
        lives.start()
        yield lives
        lives.stop()


class Watch:
    """What the engine has cached by its own account, read from its replay, and what the table says."""

    def __init__(self, lives: Lives, bench: Bench, server: redis.Redis, context: zmq.Context[Any]) -> None:
        self.lives = lives
        self.bench = bench
        self.server = server
        self._listener = Listener(context, "inproc://nobody", lives.ports.replay_endpoint)
        self._chance = random.Random()

    def prompt(self, blocks: int) -> list[int]:
        """Nobody has asked for it before; one token more than its blocks, for the last is always computed."""
        return [self._chance.randrange(33, 127) for _ in range(blocks * BLOCK_SIZE + 1)]

    async def ask(self, model: str, tokens: list[int], **fields: Any) -> int:
        """How many of its tokens were cached."""
        engine = self.lives.engine
        if not fields:
            lora = (model, engine.listed()[model]) if model != MODEL else None
            ours = block_hashes(model, tokens, BLOCK_SIZE, 99)
            for theirs, block in zip(chain(tokens, BLOCK_SIZE, lora=lora), ours, strict=True):
                self.lives.known[theirs] = (model, block)
        answer = await asyncio.to_thread(engine.complete, model, tokens, **fields)
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    def truth(self) -> set[tuple[str, str]]:
        copies: Counter[int] = Counter()
        for batch in self._listener.replay(0):
            for event in batch.events:
                match event["type"]:
                    case "BlockStored":
                        copies.update(event["block_hashes"])
                    case "BlockRemoved":
                        copies.subtract(event["block_hashes"])
                    case "AllBlocksCleared":
                        copies.clear()
        return {self.lives.known[block] for block, count in copies.items() if count > 0 and block in self.lives.known}

    def table(self) -> set[tuple[str, str]]:
        """What r1 owns."""
        prefix = Keys("group").owned("")
        return {
            (str(key).removeprefix(prefix), str(block))
            for key in self.server.scan_iter(f"{prefix.replace('{', '?').replace('}', '?')}*")
            for block, value in self.server.hgetall(key).items()
            if "r1" in str(value).split(":")[1].split(",")
        }

    async def agrees(self) -> set[tuple[str, str]]:
        """Wait until the table is what the engine has of live versions, and return that."""

        async def same() -> bool:
            live = {MODEL, *(await self.bench.registry.table()).versions}
            return self.table() == {(version, block) for version, block in self.truth() if version in live}

        await wait_until(same, timeout_s=15, what="the table to be what the engine has")
        return self.table()

    async def report(self) -> CacheReport:
        """What the agent says now, and not what it last said."""
        asked = time.monotonic()

        async def heard() -> bool:
            return (await self._seen()).age_s < time.monotonic() - asked

        await wait_until(heard, timeout_s=15, what="the agent to report")
        return (await self._seen()).report.cache

    async def _seen(self) -> SeenReplica:
        return (await self.bench.registry.fleet()).replicas["r1"]

    async def followed(self) -> None:
        async def known() -> bool:
            seen = (await self.bench.registry.fleet()).replicas.get("r1")
            return seen is not None and seen.report.cache.followed

        await wait_until(known, timeout_s=30, what="the agent to follow")

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
async def watch(lives: Lives, redis_url: str, cache_url: str, tmp_path: Path) -> AsyncIterator[Watch]:
    context: zmq.Context[Any] = zmq.Context()
    with redis.Redis.from_url(cache_url, decode_responses=True) as server:
        async with bench_on(redis_url, lives.engine, tmp_path, proof=ANY_PROOF, cache_url=cache_url) as bench:
            bench.make = make_adapter
            watch = Watch(lives, bench, server, context)
            yield watch
        watch.close()
    context.term()
    for name in lives.engine.listed():
        lives.engine.unload(name)
