"""A publication that is killed at every step it takes: run as a program, in a process of its own.

    python dying.py STORE SOURCE

For each k, a fork publishes SOURCE into STORE and kills itself with SIGKILL before the k-th call it makes into the
interpreter's C code (opening, writing, flushing, renaming and everything between), until one gets to the end. After
each the whole store is read. Prints one line: how many died, how often the version was there after a death.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

from msgspec.structs import replace

from adaptersync_core.store import ArtifactStore, verify_files
from support.artifacts import manifest_of


def main(root: str, source: str) -> None:
    store, manifest = ArtifactStore(Path(root)), replace(manifest_of(Path(source)), markers=2)
    died = there = 0
    while True:
        child = os.fork()
        if child == 0:
            _kill_at(died)
            store.publish(manifest, Path(source))
            store.mark(manifest)
            sys.setprofile(None)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        for name in store.versions():  # whatever a reader can find is whole
            verify_files(store.read_manifest(name), store.directory(name))
            there += 1
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        died += 1
    assert list(store.versions()) == [manifest.adapter_id]
    print(died, there)


def _kill_at(step: int) -> None:
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        if event == "c_call":
            if calls == step:
                os.kill(os.getpid(), signal.SIGKILL)
            calls += 1

    sys.setprofile(count)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
