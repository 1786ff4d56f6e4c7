"""What the router says about itself and the fleet: /health, /v1/models, /metrics."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
from aiohttp import ClientError, ClientPayloadError, ClientResponse, ClientSession, ClientTimeout

from adaptersync.router.admission import Admission
from adaptersync.router.answers import json_answer, refusal
from adaptersync.router.credentials import Credentials
from adaptersync.router.ledger import Ledger
from adaptersync.router.metrics import Metrics, text
from adaptersync.router.outages import Outages
from adaptersync.router.ownership import Ownership
from adaptersync.router.request import Reply, Request
from adaptersync.router.resolve import RETRY_S
from adaptersync.router.server import Server
from adaptersync.router.table import TableView
from adaptersync.router.workers import PUT_S, Shares
from adaptersync_core.errors import Unroutable
from adaptersync_core.table import Table

CIRCUIT = {"closed": 0.0, "half open": 1.0, "open": 2.0}
MODELS_TIMEOUT_S = 5.0
MODELS_LIMIT = 1 << 20  # bytes of a replica's list of models


class Status:
    def __init__(
        self,
        *,
        name: str,
        base_model: str,
        refuses_unrecorded: bool,
        session: ClientSession,
        view: TableView,
        admission: Admission,
        ownership: Ownership,
        outages: Outages,
        ledger: Ledger,
        metrics: Metrics,
        server: Server,
        shares: Shares,
        worker: int,
        credentials: Credentials | None = None,
    ) -> None:
        self._name = name
        self._base_model = base_model
        self._refuses_unrecorded = refuses_unrecorded
        self._session = session
        self._view = view
        self._admission = admission
        self._ownership = ownership
        self._outages = outages
        self._ledger = ledger
        self._metrics = metrics
        self._shares = shares
        self._worker = worker
        self._credentials = credentials
        self._server = server
        self._model_len: dict[str, int] = {}  # by engine epoch: what the replicas of the present table say

    async def health(self, request: Request) -> Reply:
        """200 while no fewer than `min_ready` replicas can be sent to, else 503; the body says why for each.

        Replicas that are silent and kept at the floor are still asked, and every router is told the same of them: a
        balancer that took this one away would gain nothing. The body says `degraded`, and the status 200.
        """
        view, table, now = self._view, self._view.table, time.monotonic()
        try:
            view.serving()
            reason = ""
        except Unroutable as error:
            reason = str(error)
        serving = [name for name in view.ready if self._outages.state(name, now) != "open"]
        if not reason and len(serving) < table.min_ready:
            reason = f"{len(serving)} of at least {table.min_ready} replicas serve"
        if not reason and self._refuses_unrecorded and self._ledger.full:
            reason = "ledger's spool is full: nothing more can be recorded"
        refuses = bool(reason)
        if not reason and view.ready and len(table.silent()) == len(view.ready):
            reason = f"no ready replica is heard of: {table.members[view.ready[0]].reason}"
        age_s = view.age_s()
        lacked = self._outages.lacking.report()
        body = {
            "status": "degraded" if reason else "ok",
            "reason": reason,
            "router": self._name,
            "table": {
                "incarnation": table.incarnation,
                "generation": table.generation,
                "age_s": None if age_s == float("inf") else round(age_s, 3),
            },
            "runs": {name: run.current for name, run in table.runs.items()},
            "replicas": {
                name: {
                    "state": member.state,
                    "reason": self._outages.why(name, now) or member.reason,
                    "circuit": self._outages.state(name, now),
                    "missing": lacked.get(name, []),
                    "in_flight": self._in_flight(name),
                }
                for name, member in table.members.items()
            },
            "held": self._admission.held,
            "ledger": {
                "waiting": self._ledger.waiting,
                **{
                    name: self._metrics.counted(f"ledger_{name}") for name in ("written", "rewritten", "lost", "untold")
                },
                "spool_bytes": self._ledger.spool_used,
                "full": self._ledger.full,
            },
            "redis": {
                "control": "reachable" if view.reachable else "away: serving the last table",
                "cache": self._cache(),
            },
        }
        return json_answer(body, status=503 if refuses else 200)

    async def models(self, request: Request) -> Reply:
        """The base model first, then what may be asked for now."""
        try:
            table = self._view.serving()
            model_len = await self._max_model_len(table)
        except Unroutable as error:
            return refusal(error, status=error.status)
        cards = [{"id": self._base_model, "object": "model", "owned_by": "vllm", "max_model_len": model_len}]
        for adapter_id, version in sorted(table.versions.items()):
            if table.routable(adapter_id):
                cards.append(self._card(adapter_id, model_len, created=int(version.published_at)))
        for name, run in sorted(table.runs.items()):
            if run.current and table.routable(run.current):
                cards.append(self._card(name, model_len, created=0, root=run.current))
        return json_answer({"object": "list", "data": cards})

    async def metrics(self, request: Request) -> Reply:
        """Of all workers; of the others as of a moment ago. What was told is not less when this one was replaced."""
        figures = [self._put(), *self._shares.others(self._worker)]
        told = await asyncio.to_thread(text, figures)  # of a thousand replicas it takes long, and requests go on
        return Reply(200, ((b"content-type", b"text/plain; version=0.0.4; charset=utf-8"),), told)

    async def share(self) -> None:
        """Leave this worker's figures for the others; runs until cancelled."""
        while True:
            self._put()
            await asyncio.sleep(PUT_S)

    def _put(self) -> bytes:
        self._measure()
        figures = self._metrics.encode()
        self._shares.put(self._worker, figures)
        return figures

    def _measure(self) -> None:
        view, metrics, ledger, now = self._view, self._metrics, self._ledger, time.monotonic()
        metrics.keep(replicas=view.table.members, versions={self._base_model, *view.table.versions})
        for name, member in view.table.members.items():
            metrics.gauge("ready", member.state == "ready", name)
            metrics.gauge("inflight", self._in_flight(name), name)
            metrics.gauge("circuit", CIRCUIT[self._outages.state(name, now)], name)
        metrics.gauge("held", self._admission.held)
        metrics.gauge("connections", len(self._server.connections))
        metrics.gauge("table_generation", view.table.generation)
        metrics.gauge("table_age_seconds", view.age_s())
        metrics.gauge("ledger_waiting", ledger.waiting)
        metrics.gauge("ledger_spool_bytes", ledger.spool_used)
        metrics.gauge("ledger_spool_limit_bytes", ledger.spool_limit)
        metrics.gauge("cache_reachable", self._ownership.reachable)

    def _cache(self) -> str:
        if self._ownership.reachable:
            return "reachable"
        refusal = self._ownership.refusal
        return f"refuses, deciding alone: {refusal}" if refusal else "away: deciding alone"

    def _in_flight(self, replica: str) -> int:
        """At all its ranks."""
        return sum(self._ownership.inflight[rank] for rank in self._view.ranks((replica,)))

    def _card(self, name: str, model_len: int, *, created: int, root: str = "") -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "adaptersync",
            "root": root or name,
            "parent": self._base_model,
            "max_model_len": model_len,
        }

    async def _max_model_len(self, table: Table) -> int:
        """What the fleet can take: asked of one replica, remembered for the life of its engine."""
        ready = {name: table.members[name] for name in self._view.ready}
        for member in ready.values():
            if member.engine_epoch in self._model_len:
                return self._model_len[member.engine_epoch]
        for name, member in ready.items():
            shown = self._credentials.shown(name, ()) if self._credentials is not None else ()
            try:
                async with self._session.get(
                    member.url.rstrip("/") + "/v1/models",
                    headers={key.decode(): value.decode() for key, value in shown},
                    timeout=ClientTimeout(total=MODELS_TIMEOUT_S),
                    allow_redirects=False,  # a token is for whom it is for
                ) as answer:
                    listed = orjson.loads(await _read_whole(answer, MODELS_LIMIT))["data"]
                model_len = next(int(card["max_model_len"]) for card in listed if not card.get("parent"))
            except (ClientError, TimeoutError, OSError, ValueError, LookupError, TypeError, StopIteration):
                continue
            self._model_len = {member.engine_epoch: model_len}
            return model_len
        raise Unroutable("no ready replica says how long a prompt may be", status=503, retry_after_s=RETRY_S)


async def _read_whole(answer: ClientResponse, limit: int) -> bytes:
    """The body of an answer that must not be larger than `limit` bytes; ClientPayloadError when it is."""
    body = bytearray()
    async for chunk in answer.content.iter_any():
        body += chunk
        if len(body) > limit:
            raise ClientPayloadError("answer is larger than the limit")
    return bytes(body)
