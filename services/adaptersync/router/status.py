"""What the router says about itself and the fleet: /health, /v1/models, /metrics, and what it will not do."""

from __future__ import annotations

import time
from typing import Any

import orjson
from aiohttp import ClientError, ClientSession, ClientTimeout, web

from adaptersync.router.admission import Admission
from adaptersync.router.answers import json_answer, refusal
from adaptersync.router.ledger import Ledger
from adaptersync.router.metrics import Metrics
from adaptersync.router.outages import Outages
from adaptersync.router.ownership import Ownership
from adaptersync.router.resolve import RETRY_S
from adaptersync.router.table import TableView
from adaptersync.router.upstream import read_whole
from adaptersync_core.errors import Unroutable
from adaptersync_core.table import Table

MODELS_TIMEOUT_S = 5.0
MODELS_LIMIT = 1 << 20  # bytes of a replica's list of models

# calls that change engines: a router would reach one replica of many
ENGINE_CALLS = (
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/pause",
    "/resume",
    "/sleep",
    "/wake_up",
    "/reset_prefix_cache",
    "/collective_rpc",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/adapters",
    "/adapters/{name:.*}",
)


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
        self._model_len: dict[str, int] = {}  # by engine epoch: what the replicas of the present table say

    async def health(self, request: web.Request) -> web.Response:
        """200 while no fewer than `min_ready` replicas can be sent to, else 503; the body says why for each."""
        view, table, now = self._view, self._view.table, time.monotonic()
        try:
            view.serving()
            reason = ""
        except Unroutable as error:
            reason = str(error)
        serving = [name for name in view.ready if not self._outages.out(name, now)]
        if not reason and len(serving) < table.min_ready:
            reason = f"{len(serving)} of at least {table.min_ready} replicas serve"
        if not reason and self._refuses_unrecorded and self._ledger.full:
            reason = "ledger's spool is full: nothing more can be recorded"
        age_s = view.age_s()
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
                    "reason": "this router could not reach it" if self._outages.out(name, now) else member.reason,
                    "in_flight": self._ownership.inflight[name],
                }
                for name, member in table.members.items()
            },
            "held": self._admission.held,
            "ledger": {
                "waiting": self._ledger.waiting,
                "written": self._ledger.written,
                "rewritten": self._ledger.rewritten,
                "lost": self._ledger.lost,
                "untold": self._ledger.untold,
                "spool_bytes": self._ledger.spool_used,
                "full": self._ledger.full,
            },
            "redis": {
                "control": "reachable" if view.reachable else "away: serving the last table",
                "cache": "reachable" if self._ownership.reachable else "away: deciding alone",
            },
        }
        return json_answer(body, status=503 if reason else 200)

    async def models(self, request: web.Request) -> web.Response:
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

    async def metrics(self, request: web.Request) -> web.Response:
        view, metrics = self._view, self._metrics
        metrics.keep_replicas(view.table.members)
        for name in view.table.members:
            metrics.inflight.labels(name).set(self._ownership.inflight[name])
        metrics.held.set(self._admission.held)
        metrics.generation.set(view.table.generation)
        metrics.table_age_s.set(view.age_s())
        metrics.ledger_waiting.set(self._ledger.waiting)
        metrics.ledger_written.set(self._ledger.written)
        metrics.ledger_lost.set(self._ledger.lost)
        metrics.ledger_untold.set(self._ledger.untold)
        metrics.ledger_spool.set(self._ledger.spool_used)
        metrics.cache_reachable.set(self._ownership.reachable)
        return web.Response(body=metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

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
        ready = [table.members[name] for name in self._view.ready]
        for member in ready:
            if member.engine_epoch in self._model_len:
                return self._model_len[member.engine_epoch]
        for member in ready:
            try:
                async with self._session.get(
                    member.url.rstrip("/") + "/v1/models", timeout=ClientTimeout(total=MODELS_TIMEOUT_S)
                ) as answer:
                    listed = orjson.loads(await read_whole(answer, MODELS_LIMIT))["data"]
                model_len = next(int(card["max_model_len"]) for card in listed if not card.get("parent"))
            except (ClientError, TimeoutError, OSError, ValueError, LookupError, TypeError, StopIteration):
                continue
            self._model_len = {member.engine_epoch: model_len}
            return model_len
        raise Unroutable("no ready replica says how long a prompt may be", status=503, retry_after_s=RETRY_S)


async def refuse_engine_call(request: web.Request) -> web.Response:
    error = Unroutable(
        "router does not change engines: a call would reach one replica of many",
        status=501,
        next_step="run `adaptersync relay` on the trainer's host and give it as vllm_server_base_url",
        path=request.path,
    )
    return refusal(error, status=501)


async def refuse_path(request: web.Request) -> web.Response:
    """404, or 405 where only the method is wrong."""
    served = {
        route.resource.canonical: route.method
        for route in request.app.router.routes()
        if route.resource is not None and route.method not in ("*", "HEAD")
    }
    method = served.get(request.path)
    if method is not None:
        error = Unroutable(
            "wrong method", status=405, next_step=f"use {method}", path=request.path, method=request.method
        )
        return refusal(error, status=405, headers={"Allow": method})
    error = Unroutable(
        "no such path here",
        status=404,
        next_step=f"use one of {' '.join(sorted(served))}",
        path=request.path[:96],
        method=request.method,
    )
    return refusal(error, status=404)
