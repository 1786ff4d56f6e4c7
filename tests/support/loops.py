"""Event loops that a test runs on: asyncio's, on which the rest of the suite runs, and the one that production uses."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """An async test becomes two plain ones; its fixtures must not need a loop."""

    @functools.wraps(test)
    def run(loop_factory: Callable[[], asyncio.AbstractEventLoop], **arguments: Any) -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(test(**arguments))

    signature = inspect.signature(test)
    factory = inspect.Parameter("loop_factory", inspect.Parameter.KEYWORD_ONLY)
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), factory])  # type: ignore[attr-defined]
    factories = [asyncio.new_event_loop, uvloop.new_event_loop]
    made: Callable[..., None] = pytest.mark.parametrize("loop_factory", factories, ids=["asyncio", "uvloop"])(run)
    return made
