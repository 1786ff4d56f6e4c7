"""A task that is cancelled while it speaks to Redis ends, whatever it was about to do."""

from __future__ import annotations

import asyncio

from adaptersync_core.redis import RedisClient


async def test_no_cancellation_is_lost(redis_url: str) -> None:
    async def loop(client: RedisClient) -> None:
        while True:
            await client.command("PING")
            await asyncio.sleep(60)

    for steps in range(40):  # every point at which a call gives way, from connecting to the reply
        client = RedisClient(redis_url, name="test")
        task = asyncio.create_task(loop(client))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait((task,), timeout=5.0)
        assert done, f"still running when cancelled after {steps} steps"
        assert task.cancelled()
        await client.close()
