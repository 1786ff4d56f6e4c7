"""A replica whose every byte a test decides: an HTTP server in the test's own loop.

For what the simulator does not do on command: an answer that waits for the test, a connection cut between two chunks.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

MAX_MODEL_LEN = 512


@dataclass
class Seen:
    """One request as it arrived."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)


@dataclass
class Upstream:
    """`holds` are the names it knows (None: all). `gate` lets answers go, `chunk_gate` one streamed chunk each time.

    `fail` are statuses of its next answers, which say `retry_after`; so often `no_models` are listed.
    """

    name: str
    url: str = ""
    holds: set[str] | None = None
    fail: list[int] = field(default_factory=list)
    retry_after: str = ""
    cut_after: int | None = None
    chunks: list[bytes] = field(default_factory=lambda: [b"data: one\n\n", b"data: two\n\n", b"data: [DONE]\n\n"])
    answer: Callable[[Any], bytes] | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    chunk_gate: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1000))
    seen: list[Seen] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)  # as keys, by who asked for its models
    no_models: int = 0
    in_flight: int = 0
    largest: int = 0
    aborted: int = 0
    runner: web.AppRunner | None = None

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.seen.append(Seen(request.path, {k.lower(): v for k, v in request.headers.items()}, body))
        asked = orjson.loads(body)
        if self.fail:
            status = self.fail.pop(0)
            headers = {"Retry-After": self.retry_after} if self.retry_after else {}
            if status in (200, 204):
                return web.Response(status=status)
            if status == 302:
                headers["Location"] = "/login"
            said = {"error": {"message": "EngineCore encountered an issue"}}
            return web.json_response(said, status=status, headers=headers)
        model = asked.get("model", "base")
        if self.holds is not None and model not in self.holds:
            message = f"The model `{model}` does not exist."
            error = {"error": {"message": message, "type": "NotFoundError", "param": "model", "code": 404}}
            return web.json_response(error, status=404)
        self.in_flight += 1
        self.largest = max(self.largest, self.in_flight)
        try:
            await self.gate.wait()
            if asked.get("stream"):
                return await self._stream(request)
            return web.Response(body=(self.answer or _completion)(asked), content_type="application/json")
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.in_flight -= 1

    async def models(self, request: web.Request) -> web.Response:
        self.shown.append(request.headers.get("Authorization", ""))
        if self.no_models:
            self.no_models -= 1
            return web.json_response({"error": {"message": "no replica is ready"}}, status=503)
        card = {"id": "base", "object": "model", "parent": None, "max_model_len": MAX_MODEL_LEN}
        return web.json_response({"object": "list", "data": [card]})

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for place, chunk in enumerate(self.chunks):
            await self.chunk_gate.acquire()
            if place == self.cut_after:
                assert request.transport is not None
                request.transport.close()
                return response
            await response.write(chunk)
        return response


@contextlib.asynccontextmanager
async def upstream(name: str, tls: ssl.SSLContext | None = None) -> AsyncIterator[Upstream]:
    """A replica that answers at once until a test says otherwise."""
    replica = Upstream(name)
    replica.gate.set()
    app = web.Application(client_max_size=64 << 20)
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        app.router.add_post(path, replica.generate)
    app.router.add_get("/v1/models", replica.models)
    replica.runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await replica.runner.setup()
    site = web.TCPSite(replica.runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    host, port = replica.runner.addresses[0][:2]
    replica.url = f"{'https' if tls else 'http'}://{host}:{port}"
    try:
        yield replica
    finally:
        replica.gate.set()
        await replica.stop()


def _completion(asked: Any) -> bytes:
    choice = {"index": 0, "text": "4", "token_ids": [7], "finish_reason": "stop"}
    usage = {
        "prompt_tokens": 20,
        "total_tokens": 21,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    return orjson.dumps({"id": "cmpl-1", "model": asked.get("model"), "choices": [choice], "usage": usage})
