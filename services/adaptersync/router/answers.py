"""Answers the router gives itself, in the shape OpenAI clients understand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import orjson

from adaptersync.router.request import Pair, Reply
from adaptersync_core.errors import AdapterSyncError, Unroutable

TYPES = {
    404: "not_found_error",
    409: "conflict_error",
    410: "gone_error",
    501: "not_implemented_error",
    502: "upstream_error",
    503: "overloaded_error",
    504: "timeout_error",
    505: "invalid_request_error",  # of HTTP as it is spoken here
}


def json_answer(body: object, *, status: int = 200, headers: Sequence[Pair] = ()) -> Reply:
    return Reply(status, (*headers, (b"content-type", b"application/json")), orjson.dumps(body))


def refusal(error: AdapterSyncError, *, status: int, headers: Sequence[Pair] = ()) -> Reply:
    """One line of reason; `Retry-After` where coming back makes sense."""
    if isinstance(error, Unroutable) and error.retry_after_s is not None:
        headers = (*headers, (b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
    body = {
        "error": {
            "message": str(error),
            "type": TYPES.get(status, "invalid_request_error" if status < 500 else "api_error"),
            "code": error.code,
            "param": "model" if "model" in error.ids else error.ids.get("field"),
        }
    }
    return json_answer(body, status=status, headers=headers)
