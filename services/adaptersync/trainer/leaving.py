"""How a process that was made by multiprocessing ends: when its queues are handed over, and not a second later.

An interpreter that has loaded torch and vLLM takes two seconds of computing to be taken down, of which nobody has
anything; on a busy machine that is longer than a trainer waits before it kills. Exit functions are not called, as in
any process that multiprocessing has forked.
"""

from __future__ import annotations

import os
import sys
from multiprocessing import util

LAST = -1000  # after the queues', which wait until all is read


def leave_at_once() -> None:
    """To be called by a process whose work is done well, as the last of it."""
    util.Finalize(None, _leave, exitpriority=LAST)


def _leave() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)
