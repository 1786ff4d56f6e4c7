"""Replicas without engines: they report, and accept or refuse what the table wants, as a test says."""

from __future__ import annotations

import asyncio
import contextlib

from adaptersync_core.errors import AdapterSyncError
from adaptersync_core.records import Ack, ReplicaReport
from adaptersync_core.registry import Registry


class ScriptedReplica:
    """`refuses` maps sequence numbers to reasons; while `answers` is not set, it says nothing of versions."""

    def __init__(self, registry: Registry, name: str) -> None:
        self.name = name
        self.refuses: dict[int, str] = {}
        self.answers = asyncio.Event()
        self.answers.set()
        self._registry = registry

    async def live(self) -> None:
        """Until cancelled."""
        while True:
            with contextlib.suppress(AdapterSyncError):  # the next heartbeat finds out
                await self._step()
            await asyncio.sleep(0.02)

    async def _step(self) -> None:
        acks = await self._registry.acks(self.name)
        loaded = sorted(name for name, ack in acks.items() if ack.accepted)
        report = ReplicaReport(
            url=f"http://{self.name}",
            base_model="base",
            engine_epoch="1",
            max_loras=8,
            max_cpu_loras=8,
            max_lora_rank=64,
            block_size=16,
            loaded=tuple(loaded),
        )
        await self._registry.report_replica(self.name, report)
        table = await self._registry.table()
        if not self.answers.is_set():
            return
        for name in table.wanted():
            if name not in acks:
                reason = self.refuses.get(table.versions[name].seq, "")
                await self._registry.ack(self.name, name, Ack(accepted=not reason, engine_epoch="1", reason=reason))
        await self._registry.forget_acks(self.name, [name for name in acks if name not in table.wanted()])
