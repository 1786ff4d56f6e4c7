"""Logs that a person and a program can read, on standard error, one line each."""

from __future__ import annotations

import logging
import sys
import time

GARBAGE_S = 10.0  # at most one line about it in that time


def configure_logging(service: str, name: str, *, verbose: bool = False) -> None:
    """`time level service/name module: message`; called once by a command, never by a library."""
    form = f"%(asctime)s.%(msecs)03d %(levelname)-7s {service}/{name} %(name)s: %(message)s"
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.DEBUG if verbose else logging.INFO,
        format=form,
        datefmt="%Y-%m-%dT%H:%M:%S",
    )
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    logging.getLogger("aiohttp.server").addFilter(Garbage())


class Garbage(logging.Filter):
    """What is no HTTP is told in one line instead of a traceback each, and not each time."""

    def __init__(self) -> None:
        super().__init__()
        self._next_at = 0.0
        self._untold = 0

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if type(error).__module__ != "aiohttp.http_exceptions":
            return True
        now = time.monotonic()
        if now < self._next_at:
            self._untold += 1
            return False
        message = " ".join(str(getattr(error, "message", error)).split())[:200]
        more = f"; {self._untold} more like it since the last such line" if self._untold else ""
        record.msg, record.args = f"{record.getMessage()}: {type(error).__name__}: {message}{more}", ()
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.exc_info = record.exc_text = None
        self._next_at, self._untold = now + GARBAGE_S, 0
        return True
