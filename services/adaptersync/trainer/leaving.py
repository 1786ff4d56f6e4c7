"""How a process that was made by multiprocessing ends: when its queues are handed over, and not a second later.

An interpreter that has loaded torch and vLLM takes two seconds of computing to be taken down, of which nobody has
anything; on a busy machine that is longer than a trainer waits before it kills. Exit functions are not called, as in
any process that multiprocessing has forked.

It ends, too, once whoever made it is gone: a trainer that was killed ends nothing of what it began.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from multiprocessing import util

LOOK_S = 1.0  # how often it is looked whether the parent is there
LAST = -1000  # after the queues', which wait until all is read


def leave_at_once() -> None:
    """To be called by a process whose work is done well, as the last of it."""
    util.Finalize(None, _leave, exitpriority=LAST)


def leave_with_parent() -> None:
    """To be called by such a process as the first of its work.

    Told by the parent's number: what multiprocessing has for this is an end of a pipe, which other children of the
    parent may hold, and Linux's own signal comes already when the thread ends that made the process. Nothing is handed
    over, since nobody would read it.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None  # noqa: S101 - multiprocessing has made it
    threading.Thread(target=_leave_after, args=(parent.pid,), name="leaves-with-parent", daemon=True).start()


def _leave_after(parent: int | None) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(1)


def _leave() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)
