"""The job queue: its name, its serializer, and how a job is asked for.

Jobs are JSON (rq's default would be pickle), named by what they do, and idempotent: asked for again while waiting or
running, they run once.
"""

from __future__ import annotations

import contextlib

from rq import Queue
from rq.exceptions import DuplicateJobError
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

from adaptersync_core.access import WORKERS
from adaptersync_core.config import Config
from adaptersync_core.redis import rq_connection, translated

VERIFY = "adaptersync.jobs.verify.verify_version"
DRAIN = "adaptersync.jobs.ledger.drain_ledger"
JOB_TIMEOUT_S = 600
RESULT_TTL_S = 3600  # the verdict is in the version's record; this is for who looks at rq
FAILURE_TTL_S = 86_400
UNDER_WAY = (JobStatus.QUEUED, JobStatus.STARTED, JobStatus.DEFERRED, JobStatus.SCHEDULED)


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


def verification_id(group: str, adapter_id: str) -> str:
    """rq allows letters, digits, _ and -; our names have no capital letters, so no two versions share an id."""
    return f"verify-{group}-IN-{adapter_id}".replace(".", "D")


def drain_id(group: str) -> str:
    return f"ledger-{group}".replace(".", "D")


class Jobs:
    """Asks for jobs; each returns the job's id. Blocking: call it in a thread.

    All of them go over one client: rq remembers each that a job was asked for with, for as long as the process lives.
    """

    def __init__(self, config: Config) -> None:
        self._group = config.group.name
        self._url = config.redis.control_url
        self._connection = rq_connection(self._url)
        self._queue = Queue(queue_name(self._group), connection=self._connection, serializer=JSONSerializer)

    def close(self) -> None:
        self._connection.close()

    def verify(self, adapter_id: str) -> str:
        """Read a stored version again, all of it."""
        return self._ask(verification_id(self._group, adapter_id), VERIFY, adapter_id)

    def drain(self) -> str:
        """Archive the ledger."""
        return self._ask(drain_id(self._group), DRAIN)

    def _ask(self, job_id: str, function: str, *arguments: str) -> str:
        with translated(self._url):
            earlier = Job.fetch_many([job_id], connection=self._connection, serializer=JSONSerializer)[0]
            if earlier is not None and earlier.get_status() not in UNDER_WAY:
                earlier.delete()
            with contextlib.suppress(DuplicateJobError):  # asked for already
                self._queue.enqueue(
                    function,
                    *arguments,
                    job_id=job_id,
                    unique=True,
                    job_timeout=JOB_TIMEOUT_S,
                    result_ttl=RESULT_TTL_S,
                    failure_ttl=FAILURE_TTL_S,
                )
        return job_id
