"""Train the demo's base model with real TRL against a running fleet.

    python -m adaptersync_tools.demo.train --base RUN_DIR/base-<digest> --run NAME --steps 60 --out OUT

One JSON line of figures per step goes to `OUT/steps.jsonl` as it happens, a summary to `OUT/summary.json` at the end.
The router's address and the fleet's settings come from the usual file and environment. Exits non-zero with one line
on standard error when training fails.

With `--plain URL` the same is trained by TRL's own trainer and its own sync, against the one vLLM at that address: what
this project is compared with.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any, get_args

import msgspec

from adaptersync_core.errors import AdapterSyncError
from adaptersync_tools.demo import rewards
from adaptersync_tools.demo.lessons import LESSONS
from adaptersync_tools.demo.task import draw

GENERATIONS = 8  # answers per problem: the group GRPO compares
PROBLEMS = 4000

# TRL's name → ours, for the figures of a step. `ahead`: publications the trainer is ahead of the fleet; `behind`: those
# the oldest sample trained on was behind the trainer.
FIGURES = {
    "reward": "reward",
    "rewards/exact": "right",
    "ratio": "ratio",
    "kl": "kl",
    "entropy": "entropy",
    "grad_norm": "grad_norm",
    "perf/step_s": "step_s",
    "perf/fwd_bwd_s": "fwd_bwd_s",
    "perf/rollout_wait_s": "rollout_wait_s",
    "perf/weight_sync_s": "sync_s",
    "perf/weight_sync_pause_s": "pause_s",
    "perf/weight_sync_transfer_s": "save_s",
    "adaptersync/promotion_wait_s": "promotion_wait_s",
    "adaptersync/ahead_max": "ahead",
    "sample/staleness_mean": "staleness_mean",
    "sample/staleness_max": "behind",
    "sample/dropped_stale_total": "dropped_stale",
    "rollout/vllm_retry_total": "retries",
    "adaptersync/served_mismatch_total": "served_mismatch",
    "adaptersync/repinned_total": "repinned",
    "adaptersync/doomed_total": "doomed",
    "adaptersync/published": "published",
    "adaptersync/promoted": "promoted",
    "adaptersync/superseded": "superseded",
    "adaptersync/rolled_back": "rolled_back",
    "adaptersync/replaced": "replaced",
    "adaptersync/failed": "failed",
}
COUNTED = frozenset(
    {"dropped_stale", "retries", "served_mismatch", "repinned", "doomed"}
)  # TRL leaves a count of 0 out
COUNTED_ONLY = f"rewards/{rewards.right_unrewarded.__name__}"
WHOLE = COUNTED | {"ahead", "behind", "published", "promoted", "superseded", "rolled_back", "replaced", "failed"}


def figures(logs: dict[str, Any], step: int, seconds: float) -> dict[str, Any]:
    """One line of steps.jsonl out of what TRL logs."""
    line: dict[str, Any] = {"step": step, "seconds": round(seconds, 2)}
    for theirs, ours in FIGURES.items():
        value = logs.get(theirs)
        if value is None and ours in COUNTED:
            value = 0
        if value is not None:
            line[ours] = int(value) if ours in WHOLE else round(value, 5)
    if COUNTED_ONLY in logs:
        line["right"] = round(logs[COUNTED_ONLY] / rewards.UNREWARDED, 5)
    return line


def train(options: argparse.Namespace) -> None:
    started = time.monotonic()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is on this machine
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    import torch
    from transformers import PrinterCallback

    from adaptersync.trainer.cpu import enable_cpu

    # One thread: the other core is generating, and a model this small is not faster on two.
    torch.set_num_threads(1)
    on_cpu = enable_cpu()
    options.out.mkdir(parents=True, exist_ok=True)
    trainer = _trainer(options, on_cpu)
    trainer.remove_callback(PrinterCallback)  # the figures go to a file, standard output stays readable
    with open(options.out / "steps.jsonl", "wb", buffering=0) as steps:
        trainer.add_callback(_reporter(steps, time.monotonic()))
        result = trainer.train()
    trainer.save_model(str(options.out / "adapter"))
    summary = {
        "run": options.run,
        "steps": result.global_step,
        "seconds": round(time.monotonic() - started, 1),
        "train_seconds": round(result.metrics["train_runtime"], 1),
    }
    if not options.plain:
        newest, counts = trainer.last_publication, trainer.counts
        summary["adapter_id"] = newest.adapter_id if newest else None
        summary["counts"] = {name: getattr(counts, name) for name in counts.__slots__}
    (options.out / "summary.json").write_bytes(msgspec.json.encode(summary))


def _trainer(options: argparse.Namespace, on_cpu: bool) -> Any:
    """Ours, or TRL's: with the same arguments, but for what only one of them takes."""
    from datasets import Dataset
    from peft import LoraConfig

    from adaptersync.trainer.seams import AsyncGRPOConfig, AsyncGRPOTrainer

    lesson = LESSONS[options.lesson]
    samples = options.prompts * GENERATIONS if options.prompts else lesson.samples
    reward = options.reward or lesson.reward
    problems = draw("train", PROBLEMS, seed=100 + options.seed)
    dataset = Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": lesson.ask(problem)}] for problem in problems],
            "answer": [lesson.solve(problem) for problem in problems],
        }
    )
    args = AsyncGRPOConfig(
        output_dir=str(options.out),
        max_steps=options.steps,
        seed=options.seed,
        learning_rate=options.learning_rate or lesson.learning_rate,
        per_device_train_batch_size=samples,
        num_generations=GENERATIONS,
        max_completion_length=lesson.answer_tokens,
        max_staleness=options.max_staleness,
        weight_sync_steps=options.sync_steps,
        max_inflight_tasks=lesson.samples,
        queue_maxsize=samples,  # one step's worth: a sample that waits longer only gets stale
        token_budget=0,
        gradient_checkpointing=False,
        use_cpu=on_cpu,
        bf16=False,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
    )
    given: dict[str, Any] = {
        "model": str(options.base),
        "reward_funcs": [rewards.exact] if reward == "exact" else [getattr(rewards, reward), rewards.right_unrewarded],
        "args": args,
        "train_dataset": dataset,
        "processing_class": lesson.tokenizer(options.base),
        "peft_config": LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    }
    if options.plain:
        args.vllm_server_base_url = options.plain
        return AsyncGRPOTrainer(**given)
    from adaptersync.trainer.trl import AdapterSyncGRPOTrainer

    return AdapterSyncGRPOTrainer(run=options.run, **given)


def _reporter(steps: Any, started: float) -> Any:
    from transformers import TrainerCallback

    class Reporter(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "ratio" in logs:  # the summary at the end has none
                line = figures(logs, state.global_step, time.monotonic() - started)
                steps.write(msgspec.json.encode(line) + b"\n")

    return Reporter()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train the demo's base model against a running fleet.")
    parser.add_argument("--base", type=Path, required=True, help="the base model, as made by demo.warmup")
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--plain", metavar="URL", help="train with TRL's own trainer, against the vLLM there")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, required=True, help="where figures and the adapter go")
    parser.add_argument("--lesson", choices=sorted(LESSONS), default="carry")
    parser.add_argument("--reward", choices=get_args(rewards.RewardName), help="by default the lesson's own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, help=f"of a step, {GENERATIONS} answers each; by default the lesson's")
    parser.add_argument("--learning-rate", type=float, help="by default the lesson's own")
    parser.add_argument("--max-staleness", type=int, default=2)
    parser.add_argument("--sync-steps", type=int, default=1, help="steps from one sync to the next")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        train(options)
    except AdapterSyncError as error:
        print(f"training failed: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
