"""Prompts of every form, batches, and as how many sequences a request counts."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptersync.router import prompts as module
from adaptersync.router.asked import PARTS, Asked, manifold
from adaptersync.router.chat import Inexact
from adaptersync.router.prompts import FAR, INLINE, PROMPTS, WEIGHT, WHOLE, Looked, Prompts, Reader
from adaptersync.router.tokenizer import Tokenizer


class Letters:
    """One token a character, and 1 in front where special tokens are wanted."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def text(self, text: str, limit: int, *, special: bool) -> list[int]:
        return [*([1] if special else []), *map(ord, text)][:limit]

    def chat(self, asked: Asked) -> str:
        if self.error is not None:
            raise self.error
        return "".join(message["content"] for message in msgspec.json.decode(asked.messages))


def asked(**fields: Any) -> Asked:
    return msgspec.json.decode(json.dumps(fields), type=Asked)


def read(*, limit: int = 1000, letters: Letters | None = None, **fields: Any) -> Prompts:
    reader = Reader(cast(Tokenizer, letters or Letters()))
    return reader.read_now(asked(**fields), chat="messages" in fields, limit=limit)


def tokens(prompts: Prompts) -> list[list[int]]:
    return [list(looked.tokens) for looked in prompts.looked]


CHAT = [{"role": "user", "content": "ab"}]


@pytest.mark.parametrize(
    ("fields", "expected", "how"),
    [
        ({"prompt": "ab"}, [[1, 97, 98]], "tokenizer"),
        ({"prompt": "ab", "add_special_tokens": False}, [[97, 98]], "tokenizer"),
        ({"prompt": "ab", "echo": True, "stream": True, "suffix": None}, [[1, 97, 98]], "tokenizer"),
        ({"prompt": [97, 98]}, [[97, 98]], "ids"),
        ({"prompt": ["ab", "c"]}, [[1, 97, 98], [1, 99]], "tokenizer"),
        ({"prompt": [[97, 98], [99]]}, [[97, 98], [99]], "ids"),
        ({"messages": CHAT}, [[97, 98]], "tokenizer"),
        ({"messages": CHAT, "add_special_tokens": True}, [[1, 97, 98]], "tokenizer"),
    ],
)
def test_each_form_becomes_tokens(fields: dict[str, Any], expected: list[list[int]], how: str) -> None:
    prompts = read(**fields)
    assert (tokens(prompts), prompts.first.read, prompts.first.reason) == (expected, how, "")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": "text", "suffix": "x"}, "suffix"),
        ({"prompt": "text", "truncate_prompt_tokens": 8}, "truncated"),
        ({"messages": CHAT, "truncate_prompt_tokens": -1}, "truncated"),
        ({"prompt": "text", "add_special_tokens": "yes"}, "fields"),
        ({"messages": [{"role": "user", "content": "x" * WHOLE}]}, "large"),
    ],
)
def test_what_vllm_may_make_something_else_of_goes_by_its_bytes(fields: dict[str, Any], reason: str) -> None:
    prompts = read(**fields)
    assert (prompts.first.read, prompts.first.reason) == ("bytes", reason)
    without = Reader(None).read_now(asked(**fields), chat="messages" in fields, limit=1000)
    assert tokens(prompts) == tokens(without) != [[]]
    assert (without.first.read, without.first.reason) == ("bytes", "off")


@pytest.mark.parametrize(("error", "reason"), [(Inexact("parts"), "parts"), (ZeroDivisionError(), "failed")])
def test_a_template_may_do_as_it_likes(error: Exception, reason: str) -> None:
    letters = Letters()
    letters.error = error
    prompts = read(letters=letters, messages=CHAT)
    assert (prompts.first.read, prompts.first.reason) == ("bytes", reason)


@pytest.mark.parametrize(
    ("fields", "weight", "alike"),
    [
        ({"prompt": "a"}, 1, 1),
        ({"prompt": "a", "n": 8}, 8, 8),
        ({"messages": CHAT, "n": 8}, 8, 8),
        ({"prompt": "a", "n": "8"}, 8, 8),  # vLLM takes it for a number
        ({"prompt": "a", "n": 2, "best_of": 4}, 4, 4),
        ({"prompt": ["a", "b", "a"], "n": 2}, 6, 4),
        ({"prompt": [[1], [2], [1], [1]]}, 4, 3),
        ({"prompt": [1, 2, 3], "n": 2}, 2, 2),
        ({"prompt": "a", "n": 10**9}, WEIGHT, WEIGHT),
        ({"prompt": ["a"] * 2000}, WEIGHT, WEIGHT),
        ({"prompt": "a", "n": None}, 1, 1),
        ({"prompt": "a", "n": 0}, 1, 1),
        ({"prompt": "a", "n": -(10**30)}, 1, 1),
        ({"prompt": "a", "n": 1.5}, 1, 1),
        ({"prompt": "a", "n": []}, 1, 1),
        ({"n": 4}, 4, 4),
        ({"prompt": [], "n": 4}, 4, 4),
    ],
)
def test_a_request_counts_as_the_sequences_it_asks_for(fields: dict[str, Any], weight: int, alike: int) -> None:
    prompts = read(**fields)
    assert (prompts.weight, prompts.alike) == (weight, alike)


def test_prompts_of_a_batch_are_looked_at_once_each_and_share_the_limit() -> None:
    batch = [[number] * 10 for number in range(100)]
    assert tokens(read(prompt=batch)) == batch[:PROMPTS]
    assert tokens(read(prompt=[batch[0], batch[0], batch[1]])) == batch[:2]
    assert tokens(read(prompt=batch, limit=25)) == [[0] * 10, [1] * 10, [2] * 5]
    assert tokens(read(prompt=["x" * 30, "y"], limit=25)) == [[1, *[120] * 24]]
    assert tokens(read(prompt=batch, limit=0)) == []  # of an engine that does not say how large its blocks are


