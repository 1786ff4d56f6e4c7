"""The worker's figures for Prometheus, read from Redis when they are asked for: each job runs in a process of its own.

They are of the group's queue, so every worker of the group tells the same.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from rq import Queue
from rq.registry import FailedJobRegistry, FinishedJobRegistry, StartedJobRegistry
from rq.serializers import JSONSerializer

from adaptersync_core.config import Config
from adaptersync_core.errors import ControlError
from adaptersync_core.keys import Keys
from adaptersync_core.metrics import Metric, Metrics
from adaptersync_core.queue import queue_name
from adaptersync_core.redis import rq_connection, translated

TABLE = (
    Metric(name="redis_reachable", kind="gauge", text="1 while the control server answers the worker"),
    Metric(name="jobs_waiting", kind="gauge", text="Jobs nobody has begun"),
    Metric(name="jobs_running", kind="gauge", text="Jobs that a worker is at"),
    Metric(name="jobs_failed", kind="gauge", text="Jobs of the last day that failed"),
    Metric(name="jobs_finished", kind="gauge", text="Jobs that ended well within the last hour"),
    Metric(name="rollouts_rows", kind="gauge", text="Ledger rows in Redis"),
    Metric(name="events_entries", kind="gauge", text="Entries of the event stream in Redis"),
)

log = logging.getLogger(__name__)


class JobMetrics(Collector):
    def __init__(self, config: Config) -> None:
        self._url = config.redis.control_url
        self._keys = Keys(config.group.name)
        self._queue = queue_name(config.group.name)
        self._connection = rq_connection(self._url)

    def collect(self) -> Iterator[Family]:
        figures = Metrics("worker", TABLE)
        try:
            with translated(self._url):
                self._look(figures)
            figures.set("redis_reachable", 1)
        except ControlError as error:
            log.warning("figures cannot be read: %s", error)
            figures.forget(*(figure.name for figure in TABLE))
            figures.set("redis_reachable", 0)
        yield from figures.collect()

    def _look(self, figures: Metrics) -> None:
        queue = Queue(self._queue, connection=self._connection, serializer=JSONSerializer)
        figures.set("jobs_waiting", queue.count)
        for name, registry in (
            ("jobs_running", StartedJobRegistry),
            ("jobs_failed", FailedJobRegistry),
            ("jobs_finished", FinishedJobRegistry),
        ):
            # not cleaned up: that is the worker's business
            figures.set(name, registry(queue=queue).get_job_count(cleanup=False))
        figures.set("rollouts_rows", int(self._connection.xlen(self._keys.rollouts)))
        figures.set("events_entries", int(self._connection.xlen(self._keys.events)))
