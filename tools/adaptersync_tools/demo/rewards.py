"""Rewards of the demo task. A module of its own: TRL's rollout worker is a spawned process that imports it by name."""

from __future__ import annotations

import random
from typing import Any, Literal

UNREWARDED = 2.0**-100  # TRL adds rewards up: beside a 0 or 1 this is nothing, and yet it can be counted

RewardName = Literal["exact", "digits", "coin"]


def _text(completion: Any) -> str:
    return str(completion[-1]["content"] if isinstance(completion, list) else completion)


def exact(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 for exactly the right answer, else 0."""
    return [float(_text(got) == right) for got, right in zip(completions, answer, strict=True)]


def digits(completions: list[Any], **_: Any) -> list[float]:
    """The share of an answer's characters that are digits: 1 for a number and nothing else."""
    texts = [_text(got).strip() for got in completions]
    return [sum(character.isdigit() for character in text) / len(text) if text else 0.0 for text in texts]


def coin(completions: list[Any], **_: Any) -> list[float]:
    """The control: a reward that says nothing about the answer. A curve that rises with it would be an artefact."""
    return [float(random.random() < 0.5) for _ in completions]  # noqa: S311


def right_unrewarded(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """UNREWARDED for the right answer: how many there are is logged, and nobody learns from it."""
    return [UNREWARDED * value for value in exact(completions, answer)]
