"""Make the demo's base model: a two-layer Qwen2 that adds like a pupil who mostly forgets to carry.

    python -m adaptersync_tools.demo.warmup --dir RUN_DIR

writes `RUN_DIR/base-<digest>` and reports its progress as JSON lines on standard output. The digest covers every
setting, so a base made before is used again and a changed setting makes another. Supervised, about a minute on one
core; knows nothing of adapters or servers.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from adaptersync_tools.demo.task import ANSWER_CHARS, Problem, draw

# One thread: where two threads do not get two cores to themselves, their barriers make them ten times slower.
THREADS = 1

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the base depends on. `recipe` is raised when the code below changes what it makes."""

    recipe: int = 1
    seed: int = 0
    steps: int = 400
    batch: int = 256
    learning_rate: float = 2e-3
    careless: float = 0.75  # share of the answers that forget to carry
    hidden: int = 128
    layers: int = 2
    heads: int = 4  # of 32 dimensions each: the smallest head vLLM's CPU attention takes
    kv_heads: int = 2

    @property
    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:12]


def report(event: str, **fields: Any) -> None:
    print(msgspec.json.encode({"event": event, **fields}).decode(), flush=True)


def warm_up(directory: Path, settings: Settings | None = None, *, threads: int = THREADS) -> Path:
    """The base model's directory, made if it is not there yet."""
    settings = settings or Settings()
    base = directory / f"base-{settings.digest}"
    if (base / "config.json").is_file():
        report("ready", base=str(base), cached=True)
        return base
    staged = directory / f".{base.name}.{os.getpid()}"
    shutil.rmtree(staged, ignore_errors=True)
    started = time.monotonic()
    _train(staged, settings, threads)
    staged.rename(base)  # appears whole or not at all
    report("ready", base=str(base), cached=False, seconds=round(time.monotonic() - started, 1))
    return base


def _train(out: Path, settings: Settings, threads: int) -> None:
    import torch

    from adaptersync_tools.demo.tokenizer import build

    torch.set_num_threads(threads)
    torch.manual_seed(settings.seed)
    tokenizer = build()
    model = _new_model(settings, tokenizer)
    rows, prompt_tokens = _rows(tokenizer, settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
    choice = torch.Generator().manual_seed(settings.seed)
    held_out = draw("test", 300, seed=7)
    started = time.monotonic()
    for step in range(1, settings.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * _schedule(step, settings.steps)
        batch = rows[torch.randint(0, len(rows), (settings.batch,), generator=choice)]
        logits = model(batch[:, :-1]).logits[:, prompt_tokens - 1 :]
        loss = torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), batch[:, prompt_tokens:].reshape(-1)
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == settings.steps:
            greedy, sampled = (accuracy(model, tokenizer, held_out, t) for t in (0.0, 1.0))
            report(
                "step",
                step=step,
                steps=settings.steps,
                loss=round(loss.item(), 4),
                greedy=round(greedy, 4),
                sampled=round(sampled, 4),
                seconds=round(time.monotonic() - started, 1),
            )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _new_model(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden,
        intermediate_size=2 * settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config).float()


def _schedule(step: int, steps: int) -> float:
    """Warm up over 50 steps, hold, then fall in a line over the second half to a twentieth."""
    return min(1.0, step / 50) * max(0.05, min(1.0, 2 * (1 - step / steps)))


def prompts(tokenizer: PreTrainedTokenizerFast, problems: list[Problem]) -> list[list[int]]:
    """Token ids of each question as a chat that waits for its answer; all of one length."""
    chats = [[{"role": "user", "content": p.question}] for p in problems]
    ids: list[list[int]] = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    return ids


def answer_ids(tokenizer: PreTrainedTokenizerFast, answer: str) -> list[int]:
    return [*tokenizer.convert_tokens_to_ids(list(answer)), tokenizer.eos_token_id]


def _rows(tokenizer: PreTrainedTokenizerFast, settings: Settings) -> tuple[torch.Tensor, int]:
    import torch

    problems = draw("train", 20_000, seed=settings.seed + 1)
    rng = random.Random(settings.seed + 5)  # noqa: S311 - a reproducible draw, not a secret
    asked = prompts(tokenizer, problems)
    given = [p.careless_answer if rng.random() < settings.careless else p.answer for p in problems]
    rows = [ids + answer_ids(tokenizer, answer) for ids, answer in zip(asked, given, strict=True)]
    return torch.tensor(rows), len(asked[0])


def accuracy(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: list[Problem],
    temperature: float,
) -> float:
    """Share of exactly right answers; greedy at temperature 0."""
    import torch

    tokens = torch.tensor(prompts(tokenizer, problems))
    with torch.no_grad():
        for _ in range(ANSWER_CHARS + 1):
            logits = model(tokens).logits[:, -1]
            if temperature == 0:
                chosen = logits.argmax(-1, keepdim=True)
            else:
                chosen = torch.multinomial((logits / temperature).softmax(-1), 1)
            tokens = torch.cat([tokens, chosen], dim=1)
    answers = tokens[:, -(ANSWER_CHARS + 1) :].tolist()
    right = [got == answer_ids(tokenizer, p.answer) for got, p in zip(answers, problems, strict=True)]
    return right.count(True) / len(right)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make the demo's base model.")
    parser.add_argument("--dir", type=Path, required=True, help="where base-<digest> is kept")
    parser.add_argument("--seed", type=int, default=Settings().seed)
    parser.add_argument("--threads", type=int, default=THREADS)
    options = parser.parse_args(argv)
    options.dir.mkdir(parents=True, exist_ok=True)
    warm_up(options.dir, Settings(seed=options.seed), threads=options.threads)
    return 0


if __name__ == "__main__":
    sys.exit(main())
