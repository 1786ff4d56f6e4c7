"""A training script as one is written for TRL 1.16 and one vLLM server.

    python -m support.training_script --base MODEL --out DIR --url http://... [--steps N] [--resume DIR] [--run NAME]
        [--budget TOKENS]

Of all that is given to TRL `vllm_server_base_url` alone is about who generates; `--run` takes our trainer in the place
of TRL's, and nothing else is changed. The rest is what a machine without a GPU wants. With `--run`, `DIR/taken` says of
each sample that TRL took to train on how many syncs there had been then, and the number of the version that wrote it.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from adaptersync.trainer.cpu import enable_cpu

SEED = 5


def variety(completions: list[Any], **_: Any) -> list[float]:
    """More different characters are better; and no two answers alike, so that every step has something to learn."""
    return [len(set(str(completion))) / 10 + random.random() / 100 for completion in completions]


def note_what_is_taken(out: Path) -> None:
    from adaptersync.trainer.seams import async_grpo_trainer

    class Noted:
        """The rollout process's queue; ours gives each sample another number as it is read."""

        def __init__(self, samples: Any) -> None:
            self._samples = samples
            self.qsize = samples.qsize
            self.version = 0

        def get(self, *args: Any) -> Any:
            sample = self._samples.get(*args)
            self.version = sample.model_version
            return sample

    class Dataset(async_grpo_trainer.RolloutQueueDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            noted = self.queue._samples = Noted(self.queue._samples)
            with (out / "taken").open("a", buffering=1) as taken:
                for sample in super().__iter__():
                    taken.write(f"{self.model_version_fn()} {noted.version}\n")
                    yield sample

    async_grpo_trainer.RolloutQueueDataset = Dataset


def main() -> None:
    options = arguments()
    enable_cpu()
    from datasets import Dataset
    from peft import LoraConfig
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    from adaptersync_tools.demo.task import draw
    from adaptersync_tools.demo.tokenizer import build

    kind: dict[str, Any] = {}
    trainer_class = AsyncGRPOTrainer
    if options.run:
        from adaptersync.trainer.trl import AdapterSyncGRPOTrainer

        trainer_class, kind = AdapterSyncGRPOTrainer, {"run": options.run}
        note_what_is_taken(Path(options.out))
    prompts = [[{"role": "user", "content": problem.question}] for problem in draw("train", 64, seed=SEED)]
    trainer = trainer_class(
        model=options.base,
        reward_funcs=variety,
        args=AsyncGRPOConfig(
            vllm_server_base_url=options.url,
            output_dir=options.out,
            max_steps=options.steps,
            per_device_train_batch_size=4,
            num_generations=2,
            max_completion_length=8,
            token_budget=options.budget,
            learning_rate=1e-3,
            save_steps=4,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            logging_steps=1,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=build(),
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"),
        **kind,
    )
    trainer.train(resume_from_checkpoint=options.resume or None)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("base", "out", "url"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--budget", type=int, help="tokens of a row; 0: a fixed number of samples instead")
    parser.add_argument("--resume", default="")
    parser.add_argument("--run", default="")
    return parser.parse_args()


if __name__ == "__main__":
    main()
