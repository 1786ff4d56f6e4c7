"""A replica that costs almost nothing, so that what is measured is the router.

It answers a completion after a given time, and counts: requests, those whose whole prompt the same adapter was asked
for before (warm; nothing is evicted), and how many are in flight. Knows vLLM's and SGLang's paths as far as routers
use them, and no engine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys

import httptools
import msgspec
from msgspec import Raw, Struct

HOST = "127.0.0.1"
BASE = "base"
ABOUT = {"model_path": BASE, "model_id": BASE, "served_model_name": BASE, "is_generation": True, "tp_size": 1}


class Completion(Struct, frozen=True):
    """A request by vLLM's names."""

    model: str
    prompt: Raw


class Generation(Struct, frozen=True, rename={"model": "lora_path", "prompt": "input_ids"}):
    """A request by SGLang's names."""

    model: str
    prompt: Raw


class Adapter(Struct, frozen=True):
    lora_name: str


class Counts(Struct):
    """Since the start or the last reset; `inflight` is of now."""

    requests: int = 0
    warm: int = 0
    unknown: int = 0
    inflight: int = 0
    largest: int = 0


class Replica:
    """`strict`: an adapter that was not loaded is answered 404, as vLLM does."""

    def __init__(self, name: str, *, delay_s: float, jitter: float, strict: bool) -> None:
        self._delay_s = delay_s
        self._jitter = jitter
        self._strict = strict
        self._completion = msgspec.json.Decoder(Completion)
        self._generation = msgspec.json.Decoder(Generation)
        self._loaded = {BASE}
        self._seen: set[tuple[str, bytes]] = set()
        self._chance = random.Random(name)  # noqa: S311 (a load, no secret)
        self.counts = Counts()
        answer = {
            "id": "cmpl",
            "object": "text_completion",
            "created": 0,
            "model": BASE,
            "system_fingerprint": name,
            "choices": [{"index": 0, "text": "ok", "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 135, "completion_tokens": 3, "total_tokens": 138},
        }
        self._answer = response(answer)

    def handle(self, path: bytes, body: bytes, connection: Connection) -> None:
        match path:
            case b"/v1/completions":
                self._generate(self._completion.decode(body), connection)
            case b"/generate":
                self._generate(self._generation.decode(body), connection)
            case _:
                connection.write(self._other(path, body))

    def _generate(self, asked: Completion | Generation, connection: Connection) -> None:
        counts = self.counts
        counts.requests += 1
        model = asked.model
        if self._strict and model not in self._loaded:
            counts.unknown += 1
            said = f"The model `{model}` does not exist."
            error = {"message": said, "type": "NotFoundError", "param": "model", "code": 404}
            connection.write(response({"error": error}, b"404 Not Found"))
            return
        prompt = (model, bytes(asked.prompt))
        if prompt in self._seen:
            counts.warm += 1
        else:
            self._seen.add(prompt)
        if not self._delay_s:
            connection.write(self._answer)
            return
        counts.inflight += 1
        counts.largest = max(counts.largest, counts.inflight)
        delay_s = self._delay_s * self._chance.uniform(1 - self._jitter, 1 + self._jitter)
        asyncio.get_running_loop().call_later(delay_s, self._done, connection)

    def _done(self, connection: Connection) -> None:
        self.counts.inflight -= 1
        connection.write(self._answer)

    def _other(self, path: bytes, body: bytes) -> bytes:
        match path:
            case b"/counts":
                return response(self.counts)
            case b"/reset":
                now = self.counts.inflight
                self.counts = Counts(inflight=now, largest=now)
                self._seen.clear()
            case b"/v1/load_lora_adapter":
                self._loaded.add(msgspec.json.decode(body, type=Adapter).lora_name)
            case b"/v1/models":
                models = [{"id": name, "object": "model", "owned_by": "bench"} for name in sorted(self._loaded)]
                return response({"object": "list", "data": models})
            case b"/server_info" | b"/get_server_info" | b"/model_info" | b"/get_model_info":
                return response(ABOUT)
        return response({"status": "ok"})


class Connection(asyncio.Protocol):
    """One client's. What is no HTTP/1 (a router may look whether we speak gRPC) ends it."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._body = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport  # a stream's, though uvloop's is no asyncio.Transport

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if self._transport is not None:
                self._transport.close()

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        path, body = self._path, self._body
        self._path = self._body = b""
        try:
            self._replica.handle(path.partition(b"?")[0], body, self)
        except msgspec.MsgspecError as error:
            self.write(response({"error": {"message": f"{error}, of {body[:200]!r}"}}, b"400 Bad Request"))

    def write(self, answer: bytes) -> None:
        if self._transport is not None:
            self._transport.write(answer)


def response(body: object, status: bytes = b"200 OK") -> bytes:
    text = msgspec.json.encode(body)
    head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(text)) + text


async def serve(replica: Replica, port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(replica), HOST, port, backlog=2048)
    await server.serve_forever()


def main(arguments: list[str] | None = None) -> int:
    import uvloop

    parser = argparse.ArgumentParser(prog="python -m adaptersync_tools.bench.routers.replica", description=__doc__)
    parser.add_argument("--name", required=True, help="how its answers are told from others'")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--delay-s", type=float, default=0.0, help="what an answer takes, in the mean")
    parser.add_argument("--jitter", type=float, default=0.0, help="part of it by which an answer is early or late")
    parser.add_argument("--strict", action="store_true", help="404 for adapters that were not loaded")
    options = parser.parse_args(arguments)
    replica = Replica(options.name, delay_s=options.delay_s, jitter=options.jitter, strict=options.strict)
    uvloop.run(serve(replica, options.port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
