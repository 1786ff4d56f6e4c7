"""Two-digit addition with verifiable answers.

Knows what a problem is, what its right answer is, what a pupil who forgets to carry would write, and which
problems are kept back for measuring. Knows nothing of tokens, models or rewards.

The base model is warmed up on mostly careless answers, so that the right ones are rare in what it samples but
not absent: reinforcement learning can only select what a model already does now and then.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from functools import cache
from typing import Literal

Split = Literal["train", "test"]

CARRY_SHARE = 0.7  # of the problems: enough that forgetting to carry costs most of the reward
TEST_SHARE = 10  # one problem in so many is held out
ANSWER_CHARS = 3


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    left: int
    right: int

    @property
    def question(self) -> str:
        return f"{self.left:02d}+{self.right:02d}"

    @property
    def answer(self) -> str:
        return f"{self.left + self.right:03d}"

    @property
    def careless_answer(self) -> str:
        """The sum without the carry from units to tens; right exactly when there is none."""
        tens = self.left // 10 + self.right // 10
        units = (self.left + self.right) % 10
        return f"{10 * tens + units:03d}"

    @property
    def carries(self) -> bool:
        return self.left % 10 + self.right % 10 >= 10

    @property
    def split(self) -> Split:
        """By hash of the question: the same on every machine, whatever was drawn before."""
        return "test" if zlib.crc32(self.question.encode()) % TEST_SHARE == 0 else "train"


@cache
def _pool(split: Split, *, carries: bool) -> tuple[Problem, ...]:
    everything = (Problem(left, right) for left in range(100) for right in range(100))
    return tuple(p for p in everything if p.split == split and p.carries == carries)


def draw(split: Split, count: int, seed: int) -> list[Problem]:
    """`count` problems of one split, with repetition; the same ones for the same seed."""
    rng = random.Random(seed)  # noqa: S311 - a reproducible draw, not a secret
    return [rng.choice(_pool(split, carries=rng.random() < CARRY_SHARE)) for _ in range(count)]
