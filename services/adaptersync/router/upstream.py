"""What passes between a request here and a request to a replica: which headers go on, how much of an answer is read."""

from __future__ import annotations

import io
from collections.abc import Mapping

from aiohttp import ClientPayloadError, ClientResponse, web
from aiohttp.typedefs import LooseHeaders

from adaptersync_core.headers import GATE, SUBSTITUTED

_ONE_WRITE = 256 << 10  # bytes

# headers that belong to one connection
_HOP = (
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
)
# aiohttp writes these itself; a compressed body has been unpacked when we have it
_NOT_SENT = (*_HOP, "host", "content-length", "content-encoding", "expect", GATE, SUBSTITUTED)
_NOT_ANSWERED = (*_HOP, "content-length")


def request_headers(request: web.Request, request_id: str) -> LooseHeaders:
    """What a replica is sent of a client's headers; its own request id, if it has one, stays."""
    sent = request.headers.copy()
    for name in _NOT_SENT:
        sent.popall(name, None)
    sent.setdefault("x-request-id", request_id)
    return sent


def answer_headers(answer: ClientResponse, ours: Mapping[str, str]) -> LooseHeaders:
    """What a client is sent of a replica's headers, with ours in place of any of the same name."""
    sent = answer.headers.copy()
    for name in _NOT_ANSWERED:
        sent.popall(name, None)
    sent.update(ours)
    return sent


def payload(body: bytes) -> bytes | io.BytesIO:
    """The body as the client takes it: a large one piece by piece, so that writing it does not hold the loop up."""
    return body if len(body) <= _ONE_WRITE else io.BytesIO(body)


async def read_whole(answer: ClientResponse, limit: int) -> bytes:
    """The body of an answer that must not be larger than `limit` bytes; ClientPayloadError when it is."""
    body = bytearray()
    async for chunk in answer.content.iter_any():
        body += chunk
        if len(body) > limit:
            raise ClientPayloadError("answer is larger than the limit")
    return bytes(body)
