"""What the demo teaches, and whom: a model made on the spot to carry, or SmolLM2 to answer with a number.

Knows sizes, words and rewards of a lesson; loads no model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from adaptersync_tools.demo.rewards import RewardName
from adaptersync_tools.demo.task import ANSWER_CHARS, Problem
from adaptersync_tools.demo.tokenizer import RESPONSE_TEMPLATE, build

LessonName = Literal["carry", "smollm2"]
RANK = 8  # an engine is slower with a higher one


class Lesson(Struct, frozen=True, kw_only=True):
    """`base` is the module that makes the base model, `engine` settings of its servers. `samples` are answers a step,
    `problems` those that are held out. A step takes at most `step_s`."""

    name: LessonName
    base: str
    reward: RewardName
    question: str
    answer: str
    answer_tokens: int
    samples: int
    learning_rate: float
    problems: int
    step_s: float
    engine: dict[str, Any]

    def ask(self, problem: Problem) -> str:
        return self.question.format(problem.left, problem.right)

    def solve(self, problem: Problem) -> str:
        return self.answer.format(problem.left + problem.right)

    def tokenizer(self, base: Path) -> Any:
        """Of the base model, as TRL and the evaluation want it."""
        if self.name == "carry":
            return build()
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(base))
        tokenizer.padding_side = "left"
        tokenizer.response_template = RESPONSE_TEMPLATE  # it talks as ours does
        return tokenizer


CARRY = Lesson(
    name="carry",
    base="adaptersync_tools.demo.warmup",
    reward="exact",
    question="{:02d}+{:02d}",
    answer="{:03d}",
    answer_tokens=ANSWER_CHARS + 5,
    samples=128,  # sixteen problems
    learning_rate=1e-3,
    problems=500,
    step_s=120.0,
    engine={"max_lora_rank": RANK, "max_num_seqs": 128, "max_model_len": 128},
)
SMOLLM2 = Lesson(
    name="smollm2",
    base="adaptersync_tools.demo.smollm2",
    reward="digits",
    question="What is {} + {}? Answer with a number.",
    answer="{}",
    answer_tokens=8,
    samples=32,
    learning_rate=2e-4,
    problems=40,
    step_s=900.0,  # two cores take a minute
    engine={"max_lora_rank": RANK, "max_num_seqs": 32, "max_model_len": 128},
)
LESSONS: dict[LessonName, Lesson] = {lesson.name: lesson for lesson in (CARRY, SMOLLM2)}
