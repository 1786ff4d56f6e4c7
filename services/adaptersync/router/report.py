"""What the router tells the control server: the table it serves, what is in flight, who lacks what it should hold, and
what it has done.

Retirement waits for the first two. Whoever lacks something is looked up there, too, until its agent has confirmed it.
"""

from __future__ import annotations

import logging
import socket
import time

from adaptersync.router.lacking import Lacking
from adaptersync.router.ownership import Ownership
from adaptersync.router.proxy import Proxy
from adaptersync.router.table import TableView
from adaptersync_core.errors import ControlError
from adaptersync_core.records import RouterReport
from adaptersync_core.registry import Registry
from adaptersync_core.table import Table

REPORT_S = 1.0  # between reports, when the table does not change

log = logging.getLogger(__name__)


class Reporter:
    """Until it has been told once, nothing may be served: the coordinator would not wait for this router."""

    def __init__(
        self,
        registry: Registry,
        view: TableView,
        proxy: Proxy,
        ownership: Ownership,
        lacking: Lacking,
        *,
        name: str,
        max_age_s: float,
    ) -> None:
        self._registry = registry
        self._view = view
        self._proxy = proxy
        self._ownership = ownership
        self._lacking = lacking
        self._name = name
        self._max_age_s = max_age_s
        self._away = False
        self._host = socket.gethostname()
        self.url = ""

    async def tell(self) -> Table | None:
        """Report once; returns the table that was reported, None when the control server could not be told.

        Table and counts are taken in one step: whoever was resolved by an older table is in the counts.
        """
        table, at = self._view.table, time.monotonic()
        said = RouterReport(
            generation=table.generation,
            incarnation=table.incarnation,
            max_age_s=self._max_age_s,
            url=self.url,
            host=self._host,
            inflight=dict(self._proxy.serving),
            missing=self._lacking.report(),
            traffic=self._proxy.counts.report(self._ownership.inflight),
        )
        untold = self._lacking.untold()
        try:
            self._lacking.told(untold, await self._registry.report_router(self._name, said))
        except ControlError as error:
            if not self._away:
                log.warning("report not written: %s", error)
            self._away = True
            return None
        self._away = False
        self._view.reported(at)
        return table

    async def run(self) -> None:
        """Report at once when the table changes, and on a timer; runs until cancelled."""
        while True:
            told = await self.tell()
            if told is not None and self._lacking.pairs:
                await self._look()
            if told is None or told is self._view.table:
                await self._view.change(REPORT_S)

    async def _look(self) -> None:
        """Has an agent confirmed what its replica lacked?"""
        try:
            holdings = await self._registry.holdings(self._lacking.report())
        except ControlError:
            return  # the next report will say so
        if any([self._lacking.confirm(replica, holding) for replica, holding in holdings.items()]):
            self._view.nudge()
