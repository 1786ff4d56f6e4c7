"""From a prompt to the numbers that routing hashes, without a tokenizer. Pure.

Token ids are taken as they are. Text and chat messages are taken by their UTF-8 bytes, four to a number, so that a
block covers about as much text as a block of tokens does: equal beginnings give equal blocks, which is all routing
needs. What is malformed gives no numbers: the replica will say what is wrong with it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import orjson

_UNIT = 4  # bytes of text in one number


def token_ids(ids: Sequence[object], limit: int) -> Sequence[int]:
    """Each is 0 to 2**32 - 1, or they are not what they should be."""
    try:
        return array("I", ids[:limit])  # type: ignore[arg-type]  # what is not a token id is what the array refuses
    except (TypeError, OverflowError):
        return ()


def text_bytes(text: str, limit: int) -> Sequence[int]:
    """Cut before it is encoded: a number takes at least one character."""
    return _units(text[: limit * _UNIT].encode("utf-8", "surrogatepass"), limit)


def chat_bytes(messages: object, limit: int) -> Sequence[int]:
    """orjson.JSONEncodeError for numbers that JSON cannot say."""
    # one form for equal conversations; without the closing bracket, a longer one begins like a shorter one
    return _units(orjson.dumps(messages, option=orjson.OPT_SORT_KEYS)[:-1], limit)


def _units(text: bytes, limit: int) -> Sequence[int]:
    units = min(len(text) // _UNIT, limit)
    return array("I", text[: units * _UNIT])
