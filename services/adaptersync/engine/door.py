"""The door of a vLLM server: open for generation, closed for everything that changes or reveals its state.

An allow list, since a server has some fifty routes and each release adds some; one careless call to `/collective_rpc`
ends the process. Whoever holds the agent's present token may pass. The agent writes the token into a file that only it
and the server may read, and a new one when it starts: a frozen agent that wakes up later is turned away.

Started with `--middleware adaptersync.engine.door.Door` and ADAPTERSYNC_DOOR_TOKEN_FILE.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from adaptersync_core.own_place import foreign_part

TOKEN_FILE = "ADAPTERSYNC_DOOR_TOKEN_FILE"  # noqa: S105 - the name of a variable
TOKEN_HEADER = b"x-adaptersync-token"
IDENTITY = "/adaptersync/engine"  # answered by the door itself: this life of the process, and its adapters' numbers
OPEN = frozenset(
    {
        ("GET", "/health"),
        ("GET", "/ping"),
        ("GET", "/metrics"),
        ("GET", "/version"),
        ("GET", "/v1/models"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
    }
)
TOKEN_BYTES = 4096  # largest token file
REFUSAL = {
    "error": {
        "message": "this call needs the token of the replica's agent",
        "type": "PermissionDenied",
        "param": None,
        "code": 403,
    }
}

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Door:
    """ASGI middleware. The server does not start without a token file's name: an open door would go unnoticed."""

    def __init__(self, app: App) -> None:
        name = os.environ.get(TOKEN_FILE, "")
        if not name:
            raise RuntimeError(f"{TOKEN_FILE} is not set; it names the file in which the agent keeps its token")
        self._app = app
        self._file = Path(name)
        self._life = secrets.token_hex(8)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # anything but an exact match needs the token, so no spelling of a path slips through
        if scope["type"] == "lifespan" or (scope["type"] == "http" and (scope["method"], scope["path"]) in OPEN):
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        elif not shows_token([value for name, value in scope["headers"] if name == TOKEN_HEADER], self._file):
            await _answer(send, 403, REFUSAL)
        elif scope["path"] == IDENTITY:
            await _answer(send, 200, self._identity(scope))
        else:
            await self._app(scope, receive, send)

    def _identity(self, scope: Scope) -> dict[str, Any]:
        requests = scope["app"].state.openai_serving_models.lora_requests
        adapters = {name: {"number": lora.lora_int_id, "path": lora.lora_path} for name, lora in requests.items()}
        return {"life": self._life, "pid": os.getpid(), "adapters": adapters}


def shows_token(shown: Sequence[bytes], file: Path) -> bool:
    """Whether a call's token headers are exactly one, the present one. Without a readable token nobody has it."""
    try:
        if foreign_part(file):  # a stranger's token, left where the agent's would be
            return False
        with file.open("rb") as opened:
            present = opened.read(TOKEN_BYTES + 1)
    except OSError:
        return False
    if len(present) > TOKEN_BYTES:  # no token of ours
        return False
    present = present.strip()
    return len(shown) == 1 and bool(present) and hmac.compare_digest(shown[0], present)


async def _answer(send: Send, status: int, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
