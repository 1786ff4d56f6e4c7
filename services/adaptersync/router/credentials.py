"""What replicas want to be shown: a bearer token for each that has one, a file called as the replica.

The directory is read once a second, so a token can be replaced while requests run. A replica without a file is shown
nothing of ours; one with a file is shown that, and nothing that a client sent in its place.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from adaptersync.router.request import AUTHORIZATION, Pair
from adaptersync_core.api_keys import read_secret
from adaptersync_core.errors import ConfigError, NameInvalid
from adaptersync_core.identity import check_name

LOOK_S = 1.0

log = logging.getLogger(__name__)


class Credentials:
    """ConfigError when the directory, or a file in it, cannot be read at first; later what was known stays."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._complained = False
        self._tokens = self._read()

    def shown(self, replica: str, pairs: Sequence[Pair]) -> Sequence[Pair]:
        """The headers of a request to this replica."""
        token = self._tokens.get(replica)
        if token is None:
            return pairs
        return [*(pair for pair in pairs if pair[0] != AUTHORIZATION), (AUTHORIZATION, token)]

    async def follow(self) -> None:
        """Runs until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self._tokens = await asyncio.to_thread(self._read)
                self._complained = False
            except ConfigError as error:
                if not self._complained:
                    log.error("tokens of replicas stay as they were: %s", error)
                self._complained = True

    def _read(self) -> dict[str, bytes]:
        try:
            names = [path.name for path in self._directory.iterdir() if path.is_file()]
        except OSError as error:
            raise ConfigError(
                f"tokens cannot be read: {error.strerror}", key="router.replica_keys_path", path=str(self._directory)
            ) from error
        return {name: b"Bearer " + read_secret(self._directory / name).encode() for name in names if _is_name(name)}


def _is_name(name: str) -> bool:
    try:
        return bool(check_name("replica", name))
    except NameInvalid:
        return False  # .gitkeep, ..data of a mounted secret
