"""Running a service until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine
from typing import Any


def run_until_stopped(service: Coroutine[Any, Any, None]) -> None:
    """Run `service` until it ends or SIGTERM or SIGINT comes; then cancel it and let it clean up."""

    async def main() -> None:
        task = asyncio.create_task(service)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(main())
