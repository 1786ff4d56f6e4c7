"""What passes between a request here and a request to a replica: which headers go on, how much of an answer is read."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import ClientPayloadError, ClientResponse, web

from adaptersync.router.connection import Answer
from adaptersync_core.headers import GATE, SUBSTITUTED

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
# written anew with each request and answer; a compressed body has been unpacked when we have it
_NOT_SENT = (*_HOP, "host", "content-length", "content-encoding", "expect", GATE, SUBSTITUTED)
_NOT_ANSWERED = frozenset((*_HOP, "content-length"))
_NOT_SENT_RAW = frozenset(name.encode() for name in _NOT_SENT)


def request_headers(request: web.Request, request_id: str) -> list[tuple[bytes, bytes]]:
    """What a replica is sent of a client's headers; its own request id, if it has one, stays."""
    sent = []
    named = False
    for name, value in request.raw_headers:
        lower = name.lower()
        if lower not in _NOT_SENT_RAW:
            sent.append((name, value))
            named = named or lower == b"x-request-id"
    if not named:
        sent.append((b"x-request-id", request_id.encode()))
    return sent


def answer_headers(answer: Answer, ours: Mapping[str, str]) -> list[tuple[str, str]]:
    """What a client is sent of a replica's headers, with ours, in lower case, in place of any of the same name."""
    sent = [
        (name, value)
        for name, value in answer.headers
        if (lower := name.lower()) not in _NOT_ANSWERED and lower not in ours
    ]
    sent += ours.items()
    return sent


async def read_whole(answer: ClientResponse, limit: int) -> bytes:
    """The body of an answer that must not be larger than `limit` bytes; ClientPayloadError when it is."""
    body = bytearray()
    async for chunk in answer.content.iter_any():
        body += chunk
        if len(body) > limit:
            raise ClientPayloadError("answer is larger than the limit")
    return bytes(body)
