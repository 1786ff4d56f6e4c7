"""Rewards of the demo task. A module of its own: TRL's rollout worker is a spawned process that imports it by name."""

from __future__ import annotations

import random
from typing import Any, Literal

RewardName = Literal["exact", "coin"]


def _text(completion: Any) -> str:
    return str(completion[-1]["content"] if isinstance(completion, list) else completion)


def exact(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 for exactly the right answer, else 0."""
    return [float(_text(got) == right) for got, right in zip(completions, answer, strict=True)]


def coin(completions: list[Any], **_: Any) -> list[float]:
    """The control: a reward that says nothing about the answer. A curve that rises with it would be an artefact."""
    return [float(random.random() < 0.5) for _ in completions]  # noqa: S311
