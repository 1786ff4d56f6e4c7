"""vLLM's KV-event publisher: a PUB socket, a replay ROUTER, sequence numbers from 0 for each process.

Like vLLM's, the PUB socket binds only if its endpoint holds `*` or `::` or is ipc or inproc, and connects
otherwise; the replay socket always binds. `tcp://*:0` binds loopback; vLLM takes the node's address.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from adaptersync_tools.simulator import kv_wire

_END = (-1).to_bytes(8, "big", signed=True)


class PublisherConfig(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's `--kv-events-config`, field for field; also what `/kv_event_sources` returns."""

    enable_kv_cache_events: bool = True
    publisher: str = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""


class Publisher:
    """Sends one rank's batches as they come; `drop` makes the next ones reach only the replay buffer."""

    def __init__(self, config: PublisherConfig, rank: int = 0) -> None:
        import zmq
        import zmq.asyncio

        self.drop = 0
        self._rank = rank
        self._topic = config.topic.encode()
        self._sequence = itertools.count()
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.LINGER, 0)
        self._pub.set_hwm(config.hwm)
        endpoint = _of_rank(config.endpoint, rank)
        if "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://")):
            endpoint = _bind(self._pub, endpoint)
        else:
            self._pub.connect(endpoint)
        self._replay: Any = None  # zmq's sockets are untyped
        self._serving: asyncio.Task[None] | None = None
        replay_endpoint = config.replay_endpoint
        if replay_endpoint is not None:
            replay_endpoint = _of_rank(replay_endpoint, rank)
            self._replay = zmq.asyncio.Context.shadow(self._context).socket(zmq.ROUTER)
            self._replay.setsockopt(zmq.LINGER, 0)
            replay_endpoint = _bind(self._replay, replay_endpoint)
            self._serving = asyncio.create_task(self._serve_replays(), name="kv-replay")
        self.config = msgspec.structs.replace(config, endpoint=endpoint, replay_endpoint=replay_endpoint)

    def publish(self, events: Sequence[kv_wire.KVEvent]) -> None:
        sequence = next(self._sequence).to_bytes(8, "big")
        batch = kv_wire.KVEventBatch(ts=time.time(), events=list(events), data_parallel_rank=self._rank)
        payload = kv_wire.encode(batch)
        self._buffer.append((sequence, payload))
        if self.drop > 0:
            self.drop -= 1
            return
        self._pub.send_multipart((self._topic, sequence, payload))

    async def close(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
            self._replay.close()
        self._pub.close()
        self._context.term()

    async def _serve_replays(self) -> None:
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) != 3:
                continue
            client, _, start = frames
            for sequence, payload in list(self._buffer):
                if sequence >= start.rjust(8, b"\0"):
                    await self._replay.send_multipart((client, b"", self._topic, sequence, payload))
            await self._replay.send_multipart((client, b"", b"", _END, b""))


def _of_rank(endpoint: str, rank: int) -> str:
    """Each rank has the port of the one before and one more; a port that is free anyway stays so."""
    if rank == 0:
        return endpoint
    address, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp:"):
        raise ValueError("KV events of several ranks need tcp endpoints")
    return f"{address}:{int(port) + rank}" if port != "0" else endpoint


def _bind(socket: Any, endpoint: str) -> str:
    import zmq

    if endpoint != "tcp://*:0":
        socket.bind(endpoint)
        return endpoint
    socket.bind("tcp://127.0.0.1:0")
    return str(socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0"))
