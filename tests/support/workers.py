"""A worker as an operator starts it, its settings from the environment."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from adaptersync.jobs.app import environment
from adaptersync_core.config import Config


def start_worker(config: Config, *, log: Path, **more: str) -> subprocess.Popen[bytes]:
    variables = {**os.environ, **environment(config), **more, "PYTHONPATH": os.pathsep.join(sys.path)}
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "adaptersync_tools.cli", "worker"], stderr=output, stdout=output, env=variables
        )


@asynccontextmanager
async def working(config: Config, *, log: Path) -> AsyncIterator[subprocess.Popen[bytes]]:
    """Ended in order, unless the test has killed it."""
    worker = await asyncio.to_thread(start_worker, config, log=log)
    try:
        yield worker
    finally:
        if worker.poll() is None:
            worker.terminate()
        status = await asyncio.to_thread(worker.wait, 20)
        assert status in (0, -9), await asyncio.to_thread(log.read_text)
