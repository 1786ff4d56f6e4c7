"""The router's tokens are vLLM's: the same ids for text and chat, by a tokenizer with merges and a token to begin with.

vLLM is asked with templates in the request, so that one server shows many: what it makes of a conversation before any
template sees it is told by one that prints everything.
"""

from __future__ import annotations

import asyncio
import copy
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from adaptersync.router.asked import Asked
from adaptersync.router.chat import ChatTemplates
from adaptersync.router.prompts import Looked, Reader
from adaptersync.router.tokenizer import Tokenizer, load
from support import engines
from support.engines import MAX_MODEL_LEN, Engine
from support.tiny_tokenizer import PLAIN

pytestmark = pytest.mark.vllm

TEMPLATES = {
    "says everything": "{{ messages | tojson }}|{{ tools | tojson }}|{{ documents }}|{{ add_generation_prompt }}"
    "|{{ enable_thinking }}|{{ reasoning_effort }}|{{ bos_token }}|{{ mood }}{# content #}",
    "plain": PLAIN,
    "text or parts": "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %};{% endfor %}",
    "by a macro": "{% macro say(c) %}{% if c is string %}{{ c }}{% else %}{% for i in c %}{{ i['text'] }}{% endfor %}"
    "{% endif %}{% endmacro %}{% for m in messages %}{{ say(m.content) }};{% endfor %}",
    "with generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% if loop.last %}{% break %}{% endif %}{% endfor %}",
}
USER = {"role": "user", "content": "What is 12 + 30?"}
TOOL: dict[str, Any] = {"function": {"parameters": {"b": 1, "a": []}, "name": "add"}, "type": "function"}
TOOLS: list[dict[str, Any]] = [TOOL, {"function": {"name": "n"}}]
CALL = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": '{"b": 1, "a": "é"}'}}
SEVERAL_PARTS: dict[str, Any] = {
    "messages": [{"content": [{"type": "text", "text": "a"}, {"text": "b <|x|>", "type": "text"}], "role": "user"}]
}
CHATS: list[dict[str, Any]] = [
    {"messages": [USER]},
    {"messages": [{"role": "system", "content": " be brief "}, USER, {"role": "assistant", "content": "42\n"}, USER]},
    SEVERAL_PARTS,
    {"messages": [{"role": "user", "content": []}, {"role": "user", "content": [{"type": "text", "text": " one "}]}]},
    {"messages": [USER, {"role": "assistant", "content": "It is "}], "add_generation_prompt": False}
    | {"continue_final_message": True},
    {"messages": [USER], "add_generation_prompt": False, "add_special_tokens": True},
    {"messages": [USER], "chat_template_kwargs": {"mood": "good", "enable_thinking": True, "unused": 1}},
    {"messages": [USER], "chat_template_kwargs": {"mood": None, "enable_thinking": "auto"}},
    {"messages": [USER | {"name": "ann", "task": "t", "else": 1}], "tools": TOOLS},
    {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "add them"},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}]},
            {"role": "assistant", "content": "", "tool_calls": []},
            {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "no JSON"}}]},
        ]
    },
    {"messages": [{"role": "user", "content": "ß 漢字 \u200b 🙂\r\n\t" + "word " * 40}]},
]


@pytest.fixture
def vllm(unguarded: Engine) -> Engine:
    return unguarded


@pytest.fixture(scope="module")
def tokenizer(unguarded: Engine) -> Tokenizer:
    return asyncio.run(load(str(unguarded.model_directory)))


def read(tokenizer: Tokenizer, body: dict[str, Any]) -> Looked:
    asked = msgspec.json.decode(msgspec.json.encode(body), type=Asked)
    return Reader(tokenizer).read_now(asked, chat="messages" in body, limit=100_000).first


def ids_of(vllm: Engine, body: dict[str, Any]) -> list[int]:
    answer = vllm.post("/tokenize", body)
    assert answer.status == 200, answer.text
    ids: list[int] = answer.json["tokens"]
    return ids


