"""Serves the page, its data and its stream of events, beside the coordinator's loop and never in its way.

Every coordinator has one, also who does not lead. Whoever reaches the port may look; who asks for something must have a
key. A page of another site cannot read this one: names that are not ours are refused, and there is no other origin that
may ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

import orjson
from aiohttp import web

from adaptersync.coordinator.observer import Observer
from adaptersync.coordinator.overview import encode
from adaptersync.coordinator.page import admin
from adaptersync.coordinator.page.streams import Listener, Streams
from adaptersync_core.api_keys import ApiKeys
from adaptersync_core.config import Config
from adaptersync_core.errors import AdapterSyncError, ConfigError, ControlError, NameInvalid
from adaptersync_core.keys import Keys
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry

STATIC = Path(__file__).parent / "static"
FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/draw.js": ("draw.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    "/uPlot.js": ("vendor/uPlot.iife.min.js", "text/javascript"),
    "/uPlot.css": ("vendor/uPlot.min.css", "text/css"),
    "/uPlot.LICENSE": ("vendor/uPlot.LICENSE", "text/plain"),
}
BODY_BYTES = 8 << 10
REQUESTS = 64  # at once, beside streams
KEEP_S = 15.0  # between two signs of life in a stream of which nothing is told
WRITE_S = 10.0  # a browser that takes nothing for so long is dropped
AGAIN_MS = 3000  # before a browser that lost its stream opens another
RETRY_S = 5.0  # before a port that is taken is tried again
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def serve_page(config: Config) -> None:
    """Serve until cancelled; a port that is taken, or a server that is away, is waited for."""
    client = RedisClient(config.redis.control_url, name=f"{config.coordinator.name}-page")
    page = Page(config, Registry(client, Keys(config.group.name)))
    runner = page.runner()
    try:
        await runner.setup()
        await _listen(runner, config)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
        await client.close()


async def _listen(runner: web.AppRunner, config: Config) -> None:
    host, port, said = config.page.host, config.page.port, False
    while True:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            if not said:
                log.warning("page cannot be served at %s:%d, will try again: %s", host, port, error.strerror or error)
            said = True
            await asyncio.sleep(RETRY_S)
        else:
            log.info("page at http://%s:%d", f"[{host}]" if ":" in host else host, port)
            return


class Page:
    """One coordinator's page."""

    def __init__(self, config: Config, registry: Registry) -> None:
        self._settings = config.page
        self._registry = registry
        self.observer = Observer(registry, config, told_by=config.coordinator.name)
        self.streams = Streams(config.page.clients)
        self._busy = 0
        self._files = {path: (read, kind, _tag(read)) for path, (name, kind) in FILES.items() if (read := _read(name))}

    def runner(self) -> web.AppRunner:
        # cancelled with its connection: who left makes room for another at once
        return web.AppRunner(
            self.application(),
            access_log=None,
            handle_signals=False,
            handler_cancellation=True,
            shutdown_timeout=1.0,
        )

    def application(self) -> web.Application:
        application = web.Application(client_max_size=BODY_BYTES, middlewares=[self._door])
        application.cleanup_ctx.append(self._lifetime)
        application.on_shutdown.append(self._end)
        application.on_response_prepare.append(_secure)
        application.add_routes([web.get(path, self._file) for path in FILES])
        application.add_routes(
            [
                web.get("/api/fleet", self.fleet),
                web.get("/api/events", self.events),
                web.get("/api/requests", self.open_for_requests),
                web.post("/api/requests", self.request),
            ]
        )
        return application

    async def fleet(self, request: web.Request) -> web.Response:
        """All that `status --json` says, and more: `Overview`. With `?since=` only later points of the series."""
        try:
            since = float(request.query.get("since", "0"))
        except ValueError:
            return _error(400, "since is no time in seconds")
        return _json(encode(await self.observer.overview(since=since)))

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Events as they come; with `Last-Event-ID`, first those that were missed."""
        last = request.headers.get("Last-Event-ID", "") or request.query.get("after", "")
        try:
            missed = self.observer.recent.after(last) if last else []
        except ValueError:
            return _error(400, "no such place among the events")
        listener = self.streams.join(missed)
        if listener is None:
            return _error(503, "as many look on as may be (page.clients)", retry_after_s=10)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        try:
            await response.prepare(request)
            await _pour(response, listener)
        finally:
            self.streams.leave(listener)
            if request.transport is not None and listener.dropped:
                request.transport.abort()  # what it did not take is of no use to it
        return response

    async def open_for_requests(self, _request: web.Request) -> web.Response:
        """Whether anything may be asked for here."""
        return _json(orjson.dumps({"open": bool(self._settings.keys_file)}))

    async def request(self, request: web.Request) -> web.Response:
        """Ask the coordinator for a rollback, or for a word at the gate; answered with the request's id, at once."""
        if not self._settings.keys_file:
            return _error(403, "this page is read-only: page.keys_file names no file of keys")
        shown = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        key = (await asyncio.to_thread(ApiKeys, Path(self._settings.keys_file))).who(shown)
        if key is None:
            return _error(401, "no such key")
        if not key.may("admin"):
            return _error(403, "this key may not: it lacks the scope admin")
        asked = admin.read(await request.read())
        request_id = await self._registry.request(asked)
        log.info(
            "%s asks through the page: %s of run %s, version %s: %s",
            key.name,
            asked.kind,
            asked.run,
            asked.version,
            request_id,
        )
        return _json(orjson.dumps({"request": request_id}), status=202)

    async def _file(self, request: web.Request) -> web.Response:
        body, kind, tag = self._files[request.path]
        headers = {"ETag": tag, "Cache-Control": "no-cache"}
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=headers)

    @web.middleware
    async def _door(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not _ours(request.host, self._settings.host, *self._settings.hosts):
            return _error(421, "not a name of this page: page.hosts lists those it has")
        if self._busy >= REQUESTS + self._settings.clients:
            return _error(503, "too many requests at once", retry_after_s=1)
        self._busy += 1
        try:
            return await handler(request)
        except web.HTTPException as error:
            return _error(error.status, error.reason)
        except NameInvalid as error:
            return _error(400, str(error))
        except ControlError as error:
            return _error(503, str(error), retry_after_s=1)
        except ConfigError as error:
            log.error("nobody can ask for anything: %s", error)
            return _error(500, "keys cannot be read: the coordinator's log says why")
        finally:
            self._busy -= 1

    async def _lifetime(self, _application: web.Application) -> AsyncIterator[None]:
        work = asyncio.gather(self.observer.watch(), self.observer.follow(self.streams.tell))
        work.add_done_callback(_ended)
        try:
            yield
        finally:
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError, AdapterSyncError):
                await work

    async def _end(self, _application: web.Application) -> None:
        self.streams.end()


