"""The job queue: its name, its serializer, and how a job is asked for.

Jobs are JSON (rq's default would be pickle), named by what they do, and idempotent: asked for again while waiting or
running, they run once.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import Any

from msgspec import Struct
from rq import Queue
from rq.exceptions import DuplicateJobError
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

from adaptersync_core.access import WORKERS
from adaptersync_core.config import Config
from adaptersync_core.errors import ControlError, PublicationFailed
from adaptersync_core.redis import rq_connection, translated

VERIFY = "adaptersync.jobs.verify.verify_version"
GATE = "adaptersync.jobs.gate.evaluate_version"
EXPORT = "adaptersync.jobs.export.export_version"
REMOVE = "adaptersync.jobs.retention.remove_version"
DRAIN = "adaptersync.jobs.ledger.drain_ledger"
# of the whole group, and by the clock
ROUNDS: Mapping[str, str] = MappingProxyType(
    {
        "verify": "adaptersync.jobs.rounds.verify_served",
        "retention": "adaptersync.jobs.retention.retain",
        "tidy": "adaptersync.jobs.rounds.tidy_store",
        "ledger": DRAIN,
    }
)
JOBS = frozenset({VERIFY, GATE, EXPORT, REMOVE, *ROUNDS.values()})  # what a worker runs
JOB_TIMEOUT_S = 600
EXPORT_TIMEOUT_S = 3600  # the Hub may be slow
RESULT_TTL_S = 3600  # the verdict is in the version's record; this is for who looks at rq
FAILURE_TTL_S = 86_400
UNDER_WAY = (JobStatus.QUEUED, JobStatus.STARTED, JobStatus.DEFERRED, JobStatus.SCHEDULED)
LOOK_S = 0.1


def queue_name(group: str) -> str:
    return f"adaptersync-{group}"


def workers_key(group: str) -> str:
    """The set in which rq keeps the keys of those that look for jobs here."""
    return WORKERS.format(group=group)


def worker_name(host: str, pid: int) -> str:
    return f"adaptersync-{host}-{pid}"


def worker_host(key: str) -> str:
    """Where a worker runs, from its key in that set."""
    return key.rpartition("-")[0].partition(":adaptersync-")[2]


def job_id(kind: str, group: str, about: str = "") -> str:
    """rq allows letters, digits, _ and -; our names have no capital letters, so no two jobs share an id."""
    return f"{kind}-{group}{'-IN-' if about else ''}{about}".replace(".", "D")


def verification_id(group: str, adapter_id: str) -> str:
    return job_id("verify", group, adapter_id)


def evaluation_id(group: str, adapter_id: str) -> str:
    return job_id("gate", group, adapter_id)


class JobOutcome(Struct, frozen=True, kw_only=True):
    """How a job that was asked for ended: what it said, or why it failed."""

    ok: bool
    said: str


class Jobs:
    """Asks for jobs; each call returns the job's id. Blocking: call it in a thread.

    All of them go over one client: rq remembers each that a job was asked for with, for as long as the process lives.
    """

    def __init__(self, config: Config) -> None:
        self._group = config.group.name
        self._gate_s = config.coordinator.gate_timeout_s
        self._url = config.redis.control_url
        self._connection = rq_connection(self._url)
        self._queue = Queue(queue_name(self._group), connection=self._connection, serializer=JSONSerializer)

    def __enter__(self) -> Jobs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def verify(self, adapter_id: str) -> str:
        """Every byte of a stored version is read again."""
        return self._ask(verification_id(self._group, adapter_id), VERIFY, adapter_id)

    def evaluation(self, adapter_id: str) -> str:
        """The gate's function is asked about a version that waits; before all other jobs, for its time runs."""
        named = evaluation_id(self._group, adapter_id)
        return self._ask(named, GATE, adapter_id, timeout_s=math.ceil(self._gate_s), first=True)

    def removal(self, adapter_id: str) -> str:
        """A version is taken out of the store, if nobody can ask for it any more."""
        return self._ask(job_id("remove", self._group, adapter_id), REMOVE, adapter_id)

    def export(self, adapter_id: str, target: str) -> str:
        """A stored version goes to where `target` says."""
        named = job_id(f"export-{target}", self._group, adapter_id)
        return self._ask(named, EXPORT, adapter_id, target, timeout_s=EXPORT_TIMEOUT_S)

    def round(self, name: str) -> str:
        """One of ROUNDS."""
        return self._ask(job_id(name, self._group), ROUNDS[name])

    def wait(self, job: str, *, timeout_s: float) -> JobOutcome:
        """Until it has ended; PublicationFailed when it has not in time."""
        until = time.monotonic() + timeout_s
        while (ended := self.ended(job)) is None:
            if time.monotonic() > until:
                raise PublicationFailed(
                    "no worker has done it in time", next_step="check that adaptersync worker runs", job=job
                )
            time.sleep(LOOK_S)
        return ended

    def ended(self, job: str) -> JobOutcome | None:
        """None while it is under way; ControlError when nobody knows it any more."""
        with translated(self._url):
            found = Job.fetch_many([job], connection=self._connection, serializer=JSONSerializer)[0]
            if found is None:
                raise ControlError("no such job", next_step="ask for it again", job=job)
            if found.get_status() in UNDER_WAY:
                return None
            result = found.latest_result()
        if result is not None and found.is_finished:
            return JobOutcome(ok=True, said=str(result.return_value))
        return JobOutcome(ok=False, said=last_line(str(result.exc_string) if result else "no reason known"))

    def _ask(
        self, name: str, function: str, *arguments: str, timeout_s: int = JOB_TIMEOUT_S, first: bool = False
    ) -> str:
        with translated(self._url):
            earlier = Job.fetch_many([name], connection=self._connection, serializer=JSONSerializer)[0]
            if earlier is not None and earlier.get_status() not in UNDER_WAY:
                # it looks up every execution that is noted here, and fails where one expired before its note: for a
                # minute after a worker was killed, or when Redis was set back
                self._connection.delete(earlier.execution_registry.key)
                earlier.delete()
            options: dict[str, Any] = {"result_ttl": RESULT_TTL_S, "failure_ttl": FAILURE_TTL_S, "at_front": first}
            with contextlib.suppress(DuplicateJobError):  # asked for already
                self._queue.enqueue(function, *arguments, job_id=name, unique=True, job_timeout=timeout_s, **options)
        return name


def last_line(trace: str) -> str:
    """What a traceback comes to."""
    return next((line.strip() for line in reversed(trace.splitlines()) if line.strip()), "no reason known")
