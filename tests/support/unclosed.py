"""What asyncio complains of when something was left open."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def nothing_unclosed() -> Iterator[None]:
    """An error shall be one line; a session that was not closed would be told behind it."""
    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
    yield
    gc.collect()
    assert complaints == []
