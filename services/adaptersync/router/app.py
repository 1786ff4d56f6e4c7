"""Wiring and lifecycle of one router process, nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import ClientSession, DummyCookieJar, TCPConnector
from msgspec.structs import replace

from adaptersync.router.admission import Admission
from adaptersync.router.attempts import Attempts
from adaptersync.router.chains import RememberedChains
from adaptersync.router.connections import Connections
from adaptersync.router.credentials import Credentials
from adaptersync.router.exchange import Exchange
from adaptersync.router.fates import FateCache
from adaptersync.router.firsts import Firsts
from adaptersync.router.guard import Guard
from adaptersync.router.ledger import Ledger
from adaptersync.router.metrics import Metrics
from adaptersync.router.open_files import allow
from adaptersync.router.outages import Outages
from adaptersync.router.ownership import Ownership
from adaptersync.router.paths import Paths
from adaptersync.router.prompts import Reader
from adaptersync.router.proxy import CHAT, Proxy
from adaptersync.router.report import Reporter
from adaptersync.router.server import Limits, Server
from adaptersync.router.sessions import Sessions
from adaptersync.router.status import Status
from adaptersync.router.table import TableView
from adaptersync.router.tokenizer import Tokenizer, load
from adaptersync.router.version_phases import VersionPhases
from adaptersync.router.workers import Shares, reserved, run
from adaptersync_core.api_keys import ApiKeys, read_secret
from adaptersync_core.bus import Bell, ring_on_events
from adaptersync_core.config import Config
from adaptersync_core.errors import ControlError, ControlUnavailable
from adaptersync_core.events import REPORTS
from adaptersync_core.keys import Keys
from adaptersync_core.notify import Notifier
from adaptersync_core.pipe import Pipe
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from adaptersync_core.tls import trusting
from adaptersync_core.traces import traces

CACHE_TIMEOUT_S = 0.25  # for a decision; past it the router decides alone
ROWS_TIMEOUT_S = 5.0  # for a batch of ledger rows, which the control server writes to disk
DRAIN_S = 60.0  # how long a stop waits for requests in flight
FLUSH_S = 3.0  # how long it then waits for the ledger
BEAT_S = 0.5  # between two signs of life

log = logging.getLogger(__name__)


class Serving(NamedTuple):
    """`work` are the loops behind the requests; it ends only when one of them breaks, and then so must the router.

    It listens from the beginning; it `vouches` once it has a table and has said so.
    """

    url: str
    work: asyncio.Task[None]
    vouches: Callable[[], bool]


def run_router(config: Config) -> None:
    """Serve until SIGTERM or SIGINT, then let requests in flight end and the ledger be written; it outlives a kill."""
    settings = config.router
    notifier = Notifier.take(os.environ)
    allow(settings.connections)
    with reserved(settings.host, settings.port) as ours:
        config = replace(config, router=replace(settings, port=ours.port))
        # once for all workers, and for those that take the place of one
        tokenizer = asyncio.run(load(settings.tokenizer)) if settings.tokenizer else None
        mine = notifier if settings.workers == 1 else Notifier()
        run(lambda shares, worker: _run(config, tokenizer, shares, worker, mine), settings.workers, ours.held, notifier)


async def _run(config: Config, tokenizer: Tokenizer | None, shares: Shares, worker: int, notifier: Notifier) -> None:
    loop, stop, begun = asyncio.get_running_loop(), asyncio.Event(), False
    itself = asyncio.current_task()
    told: asyncio.Task[None] | None = None  # until the end: what is stopped from elsewhere is watched while it drains

    def heed() -> None:
        if not begun and not stop.is_set() and itself is not None:
            itself.cancel()  # it waits for a server, perhaps
        stop.set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, heed)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            async with serving(config, tokenizer=tokenizer, shares=shares, worker=worker) as router:
                begun = True
                log.info("serving on %s", router.url)
                told = asyncio.create_task(_tell(router, shares, worker, notifier))
                stopped = asyncio.create_task(stop.wait())
                await asyncio.wait((stopped, router.work), return_when=asyncio.FIRST_COMPLETED)
                stopped.cancel()
                notifier.stopping()
                log.info("stopping: waiting for requests in flight")
    finally:
        if told is not None:
            told.cancel()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(signum)


async def _tell(router: Serving, shares: Shares, worker: int, notifier: Notifier) -> None:
    """Say that it serves, once it does, and from then on that its loop turns."""
    notifier.status(f"listens on {router.url}; waits for the table")
    while not router.vouches():
        notifier.alive()
        await asyncio.sleep(BEAT_S)
    shares.serves(worker)
    notifier.ready()
    notifier.status(f"serves on {router.url}")
    while True:
        notifier.alive()
        await asyncio.sleep(BEAT_S)


@contextlib.asynccontextmanager
async def serving(
    config: Config,
    *,
    drain_s: float = DRAIN_S,
    tokenizer: Tokenizer | None = None,
    shares: Shares | None = None,
    worker: int = 0,
) -> AsyncIterator[Serving]:
    """A router that serves while the context lasts, which then waits up to `drain_s` for requests in flight.

    As one `worker` of several, it has their `shares`, and the `tokenizer` that was loaded for all of them.
    """
    if tokenizer is None and config.router.tokenizer:
        tokenizer = await load(config.router.tokenizer)
    reader = Reader(tokenizer)
    opened = contextlib.AsyncExitStack()
    async with opened, _serving(config, opened, reader, shares or Shares(1), worker, drain_s=drain_s) as router:
        yield router


@contextlib.asynccontextmanager
async def _serving(
    config: Config, opened: contextlib.AsyncExitStack, reader: Reader, shares: Shares, worker: int, *, drain_s: float
) -> AsyncIterator[Serving]:
    """`opened` closes what was opened here, also where nothing can be served."""
    settings = config.router
    # every process counts and reports for itself, also where several share a name and a port
    name = f"{settings.name}-{secrets.token_hex(3)}"
    keys = Keys(config.group.name)
    control = RedisClient(config.redis.control_url, name=name)
    opened.push_async_callback(control.close)
    registry = Registry(control, keys)
    cache = Pipe(config.redis.cache_url or config.redis.control_url, name=name, timeout_s=CACHE_TIMEOUT_S)
    rows = Pipe(config.redis.control_url, name=name, timeout_s=ROWS_TIMEOUT_S)
    for pipe in (rows, cache):
        opened.push_async_callback(pipe.close)
    opened.callback(reader.close)
    known = settings.keys_file, settings.replica_keys_path, settings.replica_ca_file
    api_keys, credentials, tls = await asyncio.to_thread(_read_secrets, *known)
    if settings.gate_token_file:
        settings = replace(settings, gate_token=await asyncio.to_thread(read_secret, Path(settings.gate_token_file)))
    if api_keys is not None and not settings.gate_token:  # an admin's key opens the gate, too
        settings = replace(settings, gate_token=secrets.token_hex(16))
    connections = Connections(
        connect_timeout_s=settings.connect_timeout_s,
        most=settings.max_inflight,
        tls=tls,
    )
    opened.push_async_callback(connections.close)
    session = ClientSession(cookie_jar=DummyCookieJar(), connector=TCPConnector(ssl=tls or True))
    opened.push_async_callback(session.close)
    view = TableView(registry, max_age_s=settings.table_max_age_s)
    admission = Admission(
        view,
        FateCache(registry),
        base_model=config.group.base_model,
        hold_s=min(settings.hold_s, settings.request_timeout_s),
        held_requests=settings.held_requests,
    )
    ownership = Ownership(
        cache,
        keys,
        router=name,
        policy=config.group.policy,
        spill=settings.spill,
        blocks_per_version=config.group.blocks_per_version,
    )
    sessions = Sessions(cache, keys, keep_s=settings.session_s) if settings.session_s > 0 else None
    attempts, outages, metrics = Attempts(), Outages(), Metrics(shares.get(worker))
    ledger = await Ledger.at(
        rows,
        keys.rollouts,
        directory=Path(settings.spool_path) / config.group.name,  # groups may share a host
        name=name,
        capacity=settings.spool_bytes,
        kept=settings.kept_bytes,
        metrics=metrics,
    )
    server = Server(
        Limits(
            head_bytes=settings.head_bytes,
            body_bytes=settings.body_bytes,
            arriving_bytes=settings.arriving_bytes,
            connections=settings.connections,
        )
    )
    exchange = Exchange(
        name=name,
        settings=settings,
        connections=connections,
        view=view,
        attempts=attempts,
        outages=outages,
        ledger=ledger,
        metrics=metrics,
        credentials=credentials,
    )
    tracing = traces(config, "router", name)
    opened.push_async_callback(asyncio.to_thread, tracing.close)
    firsts = Firsts(tracing, registry, view, name=name) if tracing.on else None
    phases = VersionPhases(metrics, registry) if worker == 0 else None  # all workers would hear the same
    proxy = Proxy(
        name=name,
        settings=settings,
        view=view,
        remembered=RememberedChains(reader, blocks=config.group.blocks_per_request),
        admission=admission,
        ownership=ownership,
        sessions=sessions,
        exchange=exchange,
        outages=outages,
        ledger=ledger,
        metrics=metrics,
        firsts=firsts,
        phases=phases,
        stopping=lambda: server.stopping,
    )
    status = Status(
        name=name,
        base_model=config.group.base_model,
        refuses_unrecorded=settings.when_spool_full == "refuse",
        session=session,
        view=view,
        admission=admission,
        ownership=ownership,
        outages=outages,
        ledger=ledger,
        metrics=metrics,
        server=server,
        shares=shares,
        worker=worker,
        credentials=credentials,
    )

    paths = Paths(
        {
            "/v1/completions": {"POST": proxy.rollout},
            CHAT: {"POST": proxy.rollout},
            "/tokenize": {"POST": proxy.tokenize},
            "/v1/models": {"GET": status.models},
            "/health": {"GET": status.health},
            "/metrics": {"GET": status.metrics},
        },
        refused=proxy.refuse,
    )

    guard = None
    if api_keys is not None:
        guard = Guard(
            paths, api_keys, gate=settings.gate_token, refused=lambda status: metrics.count("unauthorized", str(status))
        )
    bell = Bell()
    reporter = Reporter(
        registry, view, proxy, ownership, outages.lacking, name=name, max_age_s=settings.table_max_age_s
    )
    await reporter.tell()  # before the table is read: from here on nothing in it is unloaded without our word
    await view.read()
    await reporter.tell()
    for pipe in (cache, rows):
        with contextlib.suppress(ControlUnavailable):
            await pipe.connect()
    try:
        host, port = await server.listen(guard or paths, settings.host, settings.port)
        url = reporter.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        work = asyncio.create_task(
            _work(
                view.follow(bell),
                ring_on_events(bell, config.redis.control_url, keys.events, name=name, unless=REPORTS),
                _renew(view, attempts, outages),
                _forget(view, ownership),
                ownership.beat(),
                ownership.tell_ends(),
                ledger.write(),
                reporter.run(),
                status.share(),
                *(files.follow() for files in (api_keys, credentials) if files is not None),
                *([firsts.run()] if firsts is not None else []),
                *([phases.follow(config.redis.control_url, keys.events, name=name)] if phases else []),
            )
        )
        await asyncio.sleep(0)  # they begin: coroutines that are cancelled before would be said to be forgotten
        try:
            yield Serving(url=url, work=work, vouches=lambda: view.age_s() <= settings.table_max_age_s)
        finally:
            # requests in flight still need all of the above
            await server.stop(drain_s)
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work
    finally:
        await server.stop(0.0)
        await ledger.stop(FLUSH_S)
        await ownership.leave()
        with contextlib.suppress(ControlError):
            await registry.forget_router(name)


def _read_secrets(
    keys_file: str, replica_keys_path: str, replica_ca_file: str
) -> tuple[ApiKeys | None, Credentials | None, ssl.SSLContext | None]:
    return (
        ApiKeys(Path(keys_file)) if keys_file else None,
        Credentials(Path(replica_keys_path)) if replica_keys_path else None,
        trusting(replica_ca_file, key="router.replica_ca_file"),
    )


async def _work(*loops: Coroutine[Any, Any, None]) -> None:
    async with asyncio.TaskGroup() as group:
        for loop in loops:
            group.create_task(loop)


async def _renew(view: TableView, attempts: Attempts, outages: Outages) -> None:
    while True:
        if outages.renew(view.table):
            view.nudge()  # whoever waits for it has looked before it was back
        attempts.look(view.table)
        await view.change(60.0)  # a table that was read before this began is looked at, too


async def _forget(view: TableView, ownership: Ownership) -> None:
    while True:
        await ownership.forget(view.table.versions)
        await view.change(60.0)  # one that came meanwhile is seen with the next
