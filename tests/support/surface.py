"""What users and operators depend on, kept as sorted text in `tests/data/surface_*.txt`: a change of it is a decision.

`pytest --accept-surface` writes the files anew; the difference then shows in review.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import unified_diff
from typing import Any

import click
import msgspec
import pytest
from aiohttp import web

from adaptersync_core import events, keys
from support.source import REPOSITORY

DATA = REPOSITORY / "tests" / "data"


def assert_frozen(name: str, lines: Iterable[str], config: pytest.Config) -> None:
    """The lines are those of the file, in any order."""
    path = DATA / f"surface_{name}.txt"
    now = sorted(set(lines))
    assert now, f"the surface {name} is empty: nothing was collected"
    if config.getoption("accept_surface"):
        path.write_text("\n".join(now) + "\n")
    before = path.read_text().splitlines() if path.exists() else []
    difference = "\n".join(unified_diff(before, now, "frozen", "now", lineterm="", n=0))
    assert not difference, f"{name} changed. If that is meant: pytest --accept-surface, and commit {path}\n{difference}"


def redis_keys() -> Iterator[str]:
    for spec in keys.SPECS:
        ttl = f"{spec.ttl_s} s" if spec.ttl_s else "stays"
        yield f"{keys.PREFIX}:{{group}}:{spec.pattern}  {spec.type}  {spec.server}  {spec.writer}  {ttl}"


def event_types() -> Iterator[str]:
    """`type field: annotation`, an optional field with a question mark."""
    for kind in events.AnyEvent.__args__:
        for field in msgspec.structs.fields(kind):
            optional = "" if field.required else "?"
            yield f"{kind.__struct_config__.tag} {field.name}{optional}: {_annotation(field.type)}"


def _annotation(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


def cli_options(command: click.Command, path: str) -> Iterator[str]:
    """`path --option`, `path <argument>`, for the command and all below it."""
    yield path
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            yield f"{path} <{parameter.name}>"
        else:
            yield from (f"{path} {name}" for name in (*parameter.opts, *parameter.secondary_opts))
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            yield from cli_options(child, f"{path} {name}")


def http_routes(application: web.Application, service: str) -> Iterator[str]:
    """`service METHOD /path`; HEAD, which aiohttp adds to every GET, is left out."""
    for route in application.router.routes():
        resource = route.resource
        if resource is not None and route.method != "HEAD":
            yield f"{service} {route.method} {resource.canonical}"
