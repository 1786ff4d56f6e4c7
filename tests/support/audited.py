"""A ledger that is archived and held against what is known of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from adaptersync.jobs.ledger import drain
from adaptersync_core.config import Config
from adaptersync_core.events import AdapterPublished, Event
from adaptersync_core.rollouts import Row
from adaptersync_tools.audit.verify import Audit
from adaptersync_tools.cli import adaptersync
from adaptersync_tools.cli.common import run_command
from support.ledger import DIGEST, GROUP, RUN, VERSION, Writer, acked, promoted, row


def published(version: str = VERSION, digest: str = DIGEST) -> AdapterPublished:
    return AdapterPublished(version=version, run=RUN, seq=1, epoch=1, digest=digest, size=1, rank=8, noop=False)


HISTORY = (published(), acked(), promoted())


async def told(config: Config, writer: Writer, *rows: Row, events: tuple[Event, ...] = HISTORY) -> list[str]:
    """What is wrong with a ledger of these rows, after these events, and much later some of another run."""
    await writer.events(*events)
    await writer.rows(rows)
    await drain(config)
    return list(Audit(Path(config.store.path), GROUP, RUN).contradictions())


async def later(writer: Writer) -> None:
    """Time passes, as far as the ledger knows."""
    now = (await writer.client.command("TIME"))[0] * 1000
    await writer.rows([row("later-1", run="other", version="", digest="")], entry=f"{now + 1_000_000}-0")


async def run(config: Config, *arguments: str) -> int:
    """`adaptersync audit`, as an operator calls it; of the store alone."""
    path = Path(config.store.path).with_name("adaptersync.toml")
    if not path.exists():
        url = "redis://127.0.0.1:1/0" if arguments[0] != "drain" else config.redis.control_url
        path.write_text(
            f'[group]\nname = "{GROUP}"\n[redis]\ncontrol_url = "{url}"\n[store]\npath = "{config.store.path}"\n'
        )
    call = ["audit", *arguments, "--config", str(path)]
    return await asyncio.to_thread(run_command, adaptersync, call, "adaptersync")
