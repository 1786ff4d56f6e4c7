"""What adapters cost a generating engine: gaps between tokens, and tokens a second while versions are promoted.

On real vLLM servers, started as `adaptersync up` starts them, under continuous streaming load through the router.
First each engine alone gets loads, proofs and unloads as its agent does them, so that a gap has one cause; then
windows with and without promotions alternate, so that the machine's drift cancels.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import TypeVar

import msgspec
from msgspec import Struct

from adaptersync.agent.engine import Engine
from adaptersync.agent.prove import Prover
from adaptersync.trainer import AdapterPublisher
from adaptersync_core.base_model import base_shapes
from adaptersync_core.errors import AdapterInvalid, PublicationFailed
from adaptersync_core.keys import Keys
from adaptersync_core.manifest import FILES, Manifest, content_digest, hash_file, inspect
from adaptersync_core.redis import RedisClient
from adaptersync_core.vllm import VllmClient
from adaptersync_tools.bench.gaps import Span
from adaptersync_tools.bench.machine import OTHERS, Meter
from adaptersync_tools.bench.promotions import (
    Experiment,
    Kind,
    Promotions,
    Window,
    compare,
    gap_figures,
    phases,
)
from adaptersync_tools.bench.result import Machine, Result, Target, now
from adaptersync_tools.bench.streaming import PROMPT_TOKENS, Load
from adaptersync_tools.demo.synthetic import write_tensors
from adaptersync_tools.engines import LINEAR
from adaptersync_tools.evidence import pauses_in_logs
from adaptersync_tools.supervisor import StackFailed
from adaptersync_tools.up import Progress, Stack, StackSettings

SHARE = 0.95  # of the steady rate: what a version every step may cost at most
KINDS: tuple[Kind, Kind] = ("paced", "back to back")
RUN, ALONE = "bench", "alone"
RANK = 8
SCALE = 0.02
ADAPTERS = 8  # different ones, published in turn
SETTLE_S = 1.0  # between two experiments: it takes longer than any of them, so the time before one is steady
WARM_S = 3.0
LEAST_TOKENS = 128  # that an engine must take: a proof scores 64
OUTCOME_S = 60.0
LOOK_S = 0.02
PAGE = 1000
CALL_S = 60.0

T = TypeVar("T")


class Settings(Struct, frozen=True, kw_only=True):
    """`repeats` of each experiment on each engine, then `rounds` of four windows of `step_s` each.

    `concurrency` is by replica.
    """

    replicas: int = 2
    concurrency: int = 8
    answer_tokens: int = 128
    repeats: int = 8
    rounds: int = 4
    step_s: float = 8.0


class EngineResult(Result, frozen=True, kw_only=True):
    """Figures are gaps between tokens. `tokens` are all that were read; `others` is the share of the machine's CPU time
    that programs took which are not of this bench, in the windows."""

    tokens: int
    answers: int
    others: float
    promotions: tuple[Promotions, ...]
    phases: dict[str, dict[str, float]]
    proofs: dict[str, int]


def run(settings: Settings, model: Path, directory: Path, progress: Progress) -> EngineResult:
    """Start a fleet in `directory`, measure, and stop it."""
    shapes = base_shapes(model.absolute())
    made = [write_adapter(directory / f"adapter-{seed}", shapes, seed=seed) for seed in range(ADAPTERS)]
    wanted = StackSettings(
        model=model,
        state_dir=directory / "fleet",
        replicas=settings.replicas,
        engine={"max_lora_rank": RANK, "max_model_len": max(PROMPT_TOKENS + settings.answer_tokens, LEAST_TOKENS)},
        overrides={"trainer.run": RUN, "coordinator.min_ready": settings.replicas, "trainer.max_staleness": 1},
    )
    with Stack(wanted, progress) as stack, AdapterPublisher(stack.config) as publisher:
        return asyncio.run(Bench(stack, publisher, made, settings, progress).measure())


class Bench:
    """One run against a running fleet."""

    def __init__(
        self, stack: Stack, publisher: AdapterPublisher, adapters: list[Path], settings: Settings, progress: Progress
    ) -> None:
        self._stack = stack
        self._publisher = publisher
        self._adapters = adapters
        self._settings = settings
        self._progress = progress
        self._published: dict[str, float] = {}
        self._proofs: Counter[str] = Counter()

    async def measure(self) -> EngineResult:
        settings, began_at = self._settings, now()
        await self._promote()
        url, concurrency = self._stack.router_url, settings.concurrency * settings.replicas
        async with Load(url, RUN, concurrency=concurrency, answer_tokens=settings.answer_tokens) as load:
            await load.run_for(WARM_S)
            experiments = await self._experiments(load)
            windows = await self._windows(load)
        events = await self._events()
        spans = self._spans(events)
        paced, hurried = (compare(kind, windows, spans, load.streams) for kind in KINDS)
        pauses = pauses_in_logs(sorted(self._stack.logs.glob("engine-*.log")))
        if pauses is None:
            raise StackFailed("an engine's log shows no request", logs=str(self._stack.logs))
        size = sum((self._adapters[0] / name).stat().st_size for name in FILES)
        asked = {**msgspec.to_builtins(settings), "model": self._stack.settings.model.name, "adapter_bytes": size}
        return EngineResult(
            bench="engine",
            began_at=began_at,
            machine=Machine.here(),
            settings=asked,
            figures=tuple(gap_figures(experiments, load.streams)),
            targets=(
                Target.at_least(
                    f"tokens a second, a version every {settings.step_s:g} s",
                    paced.over_step.mean,
                    SHARE,
                ),
                Target.at_most("pauses sent to engines", pauses, 0, unit="calls"),
                Target.at_most("answers that failed", len(load.failures), 0, unit="answers"),
            ),
            tokens=sum(stream.tokens[-1] for stream in load.streams if stream.tokens),
            answers=len(load.streams),
            others=_others(windows),
            promotions=(paced, hurried),
            phases=phases(event for _, event in events),
            proofs=dict(self._proofs),
        )

    async def _experiments(self, load: Load) -> list[Experiment]:
        """Loads, proofs and unloads on one engine after the other, while nothing else changes."""
        found: list[Experiment] = []
        for replica, url in self._stack.engine_urls.items():
            token = (self._stack.state_dir / f"{replica}.token").read_text()
            stage = self._stack.state_dir / "bench" / replica
            async with VllmClient(url, token=token) as client:
                engine = Engine(client, stage)
                await engine.observe(timeout_s=CALL_S)
                prover = Prover(client, engine, stage, timeout_s=CALL_S)

                async def timed(what: str, work: Callable[[], Awaitable[T]], replica: str = replica) -> T:
                    await load.run_for(SETTLE_S)
                    began = time.monotonic()
                    result = await work()
                    found.append(Experiment(what=what, replica=replica, span=(began, time.monotonic())))
                    return result

                self._progress.waiting(f"loads, proofs and unloads on {replica} alone")
                for number in range(self._settings.repeats):
                    self._stack.check()
                    manifest = stage_adapter(self._adapters[number % ADAPTERS], stage, seq=number + 1)
                    name, path = manifest.adapter_id, stage / manifest.adapter_id
                    await timed("load", partial(engine.load, name, path, timeout_s=CALL_S))
                    what = "proof" if number else "first proof, with commissioning"
                    proof = await timed(what, partial(prover.prove, name, manifest, path))
                    for leg in ("commissioned", "content", "behaviour"):
                        self._proofs[f"{leg}: {getattr(proof, leg).verdict}"] += 1
                    await timed("unload", partial(engine.unload, name))
        return found

    async def _windows(self, load: Load) -> list[Window]:
        done: list[Window] = []
        services = self._stack.supervisor.services
        meter = Meter({pid: name.partition("-")[0] for name, service in services.items() if (pid := service.pid)})
        order: tuple[Kind, ...] = ("steady", KINDS[0], "steady", KINDS[1])
        kinds: list[Kind] = [*order * self._settings.rounds, "steady"]
        for number, kind in enumerate(kinds):
            self._progress.waiting(f"window {number + 1} of {len(kinds)}, {self._settings.step_s:g} s: {kind}")
            self._stack.check()
            began, before = time.monotonic(), meter.read()
            until = began + self._settings.step_s
            while kind != "steady" and time.monotonic() < until:
                await self._promote()
                if kind == "paced":
                    break
            await load.run_for(max(0.0, until - time.monotonic()))
            spent = {role: after - before.get(role, 0.0) for role, after in meter.read().items()}
            done.append(Window(kind=kind, span=(began, time.monotonic()), spent=spent))
        return done

    async def _promote(self) -> None:
        """Publish the next adapter and wait until it is current."""
        adapter = self._adapters[len(self._published) % len(self._adapters)]
        began = time.monotonic()
        publication = await asyncio.to_thread(self._publisher.publish, adapter)
        self._published[publication.adapter_id] = began
        while publication.outcome is None:
            if time.monotonic() > began + OUTCOME_S:
                raise PublicationFailed("no outcome in time", version=publication.adapter_id)
            await asyncio.sleep(LOOK_S)
        if publication.outcome.state != "current":
            raise PublicationFailed(publication.outcome.reason, version=publication.adapter_id)

    def _spans(self, events: list[tuple[float, dict[str, str]]]) -> list[Span]:
        """From the call of publish to the promotion, by the control server's clock, which is this machine's."""
        return [
            (self._published[event["version"]], at) for at, event in events if event.get("type") == "version.promoted"
        ]

    async def _events(self) -> list[tuple[float, dict[str, str]]]:
        """Every event with its time on the monotonic clock."""
        offset = time.monotonic() - time.time()
        client = RedisClient(self._stack.config.redis.control_url, name="bench")
        key = Keys(self._stack.config.group.name).events
        found: list[tuple[float, dict[str, str]]] = []
        after = "-"
        try:
            while page := await client.command("XRANGE", key, after, "+", "COUNT", PAGE):
                found += [(int(entry.partition("-")[0]) / 1000 + offset, fields) for entry, fields in page]
                after = f"({page[-1][0]}"
        finally:
            await client.close()
        return found


def _others(windows: Sequence[Window]) -> float:
    length = sum(ended - began for began, ended in (window.span for window in windows))
    return sum(window.spent[OTHERS] for window in windows) / (length * (os.cpu_count() or 1))


def stage_adapter(source: Path, stage: Path, *, seq: int) -> Manifest:
    """Copy an adapter to where an engine may read it, under the name of a version."""
    files = tuple(hash_file(source / name) for name in FILES)
    digest = content_digest(files)
    manifest = Manifest(
        run=ALONE, seq=seq, epoch=1, digest=digest, files=files, shape=inspect(source), created_at=time.time()
    )
    shutil.copytree(source, stage / manifest.adapter_id, dirs_exist_ok=True)
    return manifest


def write_adapter(directory: Path, base: Mapping[str, tuple[int, ...]], *, seed: int) -> Path:
    """A PEFT adapter on every linear layer of a model with these weights (out x in), with random values."""
    touched = {
        name.removesuffix(".weight"): shape
        for name, shape in base.items()
        if name.endswith(".weight") and name.split(".")[-2] in LINEAR
    }
    if not touched:
        raise AdapterInvalid("model has no linear layer that an adapter could change", next_step="choose another model")
    tensors: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns) in touched.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = (RANK, columns)
        tensors[f"base_model.model.{name}.lora_B.weight"] = (rows, RANK)
    rng = Random(seed)  # noqa: S311 (weights, not secrets)
    block = struct.pack("<4096f", *(rng.uniform(-SCALE, SCALE) for _ in range(4096)))

    def fill(count: int) -> bytes:
        start = 4 * rng.randrange(4096)
        return (block * (2 + count // len(block)))[start : start + count]

    directory.mkdir(parents=True, exist_ok=True)
    modules = sorted({name.rpartition(".")[2] for name in touched})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "base", "r": RANK}
    config |= {"lora_alpha": RANK, "target_modules": modules, "bias": "none"}
    (directory / "adapter_config.json").write_bytes(msgspec.json.encode(config))
    with (directory / "adapter_model.safetensors").open("wb") as file:
        write_tensors(file, tensors, fill)
    return directory
