"""Retention, export and removal, killed at every call they make to the system: run as a program of its own.

    python dying_jobs.py REDIS STORE EXPORTS

For each k, a fork does the job and kills itself with SIGKILL before the k-th call that may change something outside,
until one gets to the end. After each, what is in the store and in the exports is whole, and the job is done again: then
it has done what it should. Prints how many died of each.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from adaptersync.jobs.export import to_directory
from adaptersync.jobs.retention import clear, remove
from adaptersync_core.config import Config, JobsSection, StoreSection, load_config
from adaptersync_core.keys import Keys
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from adaptersync_core.store import ArtifactStore, verify_files
from adaptersync_core.store_identity import agree
from support.artifacts import manifest_of, small_adapter
from support.dying_drain import _kill_at

RUN, COUNT = "run", 4


def main(redis_url: str, root: str, exports: str) -> None:
    config = replace(
        load_config(environment={}, overrides={"redis.control_url": redis_url}),
        store=StoreSection(path=root, keep_last=2),
        jobs=JobsSection(export_path=exports),
    )
    store = ArtifactStore(Path(root))
    source = small_adapter(Path(root).parent / "source")
    names = [manifest_of(source, run=RUN, seq=seq).adapter_id for seq in range(1, COUNT + 1)]
    asyncio.run(_settle(config))

    def fill() -> None:
        for seq in range(1, COUNT + 1):
            store.publish(manifest_of(source, run=RUN, seq=seq), source)
        shutil.rmtree(exports, ignore_errors=True)

    def kept(count: int) -> None:
        assert list(store.versions()) == names[-count:] if count else not list(store.versions())

    def exported() -> None:
        verify_files(store.read_manifest(names[0]), Path(exports) / names[0])

    def removed() -> None:
        assert names[-1] not in store.versions()
        assert store.highest(RUN) == (1, COUNT)  # numbers that were given out stay known

    died = [
        _die(lambda: asyncio.run(clear(config)), fill, lambda: kept(2), store, Path(exports)),
        _die(lambda: asyncio.run(remove(config, names[-1])), fill, removed, store, Path(exports)),
        _die(lambda: to_directory(config, names[0]), fill, exported, store, Path(exports)),
    ]
    print(*died)


def _die(
    work: Callable[[], object],
    fill: Callable[[], None],
    done: Callable[[], None],
    store: ArtifactStore,
    exports: Path,
) -> int:
    died = 0
    while True:
        fill()
        child = os.fork()
        if child == 0:
            _kill_at(died)
            work()
            sys.setprofile(None)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        for name in store.versions():  # whatever a reader can find is whole
            verify_files(store.read_manifest(name), store.directory(name))
        for place in exports.glob(f"{RUN}-*") if exports.is_dir() else ():
            verify_files(store.read_manifest(place.name), place)
        work()
        done()
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            return died
        died += 1


async def _settle(config: Config) -> None:
    """A group that has the store, and knows of a run that has ended and serves nothing."""
    client = RedisClient(config.redis.control_url, name="settle")
    keys = Keys(config.group.name)
    await agree(Registry(client, keys), Path(config.store.path))
    entry = {"epoch": 1, "max_staleness": 1, "considered": COUNT, "ended_at": 1.0}
    await client.command("SET", keys.table, msgspec.json.encode({"generation": 1, "runs": {RUN: entry}}))
    await client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
