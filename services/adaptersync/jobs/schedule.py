"""When which job is asked for, by rq's own cron. It runs in every worker, in the pauses between two jobs.

rq's scheduler asks for pickled jobs under names by chance, once for each scheduler. Here they are asked for under their
own names, and of several workers the first counts: when a job was last asked for is noted where rq notes it. That
note outlives workers, so what came due while none ran is asked for by the next.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rq import cron_job_registry
from rq.exceptions import DuplicateSchedulerError, SchedulerNotFound

from adaptersync_core.archive import require
from adaptersync_core.config import Config
from adaptersync_core.errors import ConfigError, ControlError
from adaptersync_core.keys import Keys
from adaptersync_core.queue import GATE, ROUNDS, Jobs, queue_name
from adaptersync_core.redis import rq_connection, translated
from adaptersync_core.table import read_table

if TYPE_CHECKING:
    from rq.cron import CronJob

GATES_S = 5  # how soon a version at the gate is evaluated whose job was lost
BEAT_S = 30.0  # rq forgets a scheduler that said nothing for two minutes
AHEAD_S = 60.0  # a note from so far in the future is a wrong clock's

log = logging.getLogger(__name__)


class Schedule:
    """What a worker asks for by the clock; `look` is called again and again."""

    def __init__(self, config: Config, *, name: str) -> None:
        from rq.cron import CronScheduler  # whose time tables start a program when they are imported

        self._url = config.redis.control_url
        self._connection = rq_connection(self._url)
        self._jobs = Jobs(config)
        self._keys = Keys(config.group.name)
        self._rq = CronScheduler(self._connection, logging_level=logging.WARNING, name=name)
        self._ask: dict[str, Callable[[], object]] = {}  # by the time table's name
        self._fill(config)
        self._beaten_at = -math.inf
        self._said = ""

    def _fill(self, config: Config) -> None:
        settings = config.jobs
        for name in ("verify", "retention", "tidy"):
            if when := getattr(settings, f"{name}_cron"):
                try:
                    self._add(config, name, ROUNDS[name], self._round(name), cron=when)
                except ValueError as error:  # croniter's own are of this kind
                    raise ConfigError(f"setting is no time: {error}", key=f"jobs.{name}_cron", value=when) from error
        if settings.ledger_s:
            require()  # without, what nobody archives nor trims would fill Redis
            every_s = math.ceil(settings.ledger_s)
            self._add(config, "ledger", ROUNDS["ledger"], self._round("ledger"), interval=every_s)
        if config.coordinator.gate_function:
            self._add(config, "gates", GATE, self._gates, interval=GATES_S)

    def _add(
        self, config: Config, name: str, function: str, ask: Callable[[], object], *, cron: str = "", interval: int = 0
    ) -> None:
        from rq.cron import CronJob

        group = config.group.name
        job = CronJob(
            queue_name(group),
            func_name=function,
            name=f"{group}-{name}",
            cron=cron or None,
            interval=interval or None,
        )
        self._rq.get_jobs().append(job)
        self._ask[job.name] = ask

    def look(self) -> None:
        """Ask for what is due. It is tried again with the next look when Redis does not answer."""
        try:
            with translated(self._url):
                self._beat()
                for job in self._rq.get_jobs():
                    if job.should_run() and not self._asked_by_another(job):
                        self._ask_for(job)
            self._said = ""
        except ControlError as error:
            if str(error) != self._said:  # once, not every second
                log.warning("not asked for: %s", error)
            self._said = str(error)

    def begin(self) -> None:
        """Take up what was due when no worker ran."""
        with translated(self._url):
            for job in self._rq.get_jobs():
                self._asked_by_another(job)

    def end(self) -> None:
        try:
            with translated(self._url):
                self._rq.register_death()
        except (ControlError, SchedulerNotFound) as error:
            log.info("schedule: %s", error)
        self._jobs.close()
        self._connection.close()

    def _ask_for(self, job: CronJob) -> None:
        self._ask[job.name]()
        now = time.time()
        cron_job_registry.add(job.name, self._connection, enqueue_timestamp=now)
        job.set_enqueue_time(datetime.fromtimestamp(now, UTC))
        self._rq.save()

    def _asked_by_another(self, job: CronJob) -> bool:
        """Whether somebody asked since this worker did, so that it is not due any more."""
        score = self._connection.zscore(cron_job_registry.get_registry_key(), job.name)
        if score is None or float(score) > time.time() + AHEAD_S:
            return False
        asked = datetime.fromtimestamp(float(score), UTC)
        if job.latest_enqueue_time is not None and asked <= job.latest_enqueue_time:
            return False
        job.set_enqueue_time(asked)
        return not job.should_run()

    def _beat(self) -> None:
        if time.monotonic() - self._beaten_at < BEAT_S:
            return
        if self._beaten_at == -math.inf:
            try:
                self._rq.register_birth()
            except DuplicateSchedulerError:
                log.info("schedule %s is known", self._rq.name)
        self._rq.heartbeat()
        self._beaten_at = time.monotonic()

    def _round(self, name: str) -> Callable[[], str]:
        return lambda: self._jobs.round(name)

    def _gates(self) -> None:
        """A coordinator asks as soon as a version waits; this is for what was lost then."""
        table = read_table(self._connection.get(self._keys.table))
        for name, version in table.versions.items():
            if version.unanswered:
                self._jobs.evaluation(name)
