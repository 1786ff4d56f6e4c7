"""Logs that a person and a program can read, on standard error, one line each."""

from __future__ import annotations

import logging
import sys


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
