"""Which path is whose, and what the router says to paths that are nobody's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from adaptersync.router.answers import refusal
from adaptersync.router.request import Refused, Reply, Request
from adaptersync.router.resolve import RETRY_S
from adaptersync_core.errors import Unroutable

# calls that change engines: a router would reach one replica of many
ENGINE_CALLS = frozenset(
    (
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
    )
)

Handler = Callable[[Request], Awaitable[Reply | None]]
Refuser = Callable[[Request, Unroutable], Reply]


class Paths:
    """The service behind the server: `served` are handlers by method, by path; `refused` is told of what is none."""

    def __init__(self, served: Mapping[str, Mapping[str, Handler]], refused: Refuser) -> None:
        self._served = served
        self._refused = refused

    def handle(self, request: Request) -> Awaitable[Reply | None]:
        methods = self._served.get(request.path)
        if methods is not None:
            handler = methods.get("GET" if request.method == "HEAD" else request.method)
            if handler is not None:
                return handler(request)
        return self._nobody(request, methods)

    def refuse(self, request: Request, error: Refused) -> Reply:
        retry_after_s = RETRY_S if error.status == 503 else None
        return self._refused(request, Unroutable(error.reason, status=error.status, retry_after_s=retry_after_s))

    async def _nobody(self, request: Request, methods: Mapping[str, Handler] | None) -> Reply:
        if methods is not None:
            allowed = ", ".join(sorted(methods))
            error = Unroutable(
                "wrong method", status=405, next_step=f"use {allowed}", path=request.path[:96], method=request.method
            )
            return refusal(error, status=405, headers=[(b"allow", allowed.encode())])
        if request.path in ENGINE_CALLS or request.path.startswith("/adapters/"):
            error = Unroutable(
                "router does not change engines: a call would reach one replica of many",
                status=501,
                next_step="run `adaptersync relay` on the trainer's host and give it as vllm_server_base_url",
                path=request.path[:96],
            )
            return refusal(error, status=501)
        error = Unroutable(
            "no such path here",
            status=404,
            next_step=f"use one of {' '.join(sorted(self._served))}",
            path=request.path[:96],
            method=request.method,
        )
        return refusal(error, status=404)
