"""Which answers are none, and what is told of them when no other replica is left. Pure.

Asked for a rollout, an engine says 200 with something in it, or what is wrong with the request: 4xx, and 501 where it
cannot do what is asked for. Whatever else comes is the replica's fault: that it failed; that it does not let us in; or,
from something that listens in an engine's place, a redirect, a success with nothing in it, a whole request that did not
arrive, or a status of its own making.
"""

from __future__ import annotations

import orjson

from adaptersync_core.errors import Unroutable
from adaptersync_core.rollouts import Row

UNABLE = 501  # every replica would be
NOT_ALLOWED = frozenset({401, 403})  # whoever asks
CLOSED = NOT_ALLOWED | {407}
REQUEST_TIMEOUT = 408
TOLD = frozenset({500, 502, 503, 504})  # a client knows what they mean; of others it is told in words
NOTHING = "replica answered 200 with nothing in it"
WORDS = 300  # characters of what a replica says that a client is told


def fault(status: int, *, as_client: bool = False) -> str:
    """What is wrong with an answer of this status, or nothing.

    `as_client`: the replica was asked with the client's own authorization, or with none as the client had none.
    """
    if status in CLOSED and not (as_client and status in NOT_ALLOWED):
        return f"replica answered {status}: it does not let this router in"
    if status == REQUEST_TIMEOUT or (status >= 500 and status != UNABLE):
        return f"replica answered {status}"
    return f"replica answered {status}, which answers nothing" if 200 < status < 400 else ""


def unanswered(row: Row, reason: str, body: bytes, wait_s: float) -> Unroutable:
    """What the client is told when the last replica's answer is none: its status and its words, in our form.

    One form, with the ids, says where to look whoever has failed; a body as it came may be a page of some proxy.
    """
    said = _words(body)
    if row.status in CLOSED:
        next_step = "see router.replica_keys_path: which token this replica wants"
    else:
        next_step = "see the replica's log" if row.status >= 500 else "see what listens at the replica's address"
    return Unroutable(
        f"no replica could answer: {reason}{said and f': {said}'}",
        status=row.status if row.status in TOLD else 502,
        retry_after_s=wait_s or None,
        next_step=next_step,
        request=row.request_id,
        replica=row.replica,
        version=row.version,
    )


def _words(body: bytes) -> str:
    """The message in an error's body, as OpenAI's API and FastAPI have it; else the body's beginning."""
    said: object
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError:
        said = body[: 4 * WORDS].decode(errors="replace")
    for name in ("error", "message", "detail"):
        if isinstance(said, dict) and name in said:
            said = said[name]
    text = said if isinstance(said, str) else body[: 4 * WORDS].decode(errors="replace")
    return " ".join(text.split())[:WORDS]
