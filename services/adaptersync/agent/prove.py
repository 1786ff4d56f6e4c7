"""Proof, by experiment, that an engine serves what it was given.

Runs the three legs that `adaptersync_core.proof` judges. A leg for which the engine lacks the means (our door, our
worker extension, weights of the base on this host) is not probed, and the verdict says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from adaptersync.agent.canary import write_canary
from adaptersync.agent.engine import Engine
from adaptersync_core.errors import EngineRefused, StagingFailed
from adaptersync_core.manifest import Manifest
from adaptersync_core.proof import Leg, Probe, Proof, across, behave, commission, conclude, doubtful
from adaptersync_core.ranks import told_apart
from adaptersync_core.vllm import VllmClient

TOKENS = tuple(range(3, 67))  # what is scored when the trainer gave no probe: any tokens do, if they are the same
RECHECK_S = 600.0  # how long a canary is good for: an engine that worked may stop
UNKNOWN = Leg(verdict="not probed", reason="base weights are not on this host, so there is no canary")
UNSCORED = Leg(
    verdict="not probed",
    reason="engine cannot score prompts safely: start vLLM with our worker extension, and with --lora-target-modules "
    "where it would put LoRA on the model's head",
)
MIXED = Leg(
    verdict="not probed",
    reason="engine is busy: on a CPU, vLLM answers for the base with an adapter's values if both are in one batch",
)

log = logging.getLogger(__name__)


class Commissioned(NamedTuple):
    """The outcome of a canary: in which life of the engine, and when it began."""

    epoch: str
    leg: Leg
    at: float


class Prover:
    """Experiments on one engine. It is commissioned once in each life before anything is acknowledged, and again

    - when it answers for a version as for the base, to the last bit, or otherwise than the trainer: either that is the
      version's doing, or the engine has stopped applying adapters, and the canary tells which;
    - with the first version after `RECHECK_S`: an engine whose answers are never twice the same would not be caught so.

    An engine that failed the canary gets another chance with the next version: what failed may have passed.
    """

    def __init__(self, client: VllmClient, engine: Engine, scratch: Path, *, timeout_s: float) -> None:
        self._client = client
        self._engine = engine
        self._scratch = scratch
        self._timeout_s = timeout_s
        self._commissioning = asyncio.Lock()
        self._scoring = asyncio.Lock()
        self._commissioned = Commissioned("", UNKNOWN, -math.inf)

    async def prove(self, name: str, manifest: Manifest, path: Path) -> Proof:
        """Judge a loaded version. Raises only when the engine does not answer, or the disk of this host fails."""
        commissioned = await self._commission(since=time.monotonic() - RECHECK_S)
        content = await self._content(name, manifest, path)
        asked = time.monotonic()
        behaviour = await self._behaviour(name, manifest)
        if doubtful(behaviour) and commissioned.verdict != "refuted":
            commissioned = await self._commission(since=asked)
        return conclude(commissioned=commissioned, content=content, behaviour=behaviour)

    async def _commission(self, *, since: float) -> Leg:
        """The engine's canary: the last one if it was of this life and later than `since`, else another."""
        async with self._commissioning:
            epoch, (known, leg, at) = self._engine.epoch, self._commissioned
            if known == epoch and (at >= since or leg.verdict == "not probed" or await self._mixes()):
                return leg
            async with self._scoring:  # not in one batch with the base of another version's experiment
                at = time.monotonic()
                leg = await self._canary()
            self._commissioned = Commissioned(epoch if leg.verdict != "refuted" else "", leg, at)
            return leg

    async def _mixes(self) -> bool:
        """Whether the base's answers could be an adapter's now."""
        facts = self._engine.facts
        return facts is not None and facts.device == "cpu" and await self._client.busy()

    async def _canary(self) -> Leg:
        if not await self._engine.scores():
            return UNSCORED
        name = f"canary-{self._engine.epoch}"
        path = self._scratch / name
        try:
            if not write_canary(path, self._engine.base):
                return UNKNOWN
        except OSError as error:
            shutil.rmtree(path, ignore_errors=True)
            raise StagingFailed(f"canary could not be written: {error.strerror or error}", path=str(path)) from error
        facts = self._engine.facts
        base = facts.base_model if facts else ""
        resident = await self._engine.resident()
        try:
            before = await self._score(base, self._tokens())
            await self._engine.load(name, path, timeout_s=self._timeout_s)
            leg = across([*map(commission, before, await self._score(name, self._tokens()))])
        except EngineRefused as error:
            leg = Leg(verdict="refuted", reason=f"canary could not be served: {error}")
        try:
            await self._engine.unload(name)
        except EngineRefused as error:  # of this engine, whatever the version is
            if leg.verdict != "refuted":
                leg = Leg(verdict="refuted", reason=f"canary could not be taken out: {error}")
        shutil.rmtree(path, ignore_errors=True)
        for evicted in resident - {name} - await self._engine.resident():
            with contextlib.suppress(EngineRefused):  # it may have been unloaded meanwhile
                await self._score(evicted, TOKENS[:1])  # the canary took its place; asked for, it is read again
        log.info("engine commissioned: %s", leg)
        return leg

    async def _content(self, name: str, manifest: Manifest, path: Path) -> Leg:
        number = (await self._engine.numbers()).get(name)
        if number is None:
            return Leg(verdict="not probed", reason="engine runs without our door and worker extension")
        workers = await self._client.audit(number, str(path), size=manifest.size, timeout_s=self._timeout_s)
        figures = {"workers": float(len(workers)), "tensors": float(sum(worker.compared for worker in workers))}
        for index, worker in enumerate(workers):
            if worker.error:
                return Leg(
                    verdict="not probed", reason=f"worker {index} could not look: {worker.error}", figures=figures
                )
            if not worker.resident:
                return Leg(verdict="refuted", reason=f"worker {index} does not hold it", figures=figures)
            if worker.differing:
                differ = ", ".join(worker.differ)
                reason = f"worker {index} holds other values in {worker.differing} tensors: {differ}"
                return Leg(verdict="refuted", reason=reason, figures=figures)
            if worker.unused_modules:
                unused = ", ".join(worker.unused)
                reason = f"engine has no module for {worker.unused_modules} of the adapter's: {unused}"
                return Leg(verdict="refuted", reason=reason, figures=figures)
        return Leg(verdict="proved", figures=figures)

    async def _behaviour(self, name: str, manifest: Manifest) -> Leg:
        facts = self._engine.facts
        if facts is None or not await self._engine.scores():
            return UNSCORED
        probe = manifest.probe or Probe(tokens=self._tokens())
        if len(probe.tokens) >= facts.max_model_len > 0:
            reason = f"probe has {len(probe.tokens)} tokens, and the engine's context takes {facts.max_model_len - 1}"
            return Leg(verdict="not probed", reason=reason)
        async with self._scoring:
            if await self._mixes():
                return MIXED
            try:
                base = await self._score(facts.base_model, probe.tokens)
            except EngineRefused as error:
                return Leg(verdict="not probed", reason=f"engine does not score the probe: {error}")
            try:
                version = await self._score(name, probe.tokens)
            except EngineRefused as error:
                return Leg(verdict="refuted", reason=f"engine does not answer under its name: {error}")
        first = [a - b for a, b in zip(version[0], base[0], strict=True)]
        deltas = (probe.deltas, *[probe.deltas or first] * (len(base) - 1))
        judged = functools.partial(behave, noop=manifest.shape.noop, dtype=facts.dtype)
        return across([judged(base=b, version=v, deltas=d) for b, v, d in zip(base, version, deltas, strict=True)])

    def _tokens(self) -> tuple[int, ...]:
        """`TOKENS`, or as many of them as fit into the engine's context beside the one that it answers with."""
        facts = self._engine.facts
        return TOKENS[: facts.max_model_len - 1] if facts and facts.max_model_len else TOKENS

    async def _score(self, model: str, tokens: Sequence[int]) -> list[list[float]]:
        """Log-probabilities of tokens[1:] in each rank."""
        count = told_apart(self._engine.facts.engines) if self._engine.facts else 1
        ranks = range(count) if count > 1 else (None,)
        return [await self._client.logprobs(model, tokens, timeout_s=self._timeout_s, rank=rank) for rank in ranks]
