"""The two sockets on which one rank of a vLLM publishes its KV events and repeats them. Bytes only.

Where vLLM's publisher binds we connect, and the other way round: it binds addresses with a wildcard and those of ipc,
and connects to all others. Its replay socket always binds.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any

import zmq
import zmq.asyncio

from adaptersync_core.errors import EngineUnavailable
from adaptersync_core.vllm import KvSource

REPLAY_S = 5.0  # for the next batch of a replay; vLLM answers between two steps
BIND_S = 2.0  # for which an address may still be that of the socket of the life before
QUEUED = 10_000  # messages that wait for us; what does not fit is a hole, and holes are filled
END = (-1).to_bytes(8, "big", signed=True)

Message = tuple[int, bytes]  # sequence number and batch


class Line:
    """A context manager. `host` is where the engine is, for addresses with a wildcard."""

    def __init__(self, context: zmq.asyncio.Context, source: KvSource, *, host: str) -> None:
        self._context = context
        self._endpoint = source.endpoint.replace("*", host)
        self._connects = "*" in source.endpoint or "::" in source.endpoint or not source.endpoint.startswith("tcp:")
        self._replay_endpoint = (source.replay_endpoint or "").replace("*", host)
        self._live: Any = None  # zmq's sockets are untyped
        self._replay: Any = None

    async def __aenter__(self) -> Line:
        self._live = self._context.socket(zmq.SUB)
        self._live.setsockopt(zmq.LINGER, 0)
        self._live.setsockopt(zmq.RCVHWM, QUEUED)
        self._live.setsockopt(zmq.SUBSCRIBE, b"")
        try:
            if self._connects:
                self._live.connect(self._endpoint)
            else:
                await self._bind()
        except BaseException:
            self._live.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.close()
        self._hang_up()

    @property
    def replays(self) -> bool:
        return bool(self._replay_endpoint)

    async def receive(self, *, timeout_s: float) -> Message | None:
        """The next message, None when there is none in time; EngineUnavailable for one that is no vLLM's."""
        if not await self._live.poll(timeout_s * 1000):
            return None
        return _message(await self._live.recv_multipart())

    async def replay(self, start: int) -> AsyncGenerator[Message, None]:
        """What the engine still has from `start` on, oldest first. EngineUnavailable when it does not answer."""
        if self._replay is None:
            self._replay = self._context.socket(zmq.DEALER)  # a REQ would take one answer only
            self._replay.setsockopt(zmq.LINGER, 0)
            self._replay.setsockopt(zmq.RCVHWM, 0)  # else what we are slow to take is dropped; it has an end
            self._replay.connect(self._replay_endpoint)
        complete = False
        try:
            await self._replay.send_multipart((b"", start.to_bytes(8, "big")))
            while True:
                if not await self._replay.poll(REPLAY_S * 1000):
                    raise EngineUnavailable("engine does not repeat its KV events", endpoint=self._replay_endpoint)
                frames = await self._replay.recv_multipart()
                if len(frames) == 4 and frames[2] == END:
                    complete = True
                    return
                yield _message(frames[1:])
        finally:
            if not complete:
                self._hang_up()  # the rest would be taken for the answer to the next question

    async def _bind(self) -> None:
        until = time.monotonic() + BIND_S
        while True:
            try:
                self._live.bind(self._endpoint)
                return
            except zmq.ZMQError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                if time.monotonic() > until:
                    self._live.connect(self._endpoint)  # vLLM did bind: it tells a wildcard port as what became of it
                    return
            await asyncio.sleep(0.1)

    def _hang_up(self) -> None:
        if self._replay is not None:
            self._replay.close()
            self._replay = None


def _message(frames: list[bytes]) -> Message:
    if len(frames) != 3 or len(frames[1]) != 8:
        raise EngineUnavailable(f"no KV event: {len(frames)} frames")
    return int.from_bytes(frames[1], "big"), frames[2]
