"""An address that looks like one vLLM server to an unmodified TRL, on the trainer's own host.

TRL pauses, loads, resumes, and asks for `trl-policy-v7`. Here a load becomes a publication that is waited for, a pause
becomes nothing (a new name needs none), and TRL's names become aliases of versions of the present epoch. TRL ends the
training at any refused load and retries an unknown name for minutes, so where the fleet had no time or no room for a
version, or it could not be stored, its alias points to the last one promoted, and every request through it is marked as
substituted. Only what is bad is refused, whether the fleet found it so or the publisher.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
import orjson
from aiohttp import web
from msgspec import Struct

from adaptersync.trainer.publisher import AdapterPublisher
from adaptersync_core.api_keys import bearer
from adaptersync_core.config import Config
from adaptersync_core.errors import (
    AdapterInvalid,
    AdapterSyncError,
    ArtifactCorrupt,
    ConfigError,
    ControlError,
    ControlUnavailable,
    EngineUnavailable,
    NameTaken,
    PublicationFailed,
    StoreError,
)
from adaptersync_core.headers import REPLICA, REQUEST_ID, SUBSTITUTED, VERSION, VOIDED
from adaptersync_core.identity import check_run
from adaptersync_core.keys import Keys
from adaptersync_core.lifecycle import run_until_stopped
from adaptersync_core.manifest import FILES, content_digest, hash_file, inspect
from adaptersync_core.records import ReplicaReport
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from adaptersync_core.table import Table
from adaptersync_core.telemetry import configure_logging

ALIASES = 256  # names kept; TRL asks for none older than its staleness window
TRL_NAME = re.compile(r"trl-policy-v[0-9]+")  # what TRL calls the adapters it has a server load
BODY_LIMIT = 16 << 20  # bytes of one request
PUBLISHING = frozenset({"/v1/load_lora_adapter", "/init_weight_transfer_engine"})
LOOK_S = 0.5  # a table is believed for so long; what was withdrawn since, the router says
WITHDRAWN = frozenset({409, 410})  # what the router answers then
PASSING = frozenset(range(500, 600))  # and while there is nobody to ask
PAUSE_S = 0.5
PASSED_ON = ("content-type", "retry-after", REQUEST_ID, VERSION, REPLICA, VOIDED)  # of an answer's headers

T = TypeVar("T")
log = logging.getLogger(__name__)


class Load(Struct, frozen=True, kw_only=True):
    """The body of TRL's load call."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class Alias(Struct, frozen=True, kw_only=True):
    """What one of TRL's names stands for; `substituted` when the fleet could not take the version itself."""

    digest: str
    version: str
    substituted: bool = False


class _NotPassedOn(Exception):
    """The router's answer was one that TRL is not to see."""


def run_relay(config: Config) -> None:
    """Relay for one trainer until SIGTERM."""
    configure_logging("relay", config.trainer.run)
    if not config.trainer.run:
        raise ConfigError("no run name", next_step="give --run, or set trainer.run")
    check_run(config.trainer.run, base_model=config.group.base_model)  # now, not at TRL's first call
    run_until_stopped(_serve(config))


def allowed_root(config: Config) -> Path:
    """What a load's directory must be below."""
    return Path(config.relay.allowed_root or ".").resolve()


async def _serve(config: Config) -> None:
    runner = relay_runner(config)
    await runner.setup()
    try:
        await web.TCPSite(runner, config.relay.host, config.relay.port).start()
        log.info("listens on http://%s:%d for run %s", config.relay.host, config.relay.port, config.trainer.run)
        log.info("takes adapters from below %s (relay.allowed_root)", allowed_root(config))
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def relay_runner(config: Config) -> web.AppRunner:
    """A rollout that TRL gives up, or dies over, is given up here, too, and so down to the engine."""
    return web.AppRunner(relay_app(config), access_log=None, handler_cancellation=True)


