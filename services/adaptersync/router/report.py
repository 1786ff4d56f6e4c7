"""What the router tells the coordinator: the table it serves and what is in flight. Retirement waits for it."""

from __future__ import annotations

import logging

from adaptersync.router.proxy import Proxy
from adaptersync.router.table import TableView
from adaptersync_core.errors import ControlError
from adaptersync_core.records import RouterReport
from adaptersync_core.registry import Registry

REPORT_S = 1.0  # between reports, when the table does not change

log = logging.getLogger(__name__)


async def report(registry: Registry, view: TableView, proxy: Proxy, *, name: str, url: str) -> None:
    """Report at once when the table changes, and on a timer; runs until cancelled.

    Generation and counts are taken in one step: whoever was resolved by an older table is in the counts.
    """
    away = False
    while True:
        table = view.table
        said = RouterReport(
            generation=table.generation, incarnation=table.incarnation, url=url, inflight=dict(proxy.serving)
        )
        try:
            await registry.report_router(name, said)
            away = False
        except ControlError as error:
            if not away:
                log.warning("report not written: %s", error)
            away = True
        if view.table is table or away:
            await view.change(REPORT_S)
