"""vLLM's HTTP surface over a simulated engine, with an admin route for faults and one that counts calls.

Routes, statuses and bodies are vLLM 0.32's, dev mode on; a route vLLM has and this lacks is a plain 404.
"""

import asyncio
import os
import secrets
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from adaptersync.engine import door
from adaptersync_tools.simulator import answers, metrics, requests, workers
from adaptersync_tools.simulator.engine import EngineConfig, Running
from adaptersync_tools.simulator.errors import EngineDead, Refused, invalid_body
from adaptersync_tools.simulator.faults import Faults
from adaptersync_tools.simulator.publisher import PublisherConfig
from adaptersync_tools.simulator.ranks import Ranks
from adaptersync_tools.simulator.requests import Call, ChatBody, CompletionBody, decode_body
from adaptersync_tools.simulator.scheduler import Job, Latency
from adaptersync_tools.simulator.store import Mount
from adaptersync_tools.simulator.tokenizer import ByteTokenizer, Tokenizer

VLLM_VERSION = "0.32.0"
_MAX_BODY = 64 * 1024 * 1024
_RANK_HEADER = "X-data-parallel-rank"
_TOKEN_HEADER = door.TOKEN_HEADER.decode()
_encode = msgspec.json.Encoder().encode


class LoadBody(msgspec.Struct, frozen=True, kw_only=True):
    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadBody(msgspec.Struct, frozen=True, kw_only=True):
    lora_name: str


class AdapterBody(msgspec.Struct, frozen=True, kw_only=True):
    """SageMaker's names for the same thing."""

    name: str
    src: str


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = False


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[int]


class AbortBody(msgspec.Struct, frozen=True, kw_only=True):
    request_ids: list[str] | None = None


class SimulatorConfig(msgspec.Struct, frozen=True, kw_only=True):
    engine: EngineConfig = EngineConfig()
    latency: Latency = Latency()
    kv_events: PublisherConfig | None = None
    ranks: int = 1  # vLLM's --data-parallel-size: engines behind this one server
    dev_mode: bool = True
    token_file: Path | None = None  # with it, our door stands before the server
    worker_extension_cls: str = ""  # vLLM's flag; of classes only our auditor is known
    request_id_headers: bool = False  # vLLM's --enable-request-id-headers
    death_grace_s: float = 0.5  # from the engine's death to the end of the process; vLLM takes up to 5 s
    mount: Mount | None = None  # where it reads adapters, if that is not to be the file system as it is


