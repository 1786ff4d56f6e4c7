"""The examples of deploy/TRAINERS.md, as they stand there, with a simulated fleet and a tiny model."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from adaptersync_tools.servers import Role
from adaptersync_tools.simulator.adapter_files import BaseModel
from support.adapters import make_adapter
from support.documents import commands, scripts
from support.redis_servers import RedisServers
from support.source import PACKAGES
from support.tiny_model import build_tiny_model, write_sizes
from support.wait import wait_until
from support.whole_fleet import WholeFleet, fleet_config, whole_fleet

DOCUMENT = "deploy/TRAINERS.md"
ENOUGH_S = 150.0


@pytest.fixture
async def fleet(redis_servers: RedisServers, no_leaked_keys: None, tmp_path: Path) -> AsyncIterator[WholeFleet]:
    """Two replicas of a model of the tiny model's sizes."""
    control, cache = (redis_servers.url("redis7", role) for role in (Role.CONTROL, Role.CACHE))
    sizes = write_sizes(tmp_path / "sizes")
    async with whole_fleet(fleet_config(control, cache, tmp_path), tmp_path, start=False) as fleet:
        fleet.engine = replace(fleet.engine, root=str(sizes), base=BaseModel.from_directory(sizes))
        for replica in fleet.replicas.values():
            replica.engine_config = fleet.engine
        await fleet.start()
        yield fleet


def environment(fleet: WholeFleet) -> dict[str, str]:
    config = fleet.config
    return os.environ | {
        "ADAPTERSYNC_GROUP__NAME": config.group.name,
        "ADAPTERSYNC_REDIS__CONTROL_URL": config.redis.control_url,
        "ADAPTERSYNC_REDIS__CACHE_URL": config.redis.cache_url,
        "ADAPTERSYNC_STORE__PATH": config.store.path,
        "PYTHONPATH": os.pathsep.join(str(root.parent) for root in PACKAGES.values()),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }


async def run(fleet: WholeFleet, *command: str) -> str:
    """What a program says that ends well; it is at `fleet.directory`."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=fleet.directory,
        env=environment(fleet),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), ENOUGH_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, out.decode()[-3000:]
    return out.decode()


def typed(line: str) -> list[str]:
    """A line that begins with `adaptersync`, whether that is on the path or not."""
    name, *arguments = shlex.split(line)
    assert name == "adaptersync", line
    return [sys.executable, "-m", "adaptersync_tools.cli", *arguments]


async def steps(fleet: WholeFleet, run: str) -> list[int | None]:
    return [event.step for event in await fleet.events("adapter.published") if event.run == run]


@pytest.mark.trl
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("name", "of", "published"), [("loop.py", "my-loop", [10, 20, 30]), ("tune.py", "my-tuning", [2, 4])]
)
async def test_a_script_publishes_what_it_trains(
    fleet: WholeFleet, tmp_path: Path, name: str, of: str, published: list[int]
) -> None:
    script = scripts(DOCUMENT, tmp_path)[name]
    model = await asyncio.to_thread(build_tiny_model, tmp_path / "tiny")
    out = await run(fleet, sys.executable, str(script), str(model))
    assert await steps(fleet, of) == published

    async def last_is_current() -> bool:
        versions = [event for event in await fleet.events("version.promoted") if event.version.startswith(f"{of}-v")]
        return bool(versions) and versions[-1].version.startswith(f"{of}-v{len(published)}-")

    await wait_until(last_is_current, timeout_s=30)
    if name == "loop.py":
        assert "state='current'" in out


@pytest.mark.timeout(120)
async def test_a_directory_is_published_as_the_console_block_does_it(fleet: WholeFleet, tmp_path: Path) -> None:
    check, publish, watch = (typed(line) for line in commands(DOCUMENT))
    for step in (10, 20):
        (make_adapter(tmp_path / "out" / f"step_{step}", seed=step) / "DONE").touch()
    assert "can be served" in await run(fleet, *check)
    assert await fleet.events("adapter.published") == []
    assert "it is current" in await run(fleet, *publish)
    assert await steps(fleet, "my-run") == [10]

    process = await asyncio.create_subprocess_exec(
        *watch, cwd=tmp_path, env=environment(fleet), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        said = ""
        for step in (20, 30):
            while f"step {step}     current" not in said:
                line = await asyncio.wait_for(process.stdout.readline(), 60)
                assert line, said
                said += line.decode()
            (make_adapter(tmp_path / "out" / "step_30", seed=30) / "DONE").touch()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 20) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert await steps(fleet, "my-watch") == [20, 30]
