"""Prompts of every form, and token counts at the end of answers."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptersync.router.asked import Asked
from adaptersync.router.prompts import Looked, Reader
from adaptersync.router.usage import NO_USAGE, TAIL_BYTES, Usage, read_usage
from adaptersync_core.blocks import BY_BYTES, block_hashes


def read(raw: bytes, *, chat: bool = False, limit: int = 10_000) -> Looked:
    asked = Asked(messages=msgspec.Raw(raw)) if chat else Asked(prompt=msgspec.Raw(raw))
    return Reader(None).read_now(asked, chat=chat, limit=limit).first


def of_prompt(prompt: object, limit: int = 10_000) -> list[int]:
    return list(read(json.dumps(prompt).encode(), limit=limit).tokens)


def of_chat(messages: object, limit: int = 10_000) -> list[int]:
    return list(read(json.dumps(messages).encode(), chat=True, limit=limit).tokens)


def test_token_ids_are_taken_as_they_are() -> None:
    assert of_prompt([1, 2, 2**32 - 1]) == [1, 2, 2**32 - 1]
    assert of_prompt(list(range(100)), limit=10) == list(range(10))
    assert of_prompt([[5, 6], [7, 8]]) == [5, 6]


@pytest.mark.parametrize("prompt", [[-1], [2**32], [1.5], [None], {}, 7, None, [], "", "abc", [[]], [""], [[["x"]]]])
def test_what_gives_no_block_gives_nothing(prompt: object) -> None:
    assert of_prompt(prompt) == []


@given(st.text(), st.text(), st.text())
def test_equal_beginnings_of_text_give_equal_numbers(head: str, left: str, right: str) -> None:
    one, other = of_prompt(head + left), of_prompt(head + right)
    common = len(head.encode()) // 4
    assert one[:common] == other[:common]
    assert of_prompt([head + left, right]) == one


def test_different_text_gives_different_numbers() -> None:
    assert of_prompt("x" * 40) != of_prompt("x" * 36 + "yyyy")


def test_a_conversation_begins_like_its_continuation() -> None:
    first = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "12 + 30"}]
    longer = [*first, {"role": "assistant", "content": "42"}]
    one, other = of_chat(first), of_chat(longer)
    assert one == other[: len(one)]
    assert of_chat([{"content": "be brief", "role": "system"}, first[1]]) == one


@pytest.mark.parametrize(
    "messages",
    [b'[{"content": 1e999}]', b'[{"content": %d}]' % 10**30, b"[" * 300 + b"]" * 300, b"[" * 5000 + b"]" * 5000],
)
def test_what_no_number_or_no_stack_can_hold_gives_nothing(messages: bytes) -> None:
    assert read(messages, chat=True).tokens == ()
    assert read(messages.replace(b'{"content": ', b"[").replace(b"}", b"]")).tokens == ()


@pytest.mark.parametrize(("prompt", "how"), [([7], "ids"), ([[7]], "ids"), ("seven", "bytes"), (["seven"], "bytes")])
def test_what_stands_for_text_says_so(prompt: object, how: str) -> None:
    """An agent must not hold what its engine never speaks of against it."""
    assert read(json.dumps(prompt).encode()).read == how
    assert read(b"[]", chat=True).read == "bytes"
    assert block_hashes("v", [1], 1, 1, by_bytes=True) == [block_hashes("v", [1], 1, 1)[0] + BY_BYTES]


def test_chat_and_prompt_do_not_meet() -> None:
    assert of_chat([]) == []
    assert of_chat({"not": "a list"}) != of_prompt("x")


@given(st.lists(st.integers(0, 2**32 - 1), max_size=70), st.integers(1, 20))
def test_hashes_of_a_prefix_are_a_prefix_of_hashes(tokens: list[int], size: int) -> None:
    whole = block_hashes("run-a-v1-000000000001", of_prompt(tokens), size, 100)
    assert len(whole) == len(tokens) // size
    assert block_hashes("run-a-v1-000000000001", of_prompt(tokens[: size * 2]), size, 100) == whole[:2]


PLAIN = b'{"choices":[{"text":"a"}],"usage":{"prompt_tokens":9,"total_tokens":12,"completion_tokens":3%s}}'


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (PLAIN % b"", Usage(prompt_tokens=9, completion_tokens=3)),
        (
            PLAIN % b',"prompt_tokens_details":{"cached_tokens":8}',
            Usage(prompt_tokens=9, completion_tokens=3, cached_tokens=8),
        ),
        (PLAIN % b',"prompt_tokens_details":null', Usage(prompt_tokens=9, completion_tokens=3)),
        (b'data: {"usage":null}\n\ndata: [DONE]\n\n', NO_USAGE),
        (b'data: {"usage": {"prompt_tokens": 4}}\n\ndata: [DONE]\n\n', Usage(prompt_tokens=4)),
        (b"", NO_USAGE),
        (b"\xff\x00", NO_USAGE),
        (json.dumps({"text": '"usage":{"prompt_tokens":5}'}).encode(), NO_USAGE),  # quoted, not meant
    ],
)
def test_counts_are_read_from_the_end(answer: bytes, expected: Usage) -> None:
    assert read_usage(answer) == expected
    assert read_usage((b" " * TAIL_BYTES + answer)[-TAIL_BYTES:]) == expected
