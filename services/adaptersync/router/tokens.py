"""From a prompt of any form to the numbers that routing hashes. Pure.

Token ids are taken as they are. Text and chat messages are taken by their UTF-8 bytes, four to a number, so that a
block covers about as much text as a block of tokens does: equal beginnings give equal blocks, which is all routing
needs. What is malformed gives no numbers: the replica will say what is wrong with it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec
import orjson
from msgspec import Raw

NOTHING = Raw()  # a field that was not given

_UNIT = 4  # bytes of text in one number


def routing_tokens(prompt: Raw, messages: Raw, *, limit: int) -> tuple[Sequence[int], bool]:
    """At most `limit` numbers (each 0 to 2**32 - 1) that stand for the beginning of the prompt.

    With them, whether they stand for bytes of text; else they are the token ids that the engine will see.
    """
    try:
        return _tokens(prompt, messages, limit)
    except (msgspec.DecodeError, orjson.JSONEncodeError, RecursionError):  # numbers without bounds, depths without end
        return (), False


def _tokens(prompt: Raw, messages: Raw, limit: int) -> tuple[Sequence[int], bool]:
    if messages != NOTHING:
        # one form for equal conversations; without the closing bracket, a longer one begins like a shorter one
        canonical = orjson.dumps(msgspec.json.decode(messages), option=orjson.OPT_SORT_KEYS)
        return _text(canonical[:-1], limit), True
    if prompt == NOTHING:
        return (), False
    value = msgspec.json.decode(prompt)
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        value = value[0]  # a batch follows its first prompt
    if isinstance(value, str):
        return _text(value.encode("utf-8", "surrogatepass"), limit), True
    if isinstance(value, list):
        return _ids(value[:limit]), False
    return (), False


def _text(text: bytes, limit: int) -> Sequence[int]:
    units = min(len(text) // _UNIT, limit)
    return array("I", text[: units * _UNIT])


def _ids(ids: list[object]) -> Sequence[int]:
    try:
        return array("I", ids)  # type: ignore[arg-type]  # what is not a token id is what the array refuses
    except (TypeError, OverflowError):
        return ()
