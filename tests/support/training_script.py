"""A training script as one is written for TRL 1.16 and one vLLM server.

    python -m support.training_script --base MODEL --out DIR --url http://... [--steps N] [--resume DIR] [--run NAME]

Of all that is given to TRL `vllm_server_base_url` alone is about who generates; `--run` takes our trainer in the place
of TRL's, and nothing else is changed. The rest is what a machine without a GPU wants.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

from adaptersync.trainer.cpu import enable_cpu

SEED = 5


def variety(completions: list[Any], **_: Any) -> list[float]:
    """More different characters are better; and no two answers alike, so that every step has something to learn."""
    return [len(set(str(completion))) / 10 + random.random() / 100 for completion in completions]


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
    parser.add_argument("--resume", default="")
    parser.add_argument("--run", default="")
    return parser.parse_args()


if __name__ == "__main__":
    main()