def _ended(work: asyncio.Future[tuple[None, None]]) -> None:
    """A mistake here is said, and does not stop who decides."""
    error = None if work.cancelled() else work.exception()
    if error is not None and not isinstance(error, asyncio.CancelledError):
        log.error("page learns nothing more", exc_info=error)


async def _pour(response: web.StreamResponse, listener: Listener) -> None:
    said = b"retry: %d\n\n" % AGAIN_MS
    while not listener.dropped:
        try:
            async with asyncio.timeout(WRITE_S):
                await response.write(said)
        except (TimeoutError, ConnectionError):
            listener.drop()
            return
        said = await listener.take(KEEP_S) or b": alive\n\n"


async def _secure(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)


def _ours(host: str, *names: str) -> bool:
    """Whether a Host header is an address, this machine, or a name that was listed: a script of a foreign site comes
    with its site's name, even where that has been made to lead here."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name == "localhost" or name in (each.lower() for each in names):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _read(name: str) -> bytes:
    return (STATIC / name).read_bytes()


def _tag(body: bytes) -> str:
    return f'"{hashlib.sha256(body).hexdigest()[:16]}"'


def _json(body: bytes, *, status: int = 200) -> web.Response:
    return web.Response(
        body=body, status=status, content_type="application/json", headers={"Cache-Control": "no-store"}
    )


def _error(status: int, reason: str, *, retry_after_s: int = 0) -> web.Response:
    answer = _json(orjson.dumps({"error": reason}), status=status)
    if retry_after_s:
        answer.headers["Retry-After"] = str(retry_after_s)
    if status == 401:
        answer.headers["WWW-Authenticate"] = "Bearer"
    return answer
