"""Row 29: what is too old to be trained on is not finished. From the rollout process through router and engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp

from adaptersync.trainer.answers import Answer, writer
from adaptersync.trainer.asking import ask
from adaptersync.trainer.conversations import Conversations, present
from adaptersync_core.config import Config
from adaptersync_tools.simulator.scheduler import Latency
from support.wait import wait_until
from support.whole_fleet import WholeFleet, whole_fleet

LONG = 400  # tokens of an answer nobody waits for


async def test_s29_a_doomed_conversation_is_cut_off_down_to_the_engine_and_begun_again(
    config: Config, tmp_path: Path
) -> None:
    async with whole_fleet(config, tmp_path, latency=Latency(decode_tokens_per_s=10.0), block_size=16) as fleet:
        trainer = await fleet.trainer()
        old = await fleet.promoted(trainer)
        told = SimpleNamespace(value=1, oldest=1)
        doomed: list[int] = []
        tokens = [LONG, 2]  # the answer after the promotion is a short one
        async with aiohttp.ClientSession() as session:

            async def converse() -> tuple[Answer, Any]:
                model = f"run@v{present.get().asks}"
                body = {"model": model, "prompt": [1, 2, 3], "max_tokens": tokens.pop(0), "ignore_eos": True}
                return await ask(session, f"{fleet.url}/v1/completions", body, 60.0)

            conversations = Conversations(told, cut_off=True, on_doomed=lambda _: doomed.append(1))
            watch = asyncio.create_task(conversations.watch())
            rollout = asyncio.create_task(conversations.hold(converse))
            await wait_until(lambda: _busy(fleet) == 1, timeout_s=20)
            new = await fleet.promoted(trainer)
            told.value = 2
            await asyncio.sleep(0.3)
            assert _busy(fleet) == 1  # one promotion behind: the window allows it
            told.oldest = 2
            conversation, (answer, _) = await asyncio.wait_for(rollout, 30)
            watch.cancel()
            assert (conversation.asks, writer(answer, "run"), doomed) == (2, 2, [1])
            await wait_until(lambda: _busy(fleet) == 0, timeout_s=5)
        await wait_until(lambda: _rows(fleet), timeout_s=20)
        rows = {row["version"]: row["outcome"] for row in await fleet.rows()}
        assert rows == {old: "client_gone", new: "ok"}


def _busy(fleet: WholeFleet) -> int:
    return sum(replica.sim.engine.running for replica in fleet.replicas.values())


async def _rows(fleet: WholeFleet) -> bool:
    return len(await fleet.rows()) == 2
