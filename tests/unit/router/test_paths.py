"""What the router says to what is nobody's, and to what did not arrive as it should."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import orjson
import pytest

from adaptersync.router.answers import refusal
from adaptersync.router.paths import ENGINE_CALLS, Paths
from adaptersync.router.request import Reply, Request
from adaptersync.router.resolve import RETRY_S
from adaptersync.router.server import Limits, Server
from adaptersync_core.errors import Unroutable
from support.raw_client import LIMITS, Client, Got

GET, POST = b"GET %b HTTP/1.1\r\n\r\n", b"POST %b HTTP/1.1\r\ncontent-length: 0\r\n\r\n"


async def _served(request: Request) -> Reply:
    return Reply(200, (), b"served")


def _refused(request: Request, error: Unroutable) -> Reply:
    return refusal(error, status=error.status)


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    server = Server(Limits(**LIMITS))
    host, port = await server.listen(
        Paths({"/get": {"GET": _served}, "/both": {"GET": _served, "POST": _served}}, refused=_refused), "127.0.0.1", 0
    )
    client = Client(*await asyncio.open_connection(host, port))
    yield client
    await server.stop(0.0)
    await client.leave()


async def _ask(client: Client, raw: bytes) -> tuple[Got, dict[str, str]]:
    client.say(raw)
    got = await client.answer()
    return got, orjson.loads(got.body)["error"]


async def test_a_wrong_method_is_told_the_right_ones(client: Client) -> None:
    got, error = await _ask(client, POST % b"/get")
    assert (got.status, got.headers["allow"]) == (405, "GET")
    got, error = await _ask(client, b"PUT /both HTTP/1.1\r\n\r\n")
    assert (got.status, got.headers["allow"], error["type"]) == (405, "GET, POST", "invalid_request_error")


async def test_who_may_get_may_ask_for_the_head(client: Client) -> None:
    client.say(b"HEAD /get HTTP/1.1\r\n\r\n" + GET % b"/get?x=y")
    assert (await client.answer(bodiless=True)).headers["content-length"] == "6"
    assert (await client.answer()).body == b"served"


async def test_a_path_of_nobody_is_told_what_there_is(client: Client) -> None:
    got, error = await _ask(client, GET % b"/none")
    assert got.status == 404
    assert "use one of /both /get" in error["message"]


@pytest.mark.parametrize("path", [*sorted(ENGINE_CALLS), "/adapters/a"])
async def test_engines_are_not_changed_through_the_router(client: Client, path: str) -> None:
    got, error = await _ask(client, POST % path.encode())
    assert (got.status, error["type"]) == (501, "not_implemented_error")
    assert "adaptersync relay" in error["message"]


@pytest.mark.parametrize(
    ("raw", "status", "kind"),
    [
        (b"hello\r\n\r\n", 400, "invalid_request_error"),
        (b"POST /both HTTP/1.1\r\ncontent-length: 99999999\r\n\r\n", 413, "invalid_request_error"),
        (b"POST /both HTTP/1.1\r\ncontent-encoding: br\r\n\r\n", 415, "invalid_request_error"),
        (b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\n\r\n", 431, "invalid_request_error"),
        (b"GET / HTTP/2.0\r\n\r\n", 505, "invalid_request_error"),
    ],
)
async def test_what_did_not_arrive_as_it_should_is_said_as_clients_know_it(
    client: Client, raw: bytes, status: int, kind: str
) -> None:
    got, error = await _ask(client, raw)
    assert (got.status, error["type"]) == (status, kind)
    assert "retry-after" not in got.headers


async def test_who_may_come_again_is_told_when() -> None:
    served = Server(Limits(**LIMITS | {"connections": 0}))
    host, port = await served.listen(Paths({}, refused=_refused), "127.0.0.1", 0)
    late = Client(*await asyncio.open_connection(host, port))
    got = await late.answer()
    assert (got.status, int(got.headers["retry-after"])) == (503, max(1, round(RETRY_S)))
    await served.stop(0.0)
    await late.leave()
