"""Waiting for a condition, with a deadline and a message: what tests use instead of sleeping."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

_POLL_S = 0.005


async def wait_until(
    condition: Callable[[], object | Awaitable[object]], *, timeout_s: float = 5.0, what: str = ""
) -> None:
    """Return as soon as the condition, a plain or an async function, is true; fail after timeout_s."""
    deadline = time.monotonic() + timeout_s
    while True:
        result = condition()
        if inspect.isawaitable(result):
            result = await result
        if result:
            return
        _check(deadline, timeout_s, what or _name(condition))
        await asyncio.sleep(_POLL_S)


def wait_until_sync(condition: Callable[[], object], *, timeout_s: float = 5.0, what: str = "") -> None:
    """The same outside an event loop."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        _check(deadline, timeout_s, what or _name(condition))
        time.sleep(_POLL_S)


def _check(deadline: float, timeout_s: float, what: str) -> None:
    if time.monotonic() >= deadline:
        raise AssertionError(f"not within {timeout_s:g} s: {what}")


def _name(condition: Callable[[], object]) -> str:
    """The condition's source line where there is one: a lambda's name says nothing."""
    try:
        return inspect.getsource(condition).strip()
    except (OSError, TypeError):
        return repr(condition)