@pytest.mark.parametrize(
    "prompt",
    [None, [], "", {}, 7, [[]], [""], [None], [[["x"]]], [{}], [["a"], 1], ["a", {"b": [1e300]}], [[1], "a", None]],
)
def test_junk_is_left_to_the_replica(prompt: object) -> None:
    for chat in (False, True):
        prompts = Reader(cast(Tokenizer, Letters())).read_now(
            asked(messages=prompt) if chat else asked(prompt=prompt), chat=chat, limit=100
        )
        assert prompts.weight >= prompts.alike >= 1


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=9,
)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(Asked.__struct_fields__[1:], values)), st.booleans())
def test_nothing_that_is_json_stops_a_router(fields: dict[str, Any], chat: bool) -> None:
    request = msgspec.json.decode(msgspec.json.encode(fields), type=Asked)
    for reader in (Reader(None), Reader(cast(Tokenizer, Letters()))):
        prompts = reader.read_now(request, chat=chat, limit=50)
        assert 1 <= prompts.alike <= prompts.weight <= WEIGHT
        assert sum(len(looked.tokens) for looked in prompts.looked) <= 50


async def test_what_is_long_is_read_beside_the_loop_and_reads_the_same() -> None:
    reader = Reader(cast(Tokenizer, Letters()))
    for fields in ({"prompt": "a" * 2 * INLINE}, {"messages": [{"role": "user", "content": "b" * 2 * INLINE}]}):
        chat = "messages" in fields
        there = await reader.read(asked(**fields), chat=chat, limit=100)
        assert there == reader.read_now(asked(**fields), chat=chat, limit=100)
        assert there.first.read == "tokenizer"
    reader.close()
    # ids need no thread, and neither does text without a tokenizer
    assert (await reader.read(asked(prompt=list(range(INLINE))), chat=False, limit=100)).first.read == "ids"
    assert (await Reader(None).read(asked(prompt="a" * 2 * INLINE), chat=False, limit=100)).first.read == "bytes"
    with pytest.raises(RuntimeError, match="shutdown"):
        await reader.read(asked(prompt="a" * 2 * INLINE), chat=False, limit=100)


@pytest.mark.parametrize("end", [b"]", b" ] ", b", 7]", b", [1]]", b""])
async def test_of_a_long_list_of_ids_only_what_is_looked_up_is_read(end: bytes) -> None:
    raw = b"[" + b", ".join(b"%d" % (number % 1000) for number in range(FAR // 3)) + end
    found = await Reader(None).read(Asked(prompt=msgspec.Raw(raw)), chat=False, limit=100)
    assert tokens(found) == [[*range(100)]]
    assert found.first.read == "ids"


async def test_more_texts_than_can_be_tokenized_go_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUEUED", 1)
    reader = Reader(cast(Tokenizer, Letters()))
    text = asked(prompt="a" * (INLINE + 1))
    found = await asyncio.gather(*(reader.read(text, chat=False, limit=10) for _ in range(3)))
    assert [each.first.read for each in found] == ["tokenizer", "bytes", "bytes"]
    assert found[1].first.reason == "busy"


@pytest.mark.parametrize("each", [b"[1]", b"[]", b"[[]]", b"{}", b'["a"]', b'"ab"', b"[1.5]"])
@pytest.mark.parametrize("first", [b"", b'"a",', b"[1],", b"{},", b"1.5,", b"-1,"])
def test_of_what_is_not_looked_up_no_objects_are_made(first: bytes, each: bytes) -> None:
    """They would be made in one go, and nothing else goes on until then."""
    raw = b"[" + first + b",".join([each] * 100_000) + b"]"
    reader = Reader(None)
    reader.read_now(asked(prompt=["a", "b"]), chat=False, limit=100)
    assert _peak(lambda: reader.read_now(Asked(prompt=msgspec.Raw(raw)), chat=False, limit=100)) < 3 * len(raw)


@pytest.mark.parametrize("tokenizer", [None, cast(Tokenizer, Letters())])
def test_a_conversation_of_very_many_parts_is_not_looked_up(tokenizer: Tokenizer | None) -> None:
    reader = Reader(tokenizer)
    parts = [{"type": "text", "text": "a, [b] and {c}, " * 10}] * (PARTS // 20)
    few = asked(messages=[{"role": "user", "content": parts[:100]}], n=3)
    many = asked(messages=[{"role": "user", "content": parts}], n=3)
    assert [manifold(few.messages), manifold(many.messages)] == [False, True]
    assert reader.read_now(few, chat=True, limit=100).first.read != "nothing"
    found: list[Prompts] = []
    assert _peak(lambda: found.append(reader.read_now(many, chat=True, limit=100))) < 2 * len(many.messages)
    assert found == [Prompts(looked=(Looked(reason="large"),), weight=3, alike=3)]


@pytest.mark.parametrize("field", ["tools", "documents", "chat_template_kwargs"])
def test_nor_is_a_template_given_very_many(field: str) -> None:
    fields: dict[str, Any] = {"messages": CHAT, field: [{}] * PARTS}
    prompts = read(**fields)
    assert (prompts.first.read, prompts.first.reason) == ("bytes", "large")


def test_a_long_text_is_looked_up_whatever_is_in_it() -> None:
    prompts = Reader(None).read_now(asked(prompt=", [{" * PARTS), chat=False, limit=100)
    assert len(prompts.first.tokens) == 100
    chat = Reader(None).read_now(asked(messages=[{"content": "words " * PARTS}]), chat=True, limit=100)
    assert len(chat.first.tokens) == 100


def _peak(call: Callable[[], object]) -> int:
    """Bytes that it takes for objects."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
