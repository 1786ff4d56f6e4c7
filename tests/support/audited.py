"""A ledger that is archived and held against what is known of it."""

from __future__ import annotations

from pathlib import Path

from adaptersync.jobs.ledger import drain
from adaptersync_core.config import Config
from adaptersync_core.events import AdapterPublished, Event
from adaptersync_core.rollouts import Row
from adaptersync_tools.audit.verify import Audit
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
