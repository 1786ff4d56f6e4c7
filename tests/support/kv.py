"""A listener to an engine's KV events, and a client of its replay: what an agent does, without its cleverness."""

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import msgspec
import zmq

_WAIT_S = 10.0
_END = (-1).to_bytes(8, "big", signed=True)


@dataclass(frozen=True)
class Batch:
    sequence: int
    payload: bytes

    @property
    def decoded(self) -> Any:
        """[ts, events, data_parallel_rank], each event a map."""
        return msgspec.msgpack.decode(self.payload)

    @property
    def events(self) -> list[dict[str, Any]]:
        return list(self.decoded[1])


class Listener:
    def __init__(self, context: zmq.Context[Any], endpoint: str, replay_endpoint: str) -> None:
        self._context = context
        self._replay_endpoint = replay_endpoint
        self._socket = context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)

    def until(self, enough: Callable[[list[dict[str, Any]]], bool]) -> list[Batch]:
        """Batches from now on, until the events in them are enough; fails after a while."""
        batches: list[Batch] = []
        deadline = time.monotonic() + _WAIT_S
        while not enough([event for batch in batches for event in batch.events]):
            left = deadline - time.monotonic()
            assert left > 0, f"only {[batch.events for batch in batches]} within {_WAIT_S} s"
            if self._socket.poll(left * 1000):
                _, sequence, payload = self._socket.recv_multipart()
                batches.append(Batch(int.from_bytes(sequence, "big"), payload))
        return batches

    def discard(self, quiet_s: float = 0.3) -> None:
        """Drop what earlier requests caused: everything until the engine has been quiet for a while."""
        while self._socket.poll(quiet_s * 1000):
            self._socket.recv_multipart()

    def pending(self, within_s: float) -> bool:
        """Whether a batch arrives within so long; it is not taken."""
        return bool(self._socket.poll(within_s * 1000))

    def replay(self, start: int) -> list[Batch]:
        """What the replay endpoint has from `start` on. It needs a DEALER: a REQ takes one reply only."""
        batches: list[Batch] = []
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(self._replay_endpoint)
            dealer.send_multipart((b"", start.to_bytes(8, "big")))
            while True:
                assert dealer.poll(_WAIT_S * 1000), "no reply to a replay request"
                _, _, sequence, payload = dealer.recv_multipart()
                if sequence == _END:
                    return batches
                batches.append(Batch(int.from_bytes(sequence, "big"), payload))

    def close(self) -> None:
        self._socket.close(linger=0)


@contextmanager
def listening(endpoint: str, replay_endpoint: str) -> Iterator[Listener]:
    context: zmq.Context[Any] = zmq.Context()
    listener = Listener(context, endpoint, replay_endpoint)
    try:
        yield listener
    finally:
        listener.close()
        context.term()


def chain(
    tokens: Sequence[int], block_size: int, *, lora: tuple[str, str] | None = None, salt: str | None = None
) -> list[int]:
    """vLLM's block hashes as its events carry them, from its documented recipe. `lora` is (name, path)."""

    def digest(value: object) -> bytes:
        return sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()

    hashes: list[int] = []
    parent = digest("vllm-none-hash")
    for start in range(0, len(tokens) - block_size + 1, block_size):
        extra: list[tuple[str, ...]] = []
        if lora is not None:
            extra.append(("lora", *lora))
        if salt is not None and start == 0:
            extra.append(("cache_salt", salt))
        parent = digest((parent, tuple(tokens[start : start + block_size]), tuple(extra) or None))
        hashes.append(int.from_bytes(parent[-8:], "big"))
    return hashes
