"""Removing from the store what nobody needs any more, beside the trainer.

In a thread of its own: the mount may be slow, there may be much to remove, and no step is worth waiting for it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from adaptersync_core.config import StoreSection
from adaptersync_core.errors import AdapterSyncError
from adaptersync_core.retention import due
from adaptersync_core.store import ArtifactStore
from adaptersync_core.table import Table

TIDY_S = 60.0  # how often leftovers are looked for

log = logging.getLogger(__name__)


class Tidying:
    """One run's part of the store. `table` is called in the thread, of which there is one at a time."""

    def __init__(self, store: ArtifactStore, run: str, settings: StoreSection, table: Callable[[], Table]) -> None:
        self._store = store
        self._run = run
        self._settings = settings
        self._table = table
        self._began = -math.inf
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tidy, name=f"tidying-{run}", daemon=True)

    def begin(self) -> None:
        """Returns at once, and does nothing where it was begun a short while ago. By one thread at a time."""
        if self._thread.is_alive() or time.monotonic() - self._began < TIDY_S or self._ended.is_set():
            return
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._tidy, name=self._thread.name, daemon=True)
        self._thread.start()

    def end(self, timeout_s: float) -> None:
        """Wait for what was begun; what is not removed by then stays for the next trainer."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._ended.set()

    def _tidy(self) -> None:
        try:
            self._store.tidy(self._run)
            if not (self._settings.keep_last or self._settings.keep_for_s):
                return
            for name in due(self._store, self._table(), self._run, self._settings):
                if self._ended.is_set():
                    return
                self._store.remove(name)
        except (OSError, AdapterSyncError) as error:
            log.warning("what nobody needs in the store was not removed: %s", error)
