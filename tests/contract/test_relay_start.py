"""What the relay says before TRL asks it for anything."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from adaptersync.trainer import relay
from adaptersync_core.config import Config, RedisSection, RelaySection, StoreSection, TrainerSection
from support.redis_servers import KINDS
from support.wait import wait_until


@pytest.mark.parametrize("redis_kind", KINDS[:1])
async def test_it_says_at_its_start_where_adapters_must_lie(
    redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """TRL would learn it from its first load, minutes later, and end."""
    caplog.set_level(logging.INFO)
    config = Config(
        redis=RedisSection(control_url=redis_url),
        store=StoreSection(path=str(tmp_path / "store")),
        relay=RelaySection(port=0, allowed_root=str(tmp_path / "out")),
        trainer=TrainerSection(run="run"),
    )
    serving = asyncio.create_task(relay._serve(config))
    said = f"takes adapters from below {tmp_path / 'out'} (relay.allowed_root)"
    await wait_until(lambda: serving.done() or said in caplog.messages, what="the relay tells of its root")
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    assert said in caplog.messages
