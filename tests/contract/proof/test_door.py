"""The door before a real server: every route it has, by its own list, and those it does not tell of."""

from __future__ import annotations

import base64
import http.client
import os

import pytest

from adaptersync.engine.door import IDENTITY, OPEN, REFUSAL
from adaptersync_core.vllm import TOKEN_HEADER
from contract.proof.conftest import Bench
from support.engines import MODEL, Engine

UNTOLD = [("GET", "/openapi.json"), ("GET", "/docs"), ("GET", "/redoc"), ("GET", "/docs/oauth2-redirect"), ("GET", "/")]
METHODS = ("get", "post", "put", "delete", "patch", "head", "options", "trace")


def _routes(served: Engine) -> list[tuple[str, str]]:
    paths = served.get("/openapi.json").json["paths"]
    told = [(method.upper(), path) for path, methods in paths.items() for method in methods if method in METHODS]
    assert len(told) > 30
    assert ("POST", "/collective_rpc") in told
    assert ("POST", "/v1/load_lora_adapter") in told
    return [(method, path.replace("{", "").replace("}", "")) for method, path in told + UNTOLD + [("GET", IDENTITY)]]


@pytest.mark.parametrize("shown", ["no token", "an old token"])
def test_every_route_is_closed_but_those_for_generation(served: Engine, shown: str) -> None:
    routes = _routes(served)
    headers = {TOKEN_HEADER: ""}
    assert served.token_file is not None
    if shown == "an old token":
        headers = {TOKEN_HEADER: served.token}
        served.token_file.write_text("a newer token than that")
    closed = [route for route in routes if route not in OPEN]
    answers = {route: served.call(*route, {} if route[0] == "POST" else None, headers=headers) for route in closed}
    assert {route: answer.status for route, answer in answers.items()} == dict.fromkeys(closed, 403)
    assert all(answer.json == REFUSAL for answer in answers.values())
    assert served.get("/health").status == 200


def test_open_routes_exist(served: Engine) -> None:
    """An open route that a server lacks would be a mistake in the list."""
    for method, path in OPEN:
        answer = served.call(method, path, {} if method == "POST" else None, headers={TOKEN_HEADER: ""})
        assert answer.status in (200, 400), (method, path)


@pytest.mark.parametrize("method", [method.upper() for method in METHODS] + ["CONNECT", "PROPFIND"])
def test_other_methods_of_open_routes_are_closed(served: Engine, method: str) -> None:
    for path in {path for _, path in OPEN}:
        if (method, path) not in OPEN:
            assert served.call(method, path, headers={TOKEN_HEADER: ""}).status == 403, path


async def test_loads_need_the_present_token_and_generation_none(bench: Bench) -> None:
    manifest = bench.version()
    name, served = manifest.adapter_id, bench.served
    load = {"lora_name": name, "lora_path": str(bench.path(manifest))}
    assert served.call("POST", "/v1/load_lora_adapter", load, headers={TOKEN_HEADER: "guessed"}).status == 403
    assert served.listed() == {}
    assert served.call("POST", "/v1/load_lora_adapter", load).status == 200
    body = {"model": name, "prompt": "hello", "max_tokens": 4, "stream": True}
    assert served.call("POST", "/v1/completions", body, headers={TOKEN_HEADER: ""}).events
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    assert served.call("POST", "/v1/chat/completions", chat, headers={TOKEN_HEADER: ""}).json["choices"]
    assert served.call("DELETE", f"/adapters/{name}", headers={TOKEN_HEADER: "guessed"}).status == 403
    assert name in served.listed()


def test_a_refused_call_with_a_body_leaves_the_connection_usable(served: Engine) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)
    try:
        for _ in range(3):
            connection.request("POST", "/collective_rpc", b"x" * 200_000)
            assert _status(connection) == 403
            connection.request("GET", "/health")
            assert _status(connection) == 200
    finally:
        connection.close()


def test_websockets_are_refused(served: Engine) -> None:
    """vLLM has one for speech; a socket opened before a token was changed would outlive it."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": base64.b64encode(os.urandom(16)).decode(),
        TOKEN_HEADER: served.token,
    }
    try:
        connection.request("GET", "/v1/realtime", headers=upgrade)
        assert _status(connection) == 403
    finally:
        connection.close()


def _status(connection: http.client.HTTPConnection) -> int:
    with connection.getresponse() as answer:
        answer.read()
        return answer.status


@pytest.fixture(autouse=True)
def _token(served: Engine) -> object:
    """Each test begins with the token of the test before it gone."""
    assert served.token_file is not None
    served.token_file.write_text("the token of this test")
    return served.token_file
