"""The door by itself, before an application that only notes what reached it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from adaptersync.engine.door import IDENTITY, OPEN, REFUSAL, TOKEN_BYTES, TOKEN_FILE, Door

TOKEN = b"a token of the agent"
HEADER = b"x-adaptersync-token"

Headers = list[tuple[bytes, bytes]]


class Lora:
    def __init__(self, number: int, path: str) -> None:
        self.lora_int_id = number
        self.lora_path = path


class Behind:
    """What stands behind the door. `reached` are the scopes that got there."""

    def __init__(self) -> None:
        self.reached: list[MutableMapping[str, Any]] = []
        self.state = self
        self.openai_serving_models = self
        self.lora_requests = {"run-v1-0123456789ab": Lora(3, "/staged/run-v1-0123456789ab")}

    async def __call__(self, scope: MutableMapping[str, Any], receive: object, send: Callable[..., Any]) -> None:
        self.reached.append(scope)
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})


class Before:
    """A server before the door: calls it, and keeps what it sends."""

    def __init__(self, file: Path) -> None:
        self.behind = Behind()
        self.file = file
        self.file.write_bytes(TOKEN)
        self.door = Door(self.behind)
        self.sent: list[MutableMapping[str, Any]] = []

    async def call(self, kind: str = "http", **scope: Any) -> None:
        async def receive() -> MutableMapping[str, Any]:
            raise AssertionError("the door reads no body")

        async def send(message: MutableMapping[str, Any]) -> None:
            self.sent.append(message)

        await self.door({"type": kind, "app": self.behind, **scope}, receive, send)

    async def ask(self, method: str, path: str, headers: Headers | None = None) -> int:
        self.sent.clear()
        await self.call(method=method, path=path, headers=headers or [])
        return int(self.sent[0]["status"])

    async def passes(self, *tokens: bytes) -> bool:
        return await self.ask("POST", "/pause", [(HEADER, token) for token in tokens]) == 204


@pytest.fixture
def before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Before:
    monkeypatch.setenv(TOKEN_FILE, str(tmp_path / "token"))
    return Before(tmp_path / "token")


@pytest.mark.parametrize(("method", "path"), sorted(OPEN))
async def test_generation_is_open(before: Before, method: str, path: str) -> None:
    before.file.unlink()
    assert await before.ask(method, path) == 204
    assert len(before.behind.reached) == 1


@pytest.mark.parametrize("path", ["/collective_rpc", "/v1/load_lora_adapter", "/nowhere", "/", ""])
async def test_the_rest_needs_the_token(before: Before, path: str) -> None:
    assert await before.ask("POST", path) == 403
    assert before.behind.reached == []
    start, body = before.sent
    assert json.loads(body["body"]) == REFUSAL
    assert dict(start["headers"]) == {
        b"content-type": b"application/json",
        b"content-length": str(len(body["body"])).encode(),
    }
    assert await before.ask("POST", path, [(b"host", b"x"), (HEADER, TOKEN), (b"accept", b"*/*")]) == 204
    assert len(before.behind.reached) == 1


SPELLINGS = [
    *("/health/", "//health", "/HEALTH", "/health ", " /health", "/health?x", "/health#x", "/health;x", "/health\x00"),
    *("health", "/./health", "/x/../health", "http://host/health", "/v1/models/", "/v1//models", "/v1/models/x"),
    *("/metrics/", "/v1/completions/", "/v1/completions/../../pause", "/v1/completions%2f..%2f..%2fpause"),
    *("/ｈealth", "/health\u200b", "/v1\\models", "/root/v1/completions", "*"),
]


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", SPELLINGS)
async def test_only_the_exact_path_is_open(before: Before, method: str, path: str) -> None:
    assert await before.ask(method, path) == 403
    assert before.behind.reached == []


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("get", "/health"), ("HEAD", "/health"), ("POST", "/health"), ("OPTIONS", "/v1/completions")),
        *(("GET", "/v1/completions"), ("post", "/v1/completions"), ("PUT", "/v1/models"), ("DELETE", "/v1/models")),
        *(("POST\n", "/v1/completions"), ("CONNECT", "/v1/completions"), ("", "/health")),
    ],
)
async def test_only_the_exact_method_is_open(before: Before, method: str, path: str) -> None:
    assert await before.ask(method, path) == 403


@given(st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH"]), st.text(max_size=40))
@example("POST", "/v1/completions\n")
async def test_no_other_path_is_open(tmp_path_factory: pytest.TempPathFactory, method: str, path: str) -> None:
    os.environ[TOKEN_FILE] = str(tmp_path_factory.mktemp("door") / "token")
    try:
        before = Before(Path(os.environ[TOKEN_FILE]))
    finally:
        del os.environ[TOKEN_FILE]
    assert (await before.ask(method, path) == 204) == ((method, path) in OPEN)


async def test_the_token_is_one_header_of_that_value(before: Before) -> None:
    assert await before.passes(TOKEN)
    for tokens in (
        (),
        (b"",),
        (TOKEN + b"x",),
        (TOKEN[:-1],),
        (TOKEN.upper(),),
        (b" " + TOKEN,),
        (b"Bearer " + TOKEN,),
        (b"\xff\xfe",),
        (TOKEN, TOKEN),
        (b"x", TOKEN),
        (TOKEN, b""),
        (TOKEN + b", " + TOKEN,),
    ):
        assert not await before.passes(*tokens), tokens


@pytest.mark.parametrize("name", [b"authorization", b"x-adaptersync-token2", b"x_adaptersync_token", b"cookie"])
async def test_the_token_under_another_name_is_none(before: Before, name: bytes) -> None:
    assert await before.ask("POST", "/pause", [(name, TOKEN)]) == 403


async def test_a_new_token_shuts_out_the_old_at_once(before: Before) -> None:
    before.file.write_bytes(b"newer")
    assert not await before.passes(TOKEN)
    assert await before.passes(b"newer")


@pytest.mark.parametrize("content", [b"", b"\n", b"   \n\t", b"x" * (TOKEN_BYTES + 1), TOKEN + b" " * TOKEN_BYTES])
async def test_a_file_that_holds_no_token_lets_nobody_pass(before: Before, content: bytes) -> None:
    before.file.write_bytes(content)
    for token in (b"", content, content.strip(), content[:TOKEN_BYTES], TOKEN):
        assert not await before.passes(token)
    assert await before.ask("GET", "/health") == 204


async def test_a_file_as_long_as_a_token_may_be(before: Before) -> None:
    before.file.write_bytes(b"x" * (TOKEN_BYTES - 1) + b"\n")
    assert await before.passes(b"x" * (TOKEN_BYTES - 1))


async def test_without_the_file_nobody_passes_until_it_is_there(before: Before) -> None:
    before.file.unlink()
    assert not await before.passes(TOKEN)
    before.file.mkdir()
    assert not await before.passes(TOKEN)
    before.file.rmdir()
    before.file.write_bytes(TOKEN + b"\n")
    assert await before.passes(TOKEN)


async def test_websockets_are_closed_whatever_they_show(before: Before) -> None:
    await before.call("websocket", path="/v1/completions", headers=[(HEADER, TOKEN)])
    assert before.sent == [{"type": "websocket.close", "code": 1008}]
    assert before.behind.reached == []


async def test_the_server_starts_and_stops_through_it(before: Before) -> None:
    await before.call("lifespan")
    assert [scope["type"] for scope in before.behind.reached] == ["lifespan"]


async def test_identity_is_the_doors_own_answer(before: Before) -> None:
    assert await before.ask("GET", IDENTITY) == 403
    assert await before.ask("GET", IDENTITY, [(HEADER, TOKEN)]) == 200
    told = json.loads(before.sent[1]["body"])
    assert told["pid"] == os.getpid()
    assert told["adapters"] == {"run-v1-0123456789ab": {"number": 3, "path": "/staged/run-v1-0123456789ab"}}
    assert before.behind.reached == []
    assert await before.ask("GET", IDENTITY, [(HEADER, TOKEN)]) == 200
    assert json.loads(before.sent[1]["body"])["life"] == told["life"]


def test_each_door_is_a_life_of_its_own(before: Before) -> None:
    assert before.door._life != Door(before.behind)._life


@pytest.mark.parametrize("value", [None, ""])
def test_no_door_without_a_token_file(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv(TOKEN_FILE, raising=False)
    if value is not None:
        monkeypatch.setenv(TOKEN_FILE, value)
    with pytest.raises(RuntimeError, match=TOKEN_FILE):
        Door(Behind())
