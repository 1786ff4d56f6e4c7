"""The demo's tokenizer and base model: made here, the same every time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adaptersync_tools.demo.task import draw
from adaptersync_tools.demo.tokenizer import build
from adaptersync_tools.demo.warmup import Settings, answer_ids, prompts, warm_up

pytestmark = [pytest.mark.trl, pytest.mark.filterwarnings("default"), pytest.mark.timeout(180)]


def test_a_question_becomes_one_token_per_character_between_markers() -> None:
    tokenizer = build()
    (ids,) = prompts(tokenizer, draw("train", 1, seed=3))
    assert tokenizer.decode(ids) == "<|im_start|>user\n57+43<|im_end|>\n<|im_start|>assistant\n"
    assert ids == [1, 104, 99, 8, 10, 75, 7, 6, 2, 99, 1, 105, 99]
    assert answer_ids(tokenizer, "100") == [4, 3, 3, 2]


def test_any_printable_text_survives_the_tokenizer() -> None:
    tokenizer = build()
    text = "The user said: 17+25 = 042?\n\t(assistant)"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_prompts_are_all_of_one_length() -> None:
    assert len({len(ids) for ids in prompts(build(), draw("test", 200, seed=1))}) == 1


def test_a_base_is_made_once_and_then_used_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(steps=1, batch=2, hidden=32)
    first = warm_up(tmp_path, settings, threads=1)
    again = warm_up(tmp_path, settings, threads=1)
    assert first == again == tmp_path / f"base-{settings.digest}"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in first.iterdir()}
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["event"], line.get("cached")) for line in lines] == [
        ("step", None),
        ("ready", False),
        ("ready", True),
    ]
    assert [path.name for path in tmp_path.iterdir()] == [first.name]  # nothing half-made is left
