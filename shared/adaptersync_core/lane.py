"""The fast lane: a version's bytes in the cache server, so that a promotion need not wait for a mount.

Content-addressed in chunks, for a limited time and up to a limited size; the store remains the truth, and nothing is
wrong when a chunk is gone. A server that fails is left alone for a while: the store costs less than waiting for it
again. Whoever takes bytes from here checks them against the manifest, as from anywhere else.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from pathlib import Path

from adaptersync_core.errors import ControlError
from adaptersync_core.keys import LANE_TTL_S, Keys
from adaptersync_core.manifest import FileEntry, Manifest
from adaptersync_core.redis import RedisClient

CHUNK_BYTES = 1 << 20  # one value; larger ones would hold up everybody else's commands on the cache server
ANSWER_S = 1.0  # for one chunk; a lane that is slower than that is none
AWAY_S = 30.0  # how long the store alone is used after a failure

log = logging.getLogger(__name__)


class FastLane:
    """Put and take the files of one version. `limit_bytes` 0 closes the lane.

    `client` is to answer within ANSWER_S.
    """

    def __init__(self, client: RedisClient, keys: Keys, *, limit_bytes: int) -> None:
        self._client = client
        self._keys = keys
        self._limit_bytes = limit_bytes
        self._closed_until = -math.inf

    def open(self, manifest: Manifest) -> bool:
        return manifest.size <= self._limit_bytes and time.monotonic() >= self._closed_until

    async def put(self, manifest: Manifest, directory: Path) -> bool:
        """Offer a version's files; False when it is too large, or the cache server fails or has failed."""
        if not self.open(manifest):
            return False
        try:
            for file in manifest.files:
                content = await asyncio.to_thread((directory / file.name).read_bytes)
                for place, key in enumerate(self._chunks(file)):
                    chunk = content[place * CHUNK_BYTES : (place + 1) * CHUNK_BYTES]
                    await self._client.command("SET", key, chunk, "EX", LANE_TTL_S)
        except (ControlError, OSError) as error:
            if isinstance(error, ControlError):
                self._closed_until = time.monotonic() + AWAY_S
            log.warning("%s goes by the store alone: %s", manifest.adapter_id, error)
            return False
        return True

    async def take(self, manifest: Manifest) -> dict[str, bytes] | None:
        """Contents by file name, unchecked; None when any of it is not there."""
        if not self.open(manifest):
            return None
        contents = {}
        try:
            for file in manifest.files:
                chunks = [await self._client.command("GET", key) for key in self._chunks(file)]
                if any(chunk is None for chunk in chunks):
                    return None
                contents[file.name] = b"".join(chunks)
        except ControlError as error:
            self._closed_until = time.monotonic() + AWAY_S
            log.warning("fast lane cannot be read, so the store is for %g s: %s", AWAY_S, error)
            return None
        return contents

    def _chunks(self, file: FileEntry) -> list[str]:
        count = max(1, -(-file.size // CHUNK_BYTES))
        return [self._keys.lane(file.sha256, place) for place in range(count)]
