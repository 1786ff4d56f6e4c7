"""The worker: one queue, JSON jobs, a connection of its own.

One queue, because rq takes jobs from several without noting which one it took; JSON, because rq's default would run
whatever is in Redis. A job that lost its worker is found again within the maintenance interval.
"""

from __future__ import annotations

import logging
import os
import socket

import msgspec
from rq import Queue, Worker
from rq.serializers import JSONSerializer

from adaptersync_core.config import ENVIRONMENT, Config, as_text
from adaptersync_core.queue import queue_name
from adaptersync_core.redis import rq_connection, translated
from adaptersync_core.telemetry import configure_logging

MAINTENANCE_S = 60

log = logging.getLogger(__name__)


def run_worker(config: Config) -> None:
    """Work until SIGTERM; the job in hand is finished first."""
    name = f"{socket.gethostname()}-{os.getpid()}"
    configure_logging("worker", name)
    # each job runs in a process of its own, which reads its settings like any other process of ours
    os.environ.update(environment(config))
    connection = rq_connection(config.redis.control_url)
    queue = Queue(queue_name(config.group.name), connection=connection, serializer=JSONSerializer)
    with translated(config.redis.control_url):
        connection.ping()  # rq would wait for ever, and without a word
        worker = Worker(
            [queue],
            name=f"adaptersync-{name}",
            connection=connection,
            serializer=JSONSerializer,
            maintenance_interval=MAINTENANCE_S,
        )
        log.info("working on %s", queue.name)
        worker.work(logging_level="WARNING")


def environment(config: Config) -> dict[str, str]:
    """The settings as variables; they win over any file."""
    return {
        f"{ENVIRONMENT}{section}__{key}".upper(): as_text(value)
        for section, fields in msgspec.to_builtins(config).items()
        for key, value in fields.items()
    }