@pytest.mark.parametrize("special", [True, False, None])
def test_text_has_the_ids_of_vllm(vllm: Engine, tokenizer: Tokenizer, special: bool | None) -> None:
    chance = random.Random(1)
    words = ["word", " the", "said", "\n", "  ", "12", "é", "漢", "🙂", "<|end|>", "<|late|>", "\x00", "\u2028"]
    texts = ["", "a", *("".join(chance.choices(words, k=chance.randrange(80))) for _ in range(40))]
    for text in texts:
        body: dict[str, Any] = {"prompt": text} | ({} if special is None else {"add_special_tokens": special})
        prompts = read(tokenizer, body)
        assert (prompts.read, list(prompts.tokens)) == ("tokenizer", ids_of(vllm, body)), body


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("body", CHATS, ids=range(len(CHATS)))
def test_a_chat_has_the_ids_of_vllm(vllm: Engine, tokenizer: Tokenizer, template: str, body: dict[str, Any]) -> None:
    source, kept = TEMPLATES[template], tokenizer._templates
    answer = vllm.post("/tokenize", body | {"chat_template": source})
    tokenizer._templates = ChatTemplates({"default": source}, kept._special)
    try:
        prompts = read(tokenizer, body)
    finally:
        tokenizer._templates = kept
    if answer.status != 200:  # to continue what the template does not say as it is
        assert prompts.read == "bytes"
        return
    if body == SEVERAL_PARTS and template in ("text or parts", "by a macro"):
        assert (prompts.read, prompts.reason) == ("bytes", "parts")  # it would say them otherwise in one piece
        return
    assert (prompts.read, prompts.reason) == ("tokenizer", "")
    ids = answer.json["tokens"]
    assert list(prompts.tokens) == ids, f"{tokenizer._core.decode(ids)!r}"


def test_a_generation_computes_the_ids_that_were_read(vllm: Engine, tokenizer: Tokenizer) -> None:
    """Not by /tokenize, but as prompts are: with the model's own template, and fields that only a generation has."""
    for body in (*CHATS[:5], CHATS[0] | {"reasoning_effort": "low"}, {"prompt": "said the word"}):
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        answer = vllm.post(path, body | {"model": engines.MODEL, "max_tokens": 1, "return_token_ids": True})
        assert answer.status == 200, answer.text
        ids = answer.json.get("prompt_token_ids") or answer.json["choices"][0]["prompt_token_ids"]
        assert list(read(tokenizer, body).tokens) == ids


def test_the_beginning_of_a_long_text_is_the_beginning_of_its_ids(vllm: Engine, tokenizer: Tokenizer) -> None:
    chance = random.Random(2)
    text = "".join(chance.choices(["word", " the", "said", "\n", "  ", "12", "é", "漢", "🙂"], k=180))
    ids = ids_of(vllm, {"prompt": text})
    assert len(ids) < MAX_MODEL_LEN
    for limit in (16, 64, 100):
        head = list(tokenizer.text(text, limit, special=True))
        assert head == ids[: len(head)]
        assert len(head) == limit


def test_templates_of_many_models_are_rendered_as_vllm_does_or_not_at_all() -> None:
    """Those that TRL brings, by what vLLM does before and after a template sees a conversation; without a server."""
    trl = pytest.importorskip("trl")
    formats = pytest.importorskip("vllm.renderers.hf")
    parsing = pytest.importorskip("vllm.renderers.chat_utils")
    from transformers.utils.chat_template_utils import render_jinja_template

    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<p>", "unk_token": "<u>"}
    plain = SimpleNamespace(enable_prompt_embeds=False, multimodal_config=None)
    exact = inexact = 0
    for path in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja")):
        source = path.read_text()
        form = formats._detect_content_format(source, default="string")
        templates = ChatTemplates({"default": source}, special)
        for body in CHATS:
            asked = msgspec.json.decode(msgspec.json.encode(body), type=Asked)
            try:
                said = templates.render(asked)
            except Exception:  # a template is a program
                inexact += 1
                continue
            conversation, _, _ = parsing.parse_chat_messages(copy.deepcopy(body["messages"]), plain, form)
            given = {name: value for name, value in body.get("chat_template_kwargs", {}).items() if value is not None}
            functions = [{"name": None, "description": None, "parameters": None} | tool["function"] for tool in TOOLS]
            (expected,), _ = render_jinja_template(
                [conversation],
                tools=[{"type": "function", "function": function} for function in functions]
                if "tools" in body
                else None,
                chat_template=source,
                add_generation_prompt=body.get("add_generation_prompt", True),
                continue_final_message=body.get("continue_final_message", False),
                **special | {name: value for name, value in given.items() if value != "auto"},
            )
            assert said == expected, (path.name, body)
            exact += 1
    assert exact > 4 * inexact > 0  # several parts, and templates of models that take images
