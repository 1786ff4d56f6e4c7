"""The fleet while it works, on a terminal: looks again and again, and follows events, until `q`.

Knows the terminal: its size, its keys. What is shown is made in `screen`, from what an `Observer` sees.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections.abc import Iterator

from rich.console import Console
from rich.live import Live as Display

from adaptersync.coordinator.observer import Observer
from adaptersync.coordinator.overview import Overview
from adaptersync_core.config import Config
from adaptersync_core.errors import ControlError
from adaptersync_core.keys import Keys
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from adaptersync_tools.screen import whole

QUIT = frozenset("qQ\x04")
RATES_S = 1.2  # between two looks that rates are told from


async def glance(registry: Registry, config: Config) -> Overview:
    """The fleet once, with its rates: two looks."""
    observer = Observer(registry, config, max_age_s=0.0, step_s=RATES_S)
    await observer.begin()
    await observer.overview()
    await asyncio.sleep(RATES_S)
    return await observer.overview()


async def watch(config: Config, console: Console, *, interval_s: float) -> None:
    """Until a key of `QUIT`, or until it is cancelled."""
    client = RedisClient(config.redis.control_url, name="top")
    observer = Observer(Registry(client, Keys(config.group.name)), config, max_age_s=interval_s / 2, step_s=interval_s)
    quit_ = asyncio.Event()
    following = asyncio.create_task(observer.follow(lambda _news: None))
    try:
        with _keys(quit_), Display(console=console, screen=True, auto_refresh=False) as display:
            await _show(observer, console, display, quit_, interval_s)
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
        await client.close()


async def _show(
    observer: Observer, console: Console, display: Display, quit_: asyncio.Event, interval_s: float
) -> None:
    last: Overview | None = None
    while not quit_.is_set():
        notice = ""
        try:
            last = await observer.overview()
        except ControlError as error:
            notice = f"this is what was seen last: {error.reason}"
            if last is None:
                raise
        width, height = console.size
        display.update(whole(last, console, width=width, height=height, notice=notice), refresh=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(interval_s):
                await quit_.wait()


@contextlib.contextmanager
def _keys(quit_: asyncio.Event) -> Iterator[None]:
    """Keys as they are pressed, without a line's end; the terminal is left as it was."""
    descriptor = sys.stdin.fileno()
    if not os.isatty(descriptor):
        yield
        return
    before = termios.tcgetattr(descriptor)
    loop = asyncio.get_running_loop()

    def pressed() -> None:
        keys = os.read(descriptor, 64).decode(errors="ignore")
        if not keys or QUIT & set(keys):
            quit_.set()

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, pressed)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
