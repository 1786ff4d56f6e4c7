"""Token counts from the end of an engine's answer, without reading the answer. Pure.

The engine writes `usage` after the choices, in a plain answer and in the last event of a stream that was asked for
it. A quoted text cannot look like it: inside a JSON string every quote is escaped.
"""

from __future__ import annotations

import re
from typing import NamedTuple

TAIL_BYTES = 2048  # of an answer are looked at

_NAMES = (b"prompt_tokens", b"completion_tokens", b"cached_tokens")
_COUNT = re.compile(rb'"(prompt_tokens|completion_tokens|cached_tokens)":\s*([0-9]{1,12})')


class Usage(NamedTuple):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


NO_USAGE = Usage()


def read_usage(tail: bytes) -> Usage:
    """What the last `usage` in these bytes says."""
    start = tail.rfind(b'"usage":')
    if start < 0:
        return NO_USAGE
    counts: dict[bytes, bytes] = dict(_COUNT.findall(tail, start))
    return Usage(*(int(counts[name]) if name in counts else None for name in _NAMES))
