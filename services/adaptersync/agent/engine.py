"""One engine's adapters: what it is, what it lists, and loading and unloading so that the answer is certain.

The server's word is not enough. A load counts when the engine lists the name with our directory, in the same life of
the process as before; a load that timed out or was called a duplicate is settled by reading that list.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from adaptersync_core.base_model import base_shapes
from adaptersync_core.errors import EngineRefused, EngineUnavailable
from adaptersync_core.identity import is_adapter_id
from adaptersync_core.ranks import told_apart
from adaptersync_core.vllm import EngineFacts, VllmClient

log = logging.getLogger(__name__)


class Engine:
    """The engine this agent stands beside. `epoch` names one life of its process; empty until it was first seen.

    `unsettled` are loads that this life of the engine may still be at: nobody waited for their end, or none was heard
    of. Their files must stay: an engine that misses one while it reads ends.
    """

    def __init__(self, client: VllmClient, stage_path: Path) -> None:
        self._client = client
        self._stage_path = stage_path
        self._changing = asyncio.Lock()  # the engine loads one after the other anyway; so the list is read between
        self.epoch = ""
        self.facts: EngineFacts | None = None
        self.base: dict[str, tuple[int, ...]] = {}
        self.unsettled: set[str] = set()
        self._scores: tuple[str, bool] = ("", False)  # in which life, and the answer

    async def observe(self, *, timeout_s: float) -> list[str]:
        """Check that the engine lives, learn of a restart, and list what it holds of ours."""
        await self._client.alive(timeout_s=timeout_s)
        epoch = await self._life()
        if epoch != self.epoch:
            self.facts = await self._client.facts()
            self.base = await asyncio.to_thread(base_shapes, Path(self.facts.root))
            self.epoch = epoch
            self.unsettled.clear()
            log.info("engine %s began its life %s", self._client.url, epoch)
            if not self.base:
                log.warning("base weights are not on this host at %r: no shapes are checked", self.facts.root)
            if told_apart(self.facts.engines) != self.facts.engines:
                log.warning("engine has %d ranks, more than are told apart: it chooses itself", self.facts.engines)
            if not self.facts.max_loras:
                log.warning(
                    "engine does not say its LoRA limits (VLLM_SERVER_DEV_MODE=1): no ranks or slots are checked"
                )
        return await self.loaded()

    async def loaded(self) -> list[str]:
        """Versions of ours that the engine lists; a canary is none."""
        listed = await self._client.adapters()
        return sorted(
            name for name, root in listed.items() if root == str(self._stage_path / name) and is_adapter_id(name)
        )

    async def load(self, name: str, path: Path, *, timeout_s: float) -> None:
        """EngineRefused or EngineUnavailable unless the engine lists the name with this path afterwards."""
        async with self._changing:
            before = await self._life()
            if self.epoch and before != self.epoch:
                raise EngineUnavailable("engine restarted and was not looked at since", version=name)
            failure: EngineRefused | EngineUnavailable | None = None
            self.unsettled.add(name)
            try:
                await self._client.load(name, str(path), timeout_s=timeout_s)
                self.unsettled.discard(name)
            except EngineRefused as error:
                self.unsettled.discard(name)
                failure = error
            except EngineUnavailable as error:
                failure = error
            listed = (await self._client.adapters()).get(name)
            if isinstance(failure, EngineRefused) and failure.status >= 500:
                await self._client.alive(timeout_s=timeout_s)  # the last words of a dying engine are no refusal
            if listed is None:
                await self._free()
                raise failure or EngineRefused("engine said it loaded and does not list it", status=200, version=name)
            if listed != str(path):
                raise EngineRefused("engine has the name with another directory", status=409, version=name)
            if await self._life() != before:
                raise EngineUnavailable("engine restarted while it loaded", version=name)

    async def unload(self, name: str) -> None:
        """Have the engine forget a listed name (so its load has ended) and, where it lets us, free what has no name."""
        async with self._changing:
            await self._client.unload(name)
            self.unsettled.discard(name)
            await self._free()

    async def numbers(self) -> dict[str, int]:
        """Under which number the workers know each name; empty where we cannot look into the workers."""
        if self.facts is None or not self.facts.audits:
            return {}
        identity = await self._client.identity()
        return identity.numbers if identity else {}

    async def resident(self) -> set[str]:
        """Names whose adapter every worker has in memory: the engine lists those that it evicted, too."""
        numbers = await self.numbers()
        held = [set(worker.registered) for worker in await self._client.held()] if numbers else []
        return {name for name, number in numbers.items() if all(number in worker for worker in held)}

    async def scores(self) -> bool:
        """Whether prompts may be scored; not where that could end the server, nor where we cannot look.

        Asked once in a life of the engine, which must stop generating to answer: its modules stay what they are.
        """
        if self.facts is None or not self.facts.audits:
            return False
        epoch = self.epoch
        if self._scores[0] == epoch:
            return self._scores[1]
        held = await self._client.held()
        scores = all(worker.scores for worker in held)
        if not any(worker.error for worker in held):
            self._scores = (epoch, scores)
        return scores

    async def _free(self) -> None:
        """Drop what no name leads to: unloaded versions, canaries, and what failed loads left.

        Not while a load may still be under way: it is in the workers before it has its name.
        """
        if self.unsettled:
            return
        identity = await self._client.identity()
        if identity is None or self.facts is None or not self.facts.audits:
            return
        held = {number for worker in await self._client.held() for number in worker.registered}
        for number in sorted(held - set(identity.numbers.values())):
            await self._client.drop(number)

    async def _life(self) -> str:
        """This life of the process, by our door's word where there is one, else by its start time."""
        identity = await self._client.identity()
        return identity.life if identity else await self._client.epoch()