def relay_app(config: Config) -> web.Application:
    relay = Relay(config)
    app = web.Application(client_max_size=BODY_LIMIT, middlewares=[_errors])
    app.cleanup_ctx.append(relay.lifetime)
    app.on_shutdown.append(relay.end)
    app.add_routes(
        [
            web.get("/health", relay.forward),
            web.get("/v1/models", relay.models),
            web.post("/tokenize", relay.forward),
            web.get("/server_info", relay.server_info),
            web.post("/pause", relay.nothing),
            web.post("/resume", relay.nothing),
            web.post("/v1/load_lora_adapter", relay.load),
            web.post("/v1/unload_lora_adapter", relay.nothing),
            web.get("/get_world_size", relay.world_size),
            web.post("/init_weight_transfer_engine", relay.no_merged_weights),
            web.post("/v1/completions", relay.generate),
            web.post("/v1/chat/completions", relay.generate),
        ]
    )
    return app


class Relay:
    """One trainer's view of the fleet."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._root = allowed_root(config)
        self._aliases: dict[str, Alias] = {}
        self._table: Table | None = None
        self._look_at = 0.0
        self._looking = asyncio.Lock()
        self._loading = asyncio.Lock()
        self._beginning = asyncio.Lock()
        self._publisher: AdapterPublisher | None = None

    async def lifetime(self, app: web.Application) -> AsyncIterator[None]:
        """Resources from start to stop of the application."""
        self._client = RedisClient(self._config.redis.control_url, name=f"relay-{self._config.trainer.run}")
        self._registry = Registry(self._client, Keys(self._config.group.name))
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._config.relay.max_inflight),
            timeout=aiohttp.ClientTimeout(total=self._config.relay.request_timeout_s),
            skip_auto_headers=("Accept-Encoding",),  # what is passed on says nothing of an encoding
            headers=await asyncio.to_thread(bearer, self._config.trainer.router_key_file),
        )
        try:
            await self._begin()
            yield
        finally:
            await self.end()  # once more: who asked meanwhile has begun
            await self._session.close()
            await self._client.close()

    async def end(self, app: web.Application | None = None) -> None:
        """Let go of the run; a load that waits for the fleet fails at once."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            await asyncio.to_thread(publisher.close)

    async def _begin(self) -> None:
        """A trainer began: a new epoch, in which TRL may count from 1 again."""
        await self.end()
        self._aliases.clear()
        self._publisher = await asyncio.to_thread(AdapterPublisher, self._config)
        log.info("run %s, trainer epoch %d", self._publisher.run, self._publisher.epoch)

    async def server_info(self, request: web.Request) -> web.Response:
        """TRL's constructor asks this once; it reads four fields. Asked after a load began, another TRL has started.

        So it has when the one before could not begin.
        """
        async with self._beginning:
            if self._publisher is None or self._aliases or self._loading.locked():
                await self._begin()
        reports = await self._patiently(self._reports)
        lora = {
            "max_lora_rank": min(report.max_lora_rank for report in reports),
            "max_loras": min(report.max_loras for report in reports),
        }
        parallel = {"data_parallel_size": 1}  # a load reaches every replica, whatever they are made of
        model = {"dtype": "unknown"}  # asked for by a TRL that would send whole weights; it hears at its next call
        return web.json_response(
            {"vllm_config": {"lora_config": lora, "parallel_config": parallel, "model_config": model}}
        )

    async def models(self, request: web.Request) -> web.StreamResponse:
        """TRL looks here for the length of a context, and ends at any answer but a good one."""
        return await self._patiently(lambda last: self._forward(request, b"", {}, kept=() if last else PASSING))

    async def _reports(self, last: bool) -> list[ReplicaReport]:
        reports = [seen.report for seen in (await self._registry.fleet()).replicas.values()]
        if not reports:
            raise EngineUnavailable("no replica has reported", next_step="start agents, then the trainer")
        return reports

    async def _patiently(self, ask: Callable[[bool], Awaitable[T]]) -> T:
        """What TRL asks once, and without a timeout: a fleet that has just been well may not be for a moment.

        `ask` is told whether it is asked for the last time.
        """
        give_up_at = time.monotonic() + self._config.relay.promotion_timeout_s
        while time.monotonic() < give_up_at:
            try:
                return await ask(False)
            except (_NotPassedOn, EngineUnavailable, ControlUnavailable) as error:
                log.info("will ask again: %s", error)
                await asyncio.sleep(PAUSE_S)
        return await ask(True)

    async def nothing(self, request: web.Request) -> web.Response:
        """Pause, resume and unload: the fleet neither pauses for a version nor lets a trainer unload one."""
        return web.json_response({"status": "ok"})

    async def world_size(self, request: web.Request) -> web.Response:
        """TRL reads no status of this one: the refusal is of the call after it, and that one is shown."""
        return web.json_response({"world_size": 1})

    async def no_merged_weights(self, request: web.Request) -> web.Response:
        """TRL merges what it thinks no server can take as an adapter, or what is none, and sends all of the model."""
        raise AdapterInvalid(
            "TRL would send merged weights, and only adapters are published here",
            next_step="train with peft_config=LoraConfig(...) of a kind vLLM serves; TRL's log says what is in the way",
        )

    async def load(self, request: web.Request) -> web.Response:
        """Publish the directory, wait until the fleet serves it, and let TRL's name stand for it."""
        try:
            call = msgspec.json.decode(await request.read(), type=Load)
        except msgspec.MsgspecError as error:
            raise AdapterInvalid(f"load call cannot be read: {error}") from error
        if not call.lora_name or not call.lora_name.isprintable():  # it will be a header
            raise AdapterInvalid(f"adapter cannot be called {call.lora_name[:96]!r}")
        try:
            directory = await asyncio.to_thread(Path(call.lora_path).resolve)
        except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL
            raise AdapterInvalid(f"path cannot be followed: {error}") from error
        if not directory.is_relative_to(self._root):
            raise AdapterInvalid(
                "directory is not below the relay's allowed root",
                next_step="start the relay with --allowed-root, or relay.allowed_root, the trainer's output directory",
                path=str(directory),
                root=str(self._root),
            )
        # To its end, though nobody may wait for it any more: what is published cannot be called back.
        alias = await asyncio.shield(self._load(call.lora_name, directory))
        return web.Response(text=f"Success: LoRA adapter '{call.lora_name}' is {alias.version}.")

    async def _load(self, name: str, directory: Path) -> Alias:
        async with self._loading:  # TRL sends one at a time; a repeat waits for the first
            publisher = self._publisher
            alias = await self._publish(name, directory)
            if self._publisher is not publisher:
                raise PublicationFailed("another trainer has begun since", version=alias.version)
            self._aliases.pop(name, None)
            self._aliases[name] = alias
            while len(self._aliases) > ALIASES:
                del self._aliases[next(iter(self._aliases))]
            return alias

    async def _publish(self, name: str, directory: Path) -> Alias:
        publisher = self._publisher
        if publisher is None:
            raise PublicationFailed("relay is not ready")
        digest = await asyncio.to_thread(_digest, directory)
        known = self._aliases.get(name)
        if known is not None and known.digest == digest and not known.substituted:
            return known
        try:
            publication = await asyncio.to_thread(publisher.publish, directory)
        except (ArtifactCorrupt, NameTaken):  # these do speak of the bytes
            raise
        except (ControlUnavailable, StoreError) as error:  # a full store, say
            return await self._stand_in(publisher, name, digest, str(error))
        try:
            outcome = await asyncio.to_thread(publication.wait, self._config.relay.promotion_timeout_s)
        except PublicationFailed as error:  # no outcome in time
            return await self._stand_in(publisher, name, digest, str(error))
        if outcome.state == "current":
            await self._look(anew=True)
            return Alias(digest=digest, version=publication.adapter_id)
        if outcome.state == "rolled_back" and not outcome.want:
            raise PublicationFailed(f"the fleet refused it: {outcome.reason}", version=publication.adapter_id)
        why = f"{publication.adapter_id} is {outcome.state}: {outcome.reason}"
        return await self._stand_in(publisher, name, digest, why)

    async def _stand_in(self, publisher: AdapterPublisher, name: str, digest: str, why: str) -> Alias:
        """The version last promoted, for one of which nobody said that it is bad.

        Never one of an epoch before: a trainer that went back to a checkpoint would learn from what it gave up.
        """
        table = await self._look()
        current = _current(table, publisher) if table else None
        if current is None:
            raise PublicationFailed(f"not served, and this trainer has nothing before it: {why}")
        log.warning("%s stands for %s: %s", name, current, why)
        return Alias(digest=digest, version=current, substituted=True)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """A rollout: resolve TRL's name, and serve one that retired from the oldest version still retained."""
        body = await request.read()
        try:
            asked = orjson.loads(body)
            name = asked["model"]
            alias = self._aliases.get(name)  # which no array or object could be
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise AdapterInvalid("request names no model") from error
        if alias is None and not (isinstance(name, str) and TRL_NAME.fullmatch(name)):
            return await self._forward(request, body, {})
        version = alias.version if alias else name  # a name of before this relay started stands for nobody knows what
        substituted = bool(alias and alias.substituted)
        for anew in (False, True):
            asked["model"] = target = await self._living(version, anew=anew)
            marks = {SUBSTITUTED: name} if target != version or substituted else {}
            try:
                return await self._forward(request, orjson.dumps(asked), marks, kept=() if anew else WITHDRAWN)
            except _NotPassedOn:  # withdrawn since the table was read
                continue
        raise AssertionError("the second answer is passed on, whatever it is")

    async def _living(self, version: str, *, anew: bool) -> str:
        """`version` while it is served, else the oldest that still is. Without Redis the router may know better.

        One that is on its way once more, since Redis lost its promotion, is held by the router until it is there.
        """
        table, run = await self._look(anew=anew), self._config.trainer.run
        if table is None or table.routable(version) or table.candidate(run) == version:
            return version
        window = table.window(run)
        return window[-1] if window else version

    async def _look(self, *, anew: bool = False) -> Table | None:
        """The table, a moment old unless `anew`; while it cannot be read the last one known, if that will do."""
        async with self._looking:
            if anew or time.monotonic() >= self._look_at:
                self._table = None if anew else self._table
                try:
                    self._table = await self._registry.table()
                except ControlError as error:
                    log.warning("the table cannot be read: %s", error)
                self._look_at = time.monotonic() + LOOK_S
            return self._table

    async def forward(self, request: web.Request) -> web.StreamResponse:
        return await self._forward(request, await request.read(), {})

    async def _forward(
        self, request: web.Request, body: bytes, headers: dict[str, str], *, kept: Collection[int] = ()
    ) -> web.StreamResponse:
        """Pass a request and its answer on; _NotPassedOn for one whose status is to be `kept`."""
        url = self._config.relay.router_url.rstrip("/") + request.path
        sent = {"content-type": request.content_type, **headers}
        response: web.StreamResponse | None = None
        try:
            async with self._session.request(request.method, url, data=body or None, headers=sent) as answer:
                if answer.status in kept:
                    raise _NotPassedOn(f"{request.path}: {answer.status}")
                passed = {name: answer.headers[name] for name in PASSED_ON if name in answer.headers}
                response = web.StreamResponse(status=answer.status, headers={**passed, **headers})
                response.content_length = answer.content_length
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
        except (aiohttp.ClientError, TimeoutError) as error:
            if response is None:
                raise EngineUnavailable(
                    f"router does not answer: {error}", next_step="check relay.router_url", url=url
                ) from error
            log.warning("an answer of %s broke off: %s", url, error)
            if request.transport is not None:  # TRL must not take what it has for all of it
                request.transport.close()
        return response


def _current(table: Table, publisher: AdapterPublisher) -> str | None:
    entry = table.runs.get(publisher.run)
    version = table.versions.get(entry.current) if entry and entry.current else None
    return entry.current if entry and version and version.epoch in publisher.epochs else None


def _digest(directory: Path) -> str:
    try:
        inspect(directory)  # a pipe, a device or a file without an end would be read for ever
        return content_digest(tuple(hash_file(directory / name) for name in FILES))
    except OSError as error:
        raise AdapterInvalid(f"adapter cannot be read: {error.strerror}", path=str(directory)) from error


@web.middleware
async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Our errors in the shape of vLLM's; what no engine can serve as an adapter is 501."""
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except AdapterSyncError as error:
        unservable = isinstance(error, AdapterInvalid) and request.path in PUBLISHING
        status = 501 if unservable else error.http_status
        log.warning("%s %s: %s", request.method, request.path, error)
        body = {"error": {"message": str(error), "type": error.code, "param": None, "code": status}}
        return web.json_response(body, status=status)
