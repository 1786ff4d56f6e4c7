"""How many files this process may have open, of which each connection is one. Knows no router."""

from __future__ import annotations

import contextlib
import logging
import resource

OTHERS = 64  # besides: Redis, the ledger's spool, the ports listened on, the loop's own

log = logging.getLogger(__name__)


def allow(connections: int) -> None:
    """Allow for so many clients, each with a connection to a replica, as far as this may be decided here."""
    needed = 2 * connections + OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with contextlib.suppress(OSError, ValueError):  # the system may have a bound of its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    if soft < needed:
        log.warning(
            "%d open files are allowed, %d connections of clients need %d: raise the limit (ulimit -n) or lower"
            " router.connections",
            soft,
            connections,
            needed,
        )
