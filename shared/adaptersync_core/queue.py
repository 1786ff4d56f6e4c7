"""The job queue: its name, its serializer, and how a job is asked for.

Jobs are JSON (rq's default would be pickle), named by what they do, and idempotent: asking twice runs once.
"""

from __future__ import annotations

import contextlib

from rq import Queue
from rq.exceptions import DuplicateJobError
from rq.serializers import JSONSerializer

from adaptersync_core.config import Config
from adaptersync_core.redis import rq_connection, translated

VERIFY = "adaptersync.jobs.verify.verify_version"
JOB_TIMEOUT_S = 600
RESULT_TTL_S = 86400


def queue_name(group: str) -> str:
    return f"adaptersync-{group}"


def enqueue_verification(config: Config, adapter_id: str) -> str:
    """Ask for a deep verification of a stored version; returns the job's id. Blocking: call it in a thread."""
    connection = rq_connection(config.redis.control_url)
    job_id = f"verify-{adapter_id.replace('.', '_')}"  # rq allows letters, digits, _ and -
    with translated(config.redis.control_url), contextlib.closing(connection):
        queue = Queue(queue_name(config.group.name), connection=connection, serializer=JSONSerializer)
        with contextlib.suppress(DuplicateJobError):  # asked for already
            queue.enqueue(
                VERIFY,
                adapter_id,
                job_id=job_id,
                unique=True,
                job_timeout=JOB_TIMEOUT_S,
                result_ttl=RESULT_TTL_S,
                failure_ttl=RESULT_TTL_S,
            )
    return job_id
