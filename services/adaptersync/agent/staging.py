"""Bytes on their way from the store to this host's disk, and proof that they arrived.

The engine is only ever handed a directory that was verified and that nobody writes to again. Its absolute path is the
same on every replica, because the engine's block hashes contain it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import time
from pathlib import Path

from adaptersync_core.errors import AdapterInvalid, ArtifactCorrupt, NameInvalid, StagingFailed, StoreError
from adaptersync_core.identity import parse_adapter_id
from adaptersync_core.lane import FastLane
from adaptersync_core.manifest import Manifest, check_against_base, content_digest, inspect
from adaptersync_core.markers import Lookout
from adaptersync_core.own_place import foreign_part
from adaptersync_core.store import DIRECTORY_MODE, ArtifactStore, make_directory, verify_files, write_verified

FIRST_PAUSE_S = 0.05  # between looks at a mount that does not show a version yet; doubles up to LAST_PAUSE_S
LAST_PAUSE_S = 1.0
CERTAIN_S = 3.0  # for which a whole file must go on being wrong before that is no longer an upload on its way
DISK_S = 5.0  # how long a disk that failed may take to recover
HALF_S = 3600.0  # after this a copy is not on its way any more
OWN_DISK = "check space and health of the disk of agent.stage_path on this host"


class Staging:
    """The staged versions of one host."""

    def __init__(self, root: Path, store: ArtifactStore, lane: FastLane | None = None) -> None:
        self.root = root
        self._store = store
        self._lane = lane
        self._lookout = Lookout(store.shows)

    def path(self, adapter_id: str) -> Path:
        parse_adapter_id(adapter_id)  # nothing else may become part of a path
        return self.root / adapter_id

    async def bring(self, manifest: Manifest, *, timeout_s: float) -> dict[str, float]:
        """Have the version staged and verified; returns the seconds spent by phase. What failed counts as not visible.

        StoreError when the store does not show it in `timeout_s`, ArtifactCorrupt when it shows something else,
        StagingFailed when this host's own disk does not take it. A mount that shows too little at first (an upload on
        its way) is looked at again until then; one that goes on showing the same wrong bytes is taken at its word.
        """
        if content_digest(manifest.files) != manifest.digest:
            raise ArtifactCorrupt("version is named after other files than its manifest's", version=manifest.adapter_id)
        began = time.monotonic()
        pause = FIRST_PAUSE_S
        place = self.path(manifest.adapter_id)
        contents = await self._lane.take(manifest) if self._lane and not place.is_dir() else None
        shown = place.is_dir()
        disk_failed_at = 0.0
        wrong: tuple[dict[str, str | int | float], float] = ({}, began)
        while True:
            if contents is None and not shown:
                await self._lookout.wait(manifest, until=began + timeout_s, otherwise=place.is_dir)
                shown = True
            looked = began if contents else time.monotonic()
            try:
                staged, verified = await asyncio.to_thread(self._stage, manifest, contents)
            except (OSError, ArtifactCorrupt) as error:
                now = time.monotonic()
                own = isinstance(error, OSError) and self._own(error)
                disk_failed_at = (disk_failed_at or now) if own else 0.0
                until = min(began + timeout_s, disk_failed_at + DISK_S) if own else began + timeout_s
                certain = False
                if isinstance(error, ArtifactCorrupt) and contents is None:
                    if error.ids != wrong[0]:
                        wrong = error.ids, now
                    certain = not error.short and now - wrong[1] >= CERTAIN_S
                if certain or now + pause > until:
                    if isinstance(error, ArtifactCorrupt):
                        raise
                    raise (StagingFailed if own else StoreError)(
                        f"version could not be staged: {error.strerror or error}",
                        next_step=OWN_DISK if own else "check the mount of the store on this host",
                        version=manifest.adapter_id,
                        file=Path(error.filename).name if error.filename else None,
                        waited_s=round(now - began, 1),
                    ) from error
                await asyncio.sleep(0 if contents else pause)
                pause = min(pause * 2, LAST_PAUSE_S)
                contents = None  # what the lane gave did not do; the store is the truth
            else:
                return {"visible_s": looked - began, "staged_s": staged - looked, "verified_s": verified - staged}

    def _own(self, error: OSError) -> bool:
        """Whether it is of this host's disk: errors of reading name a file of the store."""
        return error.filename is None or Path(error.filename).is_relative_to(self.root)

    def _stage(self, manifest: Manifest, contents: dict[str, bytes] | None) -> tuple[float, float]:
        """Copy what is not there yet and read all of it again; when each was done. What turns out bad is replaced."""
        make_directory(self.root)
        if part := foreign_part(self.root):  # who could exchange what was verified
            raise StagingFailed(
                "place for versions belongs to somebody else",
                next_step="remove it, or set agent.stage_path to a directory of your own",
                place=str(part),
            )
        place = self.path(manifest.adapter_id)
        if not place.is_dir():
            self._copy(manifest, contents)
        staged = time.monotonic()
        try:
            verify_files(manifest, place)
        except ArtifactCorrupt:
            self._copy(manifest, replace=True)
            try:
                verify_files(manifest, place)
            except ArtifactCorrupt as error:  # every byte was right on its way here
                raise StagingFailed(
                    f"what was written reads otherwise: {error.reason}", next_step=OWN_DISK, **error.ids
                ) from error
        return staged, time.monotonic()

    def _copy(self, manifest: Manifest, contents: dict[str, bytes] | None = None, *, replace: bool = False) -> None:
        place = self.path(manifest.adapter_id)
        half = self.root / f".half-{manifest.adapter_id}-{secrets.token_hex(4)}"
        bad = half.with_name(f"{half.name}-bad")
        try:
            half.mkdir()
            half.chmod(DIRECTORY_MODE)  # the engine may run as another user
            if contents is None:
                self._store.copy_out(manifest, half)
            else:
                write_verified(manifest, contents, half)
            if replace:
                place.rename(bad)
            try:
                half.rename(place)
            except OSError:
                if not place.is_dir():
                    raise  # else the agent of another replica on this host was faster, with the same bytes
        finally:
            shutil.rmtree(half, ignore_errors=True)
            shutil.rmtree(bad, ignore_errors=True)

    def check(self, manifest: Manifest, *, max_lora_rank: int, base: dict[str, tuple[int, ...]]) -> None:
        """AdapterInvalid unless the engine can serve it: it would load much of what it cannot without a word.

        `base` maps the base model's weights to their shapes; empty when they cannot be read on this host.
        """
        shape = inspect(self.path(manifest.adapter_id))
        if shape != manifest.shape:
            raise AdapterInvalid("files and manifest tell of different adapters", version=manifest.adapter_id)
        if max_lora_rank and shape.rank > max_lora_rank:
            raise AdapterInvalid(
                f"rank {shape.rank} is above the engine's {max_lora_rank}",
                next_step="raise --max-lora-rank, or train with a smaller r",
                version=manifest.adapter_id,
            )
        if base:
            check_against_base(shape, base)

    def discard(self, adapter_id: str) -> None:
        """Delete a staged version; the engine must not hold it."""
        shutil.rmtree(self.path(adapter_id), ignore_errors=True)

    def staged(self) -> list[str]:
        """Versions on this host's disk; what is left of a copy that was interrupted long ago is removed."""
        names = []
        with contextlib.suppress(FileNotFoundError):
            for path in self.root.iterdir():
                if path.name.startswith(".half-"):
                    with contextlib.suppress(FileNotFoundError):
                        if time.time() - path.stat().st_mtime > HALF_S:
                            shutil.rmtree(path, ignore_errors=True)
                    continue
                with contextlib.suppress(NameInvalid):
                    names.append(str(parse_adapter_id(path.name)))
        return sorted(names)
