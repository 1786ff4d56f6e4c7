"""The tokenizer in a router: what is cut, what a chat template is told, what cannot be loaded."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adaptersync.router.asked import Asked
from adaptersync.router.chat import ChatTemplates, Inexact
from adaptersync.router.handover import Handover, hand_over
from adaptersync.router.tokenizer import CHARS, EDGE, REMEMBERED, Tokenizer, load
from adaptersync_core.errors import ConfigError
from support.tiny_tokenizer import PLAIN, build_tokenizer

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

LONG = "<|a token of many letters|>"
USER = {"role": "user", "content": "12"}


@pytest.fixture(scope="module")
def core() -> str:
    """Byte-level, trained here; puts a token before each text."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["what is said in the text and then said again " * 20], trainer)
    made.add_special_tokens([LONG])
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.enable_truncation(max_length=4)  # as some directories have it; it is not vLLM's business, nor ours
    return str(made.to_str())


def a_tokenizer(core: str, template: str = "{{ messages[0].content }}") -> Tokenizer:
    return Tokenizer(Handover(core=core, templates={"default": template}, special={"bos_token": "<s>"}))


def render(template: str | dict[str, str], **fields: Any) -> str:
    templates = template if isinstance(template, dict) else {"default": template}
    asked = msgspec.json.decode(msgspec.json.encode({"messages": [USER]} | fields), type=Asked)
    return ChatTemplates(templates, {"bos_token": "<s>"}).render(asked)


@pytest.mark.parametrize("text", ["what is said ", "x", "\n \n", "漢字", "word" * 3, "🙂 é", LONG])
def test_a_long_text_is_cut_where_it_does_not_matter(core: str, text: str) -> None:
    tokenizer, chance = a_tokenizer(core), random.Random(text)
    whole = text * 3000
    ids = tokenizer.text(whole, 10**6, special=True)
    assert ids[0] == 0
    assert len(tokenizer.text(whole, 333, special=True)) > 50
    for limit in (40, 64, 333):
        head = list(tokenizer.text(whole, limit, special=True))
        assert head == list(ids[: len(head)])
        assert len(head) <= limit
        assert len(head) == limit or text == LONG
        # and whatever comes after the beginning changes nothing in it
        other = whole[: (limit + EDGE) * CHARS] + "".join(chance.choices("ab \n", k=50))
        assert list(tokenizer.text(other, limit, special=True)) == head
    assert list(tokenizer.text("x", 10, special=False)) == list(tokenizer.text("x", 10, special=True))[1:]


def test_a_template_is_told_what_the_request_says() -> None:
    assert render("{{ bos_token }}{{ messages[0].content }}{{ add_generation_prompt }}") == "<s>12True"
    assert render("{{ add_generation_prompt }}", add_generation_prompt=False) == "False"
    assert render("{{ mood }}{{ bos_token }}", chat_template_kwargs={"mood": "good", "bos_token": ""}) == "good"
    assert render("{{ tools is none }}") == "True"
    two = {"default": "no tools", "tool_use": "{{ tools[0].function | tojson }}"}
    assert render(two) == "no tools"
    tools = [{"type": "function", "function": {"name": "<a>"}}]
    assert render(two, tools=tools) == '{"name": "<a>", "description": null, "parameters": null}'


def test_a_message_is_continued_where_it_ends() -> None:
    said = [USER, {"role": "assistant", "content": "It is "}]
    plain = "{% for m in messages %}{{ m.content }};{% endfor %}"
    goes_on = {"messages": said, "add_generation_prompt": False, "continue_final_message": True}
    assert render(plain, **goes_on) == "12;It is "
    assert render(plain.replace("content }}", "content | trim }}"), **goes_on) == "12;It is"
    with pytest.raises(Inexact, match="fields"):  # vLLM refuses both at once
        render(plain, **goes_on | {"add_generation_prompt": True})
    with pytest.raises(Inexact, match="template"):
        render("nothing of the content", **goes_on)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"chat_template": "x"}, "template"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "template"),
        ({"chat_template_kwargs": ["x"]}, "fields"),
        ({"add_generation_prompt": "yes"}, "fields"),
        ({"messages": []}, "fields"),
        ({"messages": "hello"}, "fields"),
        ({"messages": [{"role": "user", "content": 7}]}, "fields"),
        ({"messages": [{"role": "developer", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "parts"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "uuid": "1"}]}]}, "parts"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "type": "custom"}]}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}, "tools"),
    ],
)
def test_what_vllm_may_make_something_else_of_is_inexact(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(Inexact) as caught:
        render("{{ messages }}", **fields)
    assert caught.value.reason == reason


def test_parts_matter_only_to_templates_that_look_at_them() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": text} for text in "ab"]}]
    assert render("{{ messages[0].content }}", messages=parts) == "a\nb"
    looping = "{% for p in messages[0].content %}{{ p.text }}{% endfor %}"
    either = "{% if messages[0].content is string %}{{ messages[0].content }}{% else %}" + looping + "{% endif %}"
    assert render(either) == "12"
    for template, messages in ((either, parts), (looping, [USER])):
        with pytest.raises(Inexact, match="parts"):
            render(template, messages=messages)


def test_a_template_reaches_nothing_of_the_host() -> None:
    from jinja2.exceptions import SecurityError, TemplateError

    with pytest.raises(SecurityError):
        render("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(TemplateError, match="only users"):
        render("{{ raise_exception('only users') }}")


async def test_what_cannot_be_loaded_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer cannot be loaded: .+") as caught:
        await load(str(tmp_path))
    assert "router.tokenizer" in str(caught.value)
    assert "tokenize" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "file"),
    [
        ({"model_type": "gpt_oss"}, ""),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, ""),
        ({"model_type": "llama"}, "tekken.json"),
        ({"model_type": "llama"}, "tokenizer.model.v3"),
    ],
)
def test_what_vllm_reads_in_a_way_of_its_own_is_not_guessed(tmp_path: Path, config: dict[str, Any], file: str) -> None:
    pytest.importorskip("transformers")
    build_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / (file or "other")).write_text("{}")
    with pytest.raises(ValueError, match="a way of its own"):
        hand_over(str(tmp_path))


def test_a_model_that_takes_images_has_no_template_of_ours(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    build_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    handed = hand_over(str(tmp_path))
    assert handed.templates == {"default": PLAIN}
    assert handed.special["bos_token"] == "<|begin|>"
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert hand_over(str(tmp_path)) == msgspec.structs.replace(handed, templates={})
    with pytest.raises(Inexact, match="template"):
        Tokenizer(hand_over(str(tmp_path))).chat(Asked(messages=msgspec.Raw(b"[]")))


def test_ids_are_remembered(core: str) -> None:
    tokenizer = a_tokenizer(core)
    first = tokenizer.text("said " * 9, 20, special=True)
    assert tokenizer.text("said " * 9, 20, special=True) is first
    assert tokenizer.text("said " * 9, 20, special=False) != first
    assert tokenizer.text("said " * 9, 5, special=True) == first[:5]  # less of it is another beginning
    assert tokenizer._remembered.cache_info().maxsize == REMEMBERED


async def test_a_tokenizer_that_hangs_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = tmp_path / "hangs"
    hangs.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(100)\n")
    hangs.chmod(0o755)
    monkeypatch.setattr("adaptersync.router.tokenizer.sys.executable", str(hangs))
    monkeypatch.setattr("adaptersync.router.tokenizer.LOAD_S", 0.2)
    with pytest.raises(ConfigError, match="not loaded in time"):
        await load("any")
