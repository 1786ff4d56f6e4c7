"""A worker as an operator starts it, its settings from the environment."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from adaptersync.jobs.app import environment
from adaptersync_core.config import Config
from adaptersync_tools.explain import to_toml


def start_worker(config: Config, *, log: Path, file: Path | None = None, **more: str) -> subprocess.Popen[bytes]:
    """With its settings in that file, where one is named."""
    variables = {**os.environ, **({} if file else environment(config)), **more}
    command = [sys.executable, "-m", "adaptersync_tools.cli", "worker"]
    if file:
        file.write_text(to_toml(named(config)))
        command += ["--config", str(file)]
    with log.open("wb") as output:
        return subprocess.Popen(
            command, stderr=output, stdout=output, env=variables | {"PYTHONPATH": os.pathsep.join(sys.path)}
        )


def named(config: Config) -> dict[str, Any]:
    """All settings by name ("router.port")."""
    return {
        f"{section}.{key}": value
        for section, fields in msgspec.to_builtins(config).items()
        for key, value in fields.items()
    }


@asynccontextmanager
async def working(config: Config, *, log: Path, file: Path | None = None) -> AsyncIterator[subprocess.Popen[bytes]]:
    """Ended in order, unless the test has killed it."""
    worker = await asyncio.to_thread(start_worker, config, log=log, file=file)
    try:
        yield worker
    finally:
        if worker.poll() is None:
            worker.terminate()
        status = await asyncio.to_thread(worker.wait, 20)
        assert status in (0, -9), await asyncio.to_thread(log.read_text)