class Simulator:
    """One simulated replica. `app` is to be served by whoever made it; its scheduler's `dead` is set when it should
    exit. `engine`, `scheduler` and `publisher` are its first rank's."""

    def __init__(self, config: SimulatorConfig, tokenizer: Tokenizer | None = None) -> None:
        self.config = config
        self.tokenizer = tokenizer or ByteTokenizer()
        self.faults = Faults()
        self.calls: Counter[str] = Counter()
        self.ranks = Ranks(config.ranks, config.engine, config.latency, mount=config.mount, kv_events=config.kv_events)
        self.engine, self.scheduler = self.ranks.engines[0], self.ranks.schedulers[0]
        self.publisher = self.ranks.publishers[0] if self.ranks.publishers else None
        self.started_at = time.time()
        self.life = secrets.token_hex(8)
        self.app = self._application()

    async def close(self) -> None:
        await self.ranks.close()

    def set_faults(self, change: dict[str, Any]) -> Faults:
        """Change the named faults; raises msgspec.ValidationError for one that does not exist or fit."""
        known = msgspec.structs.asdict(self.faults)
        if unknown := change.keys() - known.keys():
            raise msgspec.ValidationError(f"unknown fault: {', '.join(sorted(unknown))}")
        self.faults = msgspec.convert(known | change, Faults)
        self.ranks.set_faults(self.faults, drop_kv_batches="drop_kv_batches" in change)
        return self.faults

    def _application(self) -> web.Application:
        app = web.Application(middlewares=[self._door, self._answer_refusals], client_max_size=_MAX_BODY)
        add = app.router.add_route
        for path in ("/health", "/ping"):
            add("GET", path, self._health)
        add("POST", "/ping", self._health)
        add("GET", "/version", self._version)
        add("GET", "/load", self._server_load)
        add("GET", "/metrics", self._metrics)
        add("GET", "/kv_event_sources", self._kv_event_sources)
        add("GET", "/v1/models", self._models)
        add("POST", "/v1/completions", self._completions)
        add("POST", "/v1/chat/completions", self._chat)
        add("POST", "/tokenize", self._tokenize)
        add("POST", "/detokenize", self._detokenize)
        add("POST", "/v1/load_lora_adapter", self._load_adapter)
        add("POST", "/v1/unload_lora_adapter", self._unload_adapter)
        add("POST", "/adapters", self._register_adapter)
        add("DELETE", "/adapters/{name}", self._unregister_adapter)
        add("GET", "/simulator/faults", self._get_faults)
        add("POST", "/simulator/faults", self._post_faults)
        add("GET", "/simulator/calls", self._get_calls)
        if self.config.token_file is not None:
            add("*", door.IDENTITY, self._identity)
        if self.config.dev_mode:
            add("POST", "/pause", self._pause)
            add("POST", "/resume", self._resume)
            add("GET", "/is_paused", self._is_paused)
            add("POST", "/abort_requests", self._abort)
            add("GET", "/server_info", self._server_info)
            add("POST", "/collective_rpc", self._collective_rpc)
            add("POST", "/reset_prefix_cache", self._reset_prefix_cache)
        # So that `.get` finds every path this serves, called or not.
        self.calls.update({path: 0 for path in (r.canonical for r in app.router.resources()) if path})
        return app

    @web.middleware
    async def _door(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """`adaptersync.engine.door`, but that the simulator's own routes stay open: a real server has none."""
        file, path = self.config.token_file, request.path
        if file is None or (request.method, path) in door.OPEN or path.startswith("/simulator/"):
            return await handler(request)
        shown = [value.encode(errors="surrogateescape") for value in request.headers.getall(_TOKEN_HEADER, ())]
        if not door.shows_token(shown, file):
            return _json(door.REFUSAL, HTTPStatus.FORBIDDEN)
        return await handler(request)

    @web.middleware
    async def _answer_refusals(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        resource = request.match_info.route.resource
        self.calls[resource.canonical if resource is not None else "unmatched"] += 1
        try:
            response = await handler(request)
        except Refused as refusal:
            response = _json(refusal.body(), refusal.status)
        except EngineDead as death:
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            response = _json(Refused(status, "InternalServerError", str(death)).body(), status)
        except web.HTTPException as error:
            response = _json({"detail": error.reason}, error.status)
        if self.config.request_id_headers and not response.prepared:
            response.headers["X-Request-Id"] = _request_id(request)
        return response

    async def _health(self, request: web.Request) -> web.Response:
        dead = self.scheduler.dead.is_set()
        return web.Response(status=HTTPStatus.SERVICE_UNAVAILABLE if dead else HTTPStatus.OK)

    async def _version(self, request: web.Request) -> web.Response:
        return _json({"version": VLLM_VERSION})

    async def _server_load(self, request: web.Request) -> web.Response:
        return _json({"server_load": 0})

    async def _metrics(self, request: web.Request) -> web.Response:
        text = metrics.render(self.ranks.schedulers, started_at=self.started_at)
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=1.0.0; charset=utf-8"})

    async def _kv_event_sources(self, request: web.Request) -> web.Response:
        return _json({str(rank): msgspec.to_builtins(each.config) for rank, each in enumerate(self.ranks.publishers)})

    async def _models(self, request: web.Request) -> web.Response:
        now, config = int(time.time()), self.engine.config
        cards = [answers.model_card(config.model, config.root, None, config.max_model_len, now)]
        cards += [
            answers.model_card(lora.name, lora.path, config.model, None, now) for lora in self.engine.registry.listed()
        ]
        return _json({"object": "list", "data": cards})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        body = decode_body(await request.read(), request.headers.get("Content-Type", ""), LoadBody)
        return _text(await self._load(body.lora_name, body.lora_path, inplace=body.load_inplace))

    async def _register_adapter(self, request: web.Request) -> web.Response:
        body = decode_body(await request.read(), "application/json", AdapterBody)
        await self._load(body.name, body.src, inplace=False)
        return _text(f"Adapter {body.name} registered")

    async def _load(self, name: str, path: str, *, inplace: bool) -> str:
        # A load goes on when its client has gone: vLLM does not cancel it either.
        load = asyncio.ensure_future(
            self.ranks.load(
                name, path, inplace=inplace, delay_s=self.faults.delay_load_s, failure=self._ordered_failure()
            )
        )
        await asyncio.shield(load)
        return f"Success: LoRA adapter '{name}' added successfully."

    def _ordered_failure(self) -> Refused | None:
        if self.faults.fail_loads <= 0:
            return None
        self.faults.fail_loads -= 1
        status = self.faults.fail_load_status
        kind = "NotFoundError" if status == HTTPStatus.NOT_FOUND else "InternalServerError"
        return Refused(status, kind, "Call to add_lora method failed: ordered by /simulator/faults")

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        body = decode_body(await request.read(), request.headers.get("Content-Type", ""), UnloadBody)
        self.ranks.unload(body.lora_name)
        return _text(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def _unregister_adapter(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        self.ranks.unload(name)
        return _text(f"Adapter {name} unregistered")

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = decode_body(await request.read(), request.headers.get("Content-Type", ""), CompletionBody)
        call = requests.completion_call(
            body,
            self.engine,
            self.tokenizer,
            call_id=f"cmpl-{_request_id(request)}",
            created=int(time.time()),
        )
        return await self._generate(request, call)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = decode_body(await request.read(), request.headers.get("Content-Type", ""), ChatBody)
        call = requests.chat_call(
            body,
            self.engine,
            self.tokenizer,
            call_id=f"chatcmpl-{_request_id(request)}",
            created=int(time.time()),
        )
        return await self._generate(request, call)

    async def _generate(self, request: web.Request, call: Call) -> web.StreamResponse:
        jobs = [Job(part, call.id) for part in call.requests]
        if call.stream:
            return await self._stream(request, call, jobs)
        rank = self.ranks.asked(request.headers.get(_RANK_HEADER))
        if len(jobs) == 1:
            await self._complete(jobs[0], rank)
        else:
            async with _group() as group:
                for job in jobs:
                    group.create_task(self._complete(job, rank))
        runs = [_started(job) for job in jobs]
        said, reasons = [job.said for job in jobs], [job.finish_reason for job in jobs]
        return _json(answers.answer(call, runs, said, reasons, self.tokenizer))

    async def _complete(self, job: Job, rank: int | None) -> None:
        async with aclosing(self.ranks.chosen(rank).run(job, stream=False)) as progress:
            async for _ in progress:
                pass

    async def _stream(self, request: web.Request, call: Call, jobs: list[Job]) -> web.StreamResponse:
        if self.scheduler.dead.is_set():
            raise EngineDead
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        if self.config.request_id_headers:
            response.headers["X-Request-Id"] = _request_id(request)
        await response.prepare(request)
        try:
            rank = self.ranks.asked(request.headers.get(_RANK_HEADER))
            async with _group() as group:
                for index, job in enumerate(jobs):
                    group.create_task(self._stream_choice(response, call, index, job, rank))
            if call.include_usage:
                runs, said = [_started(job) for job in jobs], [job.said for job in jobs]
                await _event(response, answers.usage_chunk(call, runs, said))
        except EngineDead as death:
            await _event(response, Refused(500, "InternalServerError", str(death)).body())
        except Refused as refusal:
            await _event(response, refusal.body())
        except ConnectionResetError:  # the client has gone, and what it asked for is aborted
            return response
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _stream_choice(
        self, response: web.StreamResponse, call: Call, index: int, job: Job, rank: int | None
    ) -> None:
        sent = 0
        async with aclosing(self.ranks.chosen(rank).run(job, stream=True)) as progress:
            async for said in progress:
                run = _started(job)
                if sent == 0:
                    for chunk in answers.first_chunks(call, index, run):
                        await _event(response, chunk)
                finished = said == len(run.spoken.tokens)
                reason = job.finish_reason if finished else None
                await _event(response, answers.token_chunk(call, index, run, sent, said, reason, self.tokenizer))
                sent = said
        if job.aborted and (run := _started(job)) and (sent < len(run.spoken.tokens) or sent == 0):
            await _event(response, answers.token_chunk(call, index, run, sent, sent, "abort", self.tokenizer))

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = decode_body(await request.read(), request.headers.get("Content-Type", ""), TokenizeBody)
        self.engine.registry.resolve(body.model)
        if body.messages is not None:
            tokens = self.tokenizer.chat(body.messages)
        elif body.prompt is not None:
            tokens = self.tokenizer.encode(body.prompt)
        else:
            raise invalid_body("{'type': 'missing', 'loc': 'body.prompt'}", "body.prompt")
        texts = [self.tokenizer.decode([token]) for token in tokens] if body.return_token_strs else None
        return _json(
            {
                "count": len(tokens),
                "max_model_len": self.engine.config.max_model_len,
                "tokens": tokens,
                "token_strs": texts,
            }
        )

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = decode_body(await request.read(), request.headers.get("Content-Type", ""), DetokenizeBody)
        self.engine.registry.resolve(body.model)
        return _json({"prompt": self.tokenizer.decode(body.tokens)})

    async def _pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            raise invalid_body("{'type': 'literal_error', 'loc': 'query.mode'}", "query.mode")
        clear = request.query.get("clear_cache", "true").lower() in ("1", "true", "yes", "on")
        await self.ranks.pause(mode, clear_cache=clear)
        return _json({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        await self.ranks.resume()
        return _json({"status": "resumed"})

    async def _is_paused(self, request: web.Request) -> web.Response:
        await self.scheduler.engine_reached()
        return _json({"is_paused": self.scheduler.paused})

    async def _abort(self, request: web.Request) -> web.Response:
        body = decode_body(await request.read() or b"{}", "application/json", AbortBody)
        return _json({"status": "aborted", "aborted": self.ranks.abort(body.request_ids or None)})

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        await self.scheduler.engine_reached()
        return _json({"success": self.ranks.reset()})

    async def _collective_rpc(self, request: web.Request) -> web.Response:
        body = decode_body(await request.read(), "application/json", workers.Call)
        if body.method is None:
            raise Refused(400, "Bad Request", "Missing 'method' in request body")
        await self.scheduler.engine_reached()
        return _json({"results": self.ranks.call(body, extension=self.config.worker_extension_cls)})

    async def _identity(self, request: web.Request) -> web.Response:
        adapters = {lora.name: {"number": lora.int_id, "path": lora.path} for lora in self.engine.registry.listed()}
        return _json({"life": self.life, "pid": os.getpid(), "adapters": adapters})

    async def _server_info(self, request: web.Request) -> web.Response:
        config = self.engine.config
        kv_events = msgspec.to_builtins(self.publisher.config) if self.publisher else None
        parts: dict[str, Any] = {
            "model_config": {"model": config.root, "max_model_len": config.max_model_len, "dtype": config.dtype},
            "cache_config": {
                "block_size": config.block_size,
                "num_gpu_blocks": config.num_blocks,
                "enable_prefix_caching": True,
                "prefix_caching_hash_algo": "sha256",
            },
            "parallel_config": {
                "data_parallel_size": self.config.ranks,
                "tensor_parallel_size": 1,
                "pipeline_parallel_size": 1,
                "worker_extension_cls": self.config.worker_extension_cls,
            },
            "device_config": {"device": "cuda"},  # where vLLM keeps adapters and base apart, as this does
            "scheduler_config": {"max_num_seqs": config.max_num_seqs},
            "lora_config": {
                "max_lora_rank": config.max_lora_rank,
                "max_loras": config.max_loras,
                "max_cpu_loras": config.registered_limit,
            },
            "kv_events_config": kv_events,
        }
        as_json = request.query.get("config_format", "text") == "json"
        return _json(
            {
                "vllm_config": parts if as_json else str(parts),
                "vllm_env": {"VLLM_SERVER_DEV_MODE": True, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": True},
                "system_env": {},
            }
        )

    async def _get_faults(self, request: web.Request) -> web.Response:
        return _json(msgspec.to_builtins(self.faults))

    async def _post_faults(self, request: web.Request) -> web.Response:
        try:
            faults = self.set_faults(msgspec.json.decode(await request.read(), type=dict[str, Any]))
        except msgspec.MsgspecError as error:
            raise invalid_body(str(error)) from error
        return _json(msgspec.to_builtins(faults))

    async def _get_calls(self, request: web.Request) -> web.Response:
        return _json({"calls": dict(self.calls)})


class Address(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    port: int


@asynccontextmanager
async def serving(simulator: Simulator, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[Address]:
    """Serve a simulator in this event loop; port 0 takes a free one."""
    # A client that goes away cancels its request, as it does in vLLM.
    runner = web.AppRunner(simulator.app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        bound = runner.addresses[0][1]
        yield Address(url=f"http://{host}:{bound}", port=bound)
    finally:
        await runner.cleanup()
        await simulator.close()


@asynccontextmanager
async def _group() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group whose first failure comes out bare: the answer is one error, not a group of them."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:  # what `except*` raises is a group again before Python 3.11.4
        for known in (EngineDead, ConnectionResetError):
            if failures.subgroup(known):
                raise known from failures
        raise


def _started(job: Job) -> Running:
    if job.running is None:
        raise RuntimeError("asked for the answer of a job that has not run")
    return job.running


def _request_id(request: web.Request) -> str:
    return request.headers.get("X-Request-Id") or uuid.uuid4().hex


def _json(body: object, status: int = 200) -> web.Response:
    return web.Response(body=_encode(body), status=status, content_type="application/json")


def _text(body: str) -> web.Response:
    # vLLM sends these without a content type; aiohttp will not leave it out.
    return web.Response(text=body)


async def _event(response: web.StreamResponse, body: object) -> None:
    await response.write(b"data: " + _encode(body) + b"\n\n")
