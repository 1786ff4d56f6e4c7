"""The only module that imports the Redis client.

Two profiles. A *command* client answers within seconds and never repeats a write by itself: a lost reply is resolved
by calling again a script that is idempotent. A *blocking* client waits for stream entries on a connection of its own,
for longer than the server does. Replies are text, protocol RESP2, so that both server families and both client
generations answer in the same shapes.

How long a call may take is bounded here and not by the client's socket timeout: it then writes under `wait_for`, which
before Python 3.12 loses a cancellation that meets a finished write, and whoever stops would wait for the reply.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from typing import Any, TypeVar

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
)

from adaptersync_core.address import Credentials, credentials, where, without_credentials
from adaptersync_core.errors import ControlError, ControlUnavailable
from adaptersync_core.scripts import Script

COMMAND_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 3.0
POOL_LIMIT = 32  # connections of one process to one server
PASSING = ("MISCONF", "NOREPLICAS", "MASTERDOWN", "TRYAGAIN", "BUSY")  # refusals that end without anybody's doing

T = TypeVar("T")
Argument = str | bytes | int | float
Entry = tuple[str, dict[str, str]]


class _Provider(CredentialProvider):
    """Asked for each connection."""

    def __init__(self, known: Credentials) -> None:
        self._known = known

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self._known.password()
        return (self._known.user, password) if self._known.user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return await asyncio.to_thread(self.get_credentials) if self._known.file else self.get_credentials()


def _provider(url: str) -> _Provider | None:
    known = credentials(url)
    return _Provider(known) if known != Credentials() else None


class RedisClient:
    """One server, one profile. Every failure to reach it is ControlUnavailable; what it refuses is ControlError."""

    def __init__(self, url: str, *, name: str, timeout_s: float = COMMAND_TIMEOUT_S, text: bool = True) -> None:
        """`timeout_s` is for one call as a whole. `text` False: replies are bytes."""
        self.url = url
        self._timeout_s = timeout_s
        # the generic call answers in one shape in every version of the client; it is untyped there
        self._client: Any = redis.asyncio.Redis.from_url(
            without_credentials(url),
            credential_provider=_provider(url),
            client_name=name,
            decode_responses=text,
            encoding_errors="backslashreplace",  # a foreign byte is garbage to be left out, not the end of a service
            protocol=2,
            max_connections=POOL_LIMIT,
            retry=Retry(NoBackoff(), 0),
            socket_connect_timeout=min(CONNECT_TIMEOUT_S, timeout_s),
            socket_keepalive=True,
            socket_timeout=None,
        )

    @classmethod
    def blocking(cls, url: str, *, name: str, block_s: float) -> RedisClient:
        """A client for calls that wait on the server for up to `block_s` seconds."""
        return cls(url, name=name, timeout_s=block_s + COMMAND_TIMEOUT_S)

    @contextlib.asynccontextmanager
    async def _asking(self) -> AsyncIterator[None]:
        with translated(self.url):
            async with asyncio.timeout(self._timeout_s):
                yield

    async def command(self, *arguments: Argument) -> Any:
        async with self._asking():
            return await self._client.execute_command(*arguments)

    async def pipeline(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """Several reads in one round trip, in one transaction; replies in order."""
        if not commands:
            return []
        async with self._asking(), self._client.pipeline(transaction=True) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            replies: list[Any] = await pipe.execute()
            return replies

    async def script(self, script: Script, keys: Sequence[str], arguments: Sequence[Argument]) -> Any:
        async with self._asking():
            try:
                return await self._client.execute_command("EVALSHA", script.sha, len(keys), *keys, *arguments)
            except NoScriptError:
                return await self._client.execute_command("EVAL", script.source, len(keys), *keys, *arguments)

    async def read_stream(self, key: str, after: str, *, count: int = 256, block_s: float | None = None) -> list[Entry]:
        """Entries later than `after`, oldest first; waits up to `block_s` for the first one."""
        block = () if block_s is None else ("BLOCK", max(1, int(block_s * 1000)))
        reply = await self.command("XREAD", "COUNT", count, *block, "STREAMS", key, after)
        return [(entry_id, fields or {}) for _, entries in reply or [] for entry_id, fields in entries]

    async def close(self) -> None:
        await self._client.aclose()


async def unless_refused(asked: Awaitable[T], otherwise: T) -> T:
    """What was asked, or `otherwise` where the server refuses it: for what not everybody may see."""
    try:
        return await asked
    except ControlUnavailable:
        raise
    except ControlError:
        return otherwise


def rq_connection(url: str) -> redis.Redis:
    """The client rq wants: synchronous, replies in bytes. A worker lengthens the timeout for its own waiting."""
    return redis.Redis.from_url(
        without_credentials(url),
        credential_provider=_provider(url),
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_timeout=COMMAND_TIMEOUT_S,
        socket_keepalive=True,
    )


@contextlib.contextmanager
def translated(url: str) -> Iterator[None]:
    """Turn what the client raises into our errors."""
    try:
        yield
    except (RedisError, OSError) as error:
        raise _ours(error, where(url)) from error


def _ours(error: RedisError | OSError, server: str) -> ControlError:
    if isinstance(error, AuthenticationError | NoPermissionError):
        return ControlError(
            f"Redis refused: {error}", next_step="check user and password of this service", redis=server
        )
    if isinstance(error, OSError | redis.exceptions.ConnectionError | redis.exceptions.TimeoutError):
        reason = str(error) or "no answer in time"
        return ControlUnavailable(f"Redis cannot be reached: {reason}", next_step="check the server", redis=server)
    if isinstance(error, OutOfMemoryError | ReadOnlyError) or str(error).startswith(PASSING):
        return ControlUnavailable(f"Redis cannot answer now: {error}", next_step="check the server", redis=server)
    return ControlError.refused(str(error), redis=server)
