"""The worker: one queue, JSON jobs, a connection of its own.

One queue, because rq takes jobs from several without noting which one it took; JSON and a list of jobs, because rq
would run whatever is in Redis: code in its own format, and in any format every function it can import. A job that lost
its worker is found again within the maintenance interval.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
from rq import Queue, Worker
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.utils import now
from rq.worker_registration import register

from adaptersync.jobs.metrics import JobMetrics
from adaptersync.jobs.schedule import Schedule
from adaptersync_core.config import CONFIG, Config, as_text, shown, variable
from adaptersync_core.errors import ControlError, ControlUnavailable
from adaptersync_core.metrics import served
from adaptersync_core.notify import Notifier
from adaptersync_core.queue import JOBS, queue_name, worker_name
from adaptersync_core.redis import rq_connection, translated
from adaptersync_core.telemetry import configure_logging

MAINTENANCE_S = 60
KNOWN_S = 30  # and a minute, which rq adds: how long a worker that died counts as one
LOOK_S = 1  # how soon a worker without a job learns that it is to stop

log = logging.getLogger(__name__)


class ListedJob(Job):
    """A job that is on the list; its callbacks, which name functions too, are never called."""

    @property
    def func(self) -> Any:
        if self.instance is not None or self.func_name not in JOBS:
            raise ControlError("not a job of ours", next_step="see who writes to the queue", job=self.func_name)
        return super().func

    @property
    def success_callback(self) -> None:
        return None

    @property
    def failure_callback(self) -> None:
        return None

    @property
    def stopped_callback(self) -> None:
        return None


class PatientWorker(Worker):
    """Stops between two jobs. rq's own worker raises an exception out of its signal handler, and asks Redis from there:
    in the midst of whatever it does, which has lost the signal, and has crashed the interpreter.

    `notifier` is told that it works, with each heartbeat: between looks for a job, and while one is in hand. While it
    waits it does what is `due`.
    """

    due: Callable[[], None] | None = None
    notifier = Notifier()
    url = ""

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        self._stop_requested = True
        self.notifier.stopping()
        self._shutdown_requested_date = now()
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, self.request_force_stop)

    def dequeue_job_and_maintain_ttl(
        self, timeout: int | None, max_idle_time: int | None = None
    ) -> tuple[Job, Queue] | None:
        while not self._stop_requested:
            if self.due is not None:
                self.due()
            if (found := super().dequeue_job_and_maintain_ttl(LOOK_S, LOOK_S)) is not None:
                return found
        return None

    def execute_job(self, job: Job, queue: Queue) -> None:
        """When Redis goes away meanwhile, nobody can say how the job ended: it is found again, and repeats are safe. rq
        would end the worker, and leave the process that does the job.
        """
        try:
            with translated(self.url):
                super().execute_job(job, queue)
        except ControlUnavailable as error:
            log.warning("the end of %s is not known: %s", job.id, error)
            if self.horse_pid:
                self.kill_horse()
                self.wait_for_horse()
                self._horse_pid = 0
            self.executions.clear()
            while not self._stop_requested and not self._reaches_redis():
                self.notifier.alive()
                time.sleep(LOOK_S)

    def _reaches_redis(self) -> bool:
        try:
            with translated(self.url):
                return bool(self.connection.ping())
        except ControlError:
            return False

    def heartbeat(self, timeout: int | None = None, pipeline: Any = None) -> None:
        self.notifier.alive()  # also while Redis is away, which rq waits for
        if pipeline is None and not self.connection.hexists(self.key, "birth"):
            # Redis was emptied, or away for longer than it remembers
            self.connection.hset(self.key, mapping=self.serialize())
            register(self)
        super().heartbeat(timeout, pipeline)
        if pipeline is None:  # else nothing was written yet
            self.notifier.ready()


def run_worker(config: Config, file: Path | None = None) -> None:
    """Work until SIGTERM; the job in hand is finished first. `file` is where settings were read, if one was named."""
    name = f"{socket.gethostname()}-{os.getpid()}"
    configure_logging("worker", name)
    notifier = Notifier.take(os.environ)
    # each job runs in a process of its own, which reads its settings like any other process of ours
    os.environ.update(environment(config, file))
    connection = rq_connection(config.redis.control_url)
    queue = Queue(queue_name(config.group.name), connection=connection, serializer=JSONSerializer, job_class=ListedJob)
    schedule = Schedule(config, name=f"adaptersync-{name}")
    with translated(config.redis.control_url):
        connection.ping()  # rq would wait for ever, and without a word
        worker = PatientWorker(
            [queue],
            name=worker_name(socket.gethostname(), os.getpid()),
            connection=connection,
            serializer=JSONSerializer,
            job_class=ListedJob,
            maintenance_interval=MAINTENANCE_S,
            worker_ttl=KNOWN_S,
        )
        schedule.begin()
        worker.due = schedule.look
        worker.notifier = notifier
        worker.url = config.redis.control_url
        notifier.status(f"works on {queue.name}")
        log.info("working on %s", queue.name)
        try:
            with served(JobMetrics(config), host=config.telemetry.metrics_host, port=config.jobs.metrics_port):
                worker.work(logging_level="WARNING")
        finally:
            schedule.end()


def environment(config: Config, file: Path | None = None) -> dict[str, str]:
    """The settings as variables, which win over the file. What has a secret stays where it was given: a gate's function
    is code of somebody else, and hands its environment on to whatever it starts.
    """
    given = {
        variable(f"{section}.{key}"): as_text(value)
        for section, fields in msgspec.to_builtins(config).items()
        for key, value in fields.items()
        if shown(f"{section}.{key}", value) == value
    }
    return given | ({CONFIG: str(file.absolute())} if file else {})
