"""Real TRL trainers on a tiny model, for tests of what they do with a publisher and a fleet."""

from __future__ import annotations

import importlib
import os
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from adaptersync_core.config import Config
from support.rollouts import StubWorker

INSTALL = "these tests need torch and TRL: pip install 'adaptersync[trl]', or run them with tools/test"
RUN = "sums"
BATCH = 4


def load_trl() -> ModuleType:
    """adaptersync.trainer.trl; a test that cannot have it fails, it is not skipped."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other people's imports
        try:
            return importlib.import_module("adaptersync.trainer.trl")
        except ImportError as error:
            pytest.fail(f"{INSTALL} ({error})")


def tiny_model(directory: Path) -> Path:
    """An untrained model of the demo's kind, so small that a step takes milliseconds."""
    from adaptersync_tools.demo.warmup import Settings, warm_up

    settings = Settings(steps=1, batch=2, hidden=32, layers=2, heads=4, kv_heads=2)
    return warm_up(directory, settings, threads=1)


def roomy_model(directory: Path) -> Path:
    """One of the demo's kind that knows every token a simulated engine may say."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from adaptersync_tools.demo.tokenizer import build
    from adaptersync_tools.demo.warmup import Settings

    tokenizer, sizes = build(), Settings()
    config = Qwen2Config(
        vocab_size=320,
        hidden_size=sizes.hidden,
        intermediate_size=2 * sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen2ForCausalLM(config).float().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the test only."""
    import torch

    from adaptersync.trainer.cpu import enable_cpu
    from adaptersync.trainer.seams import async_grpo_trainer, packing

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(packing, "_flash_attn", packing._flash_attn)
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", None)
    enable_cpu()


def trainer(
    trl: ModuleType,
    base: Path,
    output: Path,
    *,
    steps: int = 3,
    max_staleness: int = 2,
    alpha: int = 8,
    sync_steps: int = 1,
    arguments: dict[str, Any] | None = None,
    **given: Any,
) -> Any:
    """A trainer on a stub worker, ready to train; without `adaptersync_config` it is for a fake publisher."""
    from datasets import Dataset
    from peft import LoraConfig

    from adaptersync.trainer.seams import AsyncGRPOConfig
    from adaptersync_tools.demo.rewards import exact
    from adaptersync_tools.demo.tokenizer import build

    chosen: dict[str, Any] = {
        "output_dir": str(output),
        "max_steps": steps,
        "per_device_train_batch_size": BATCH,
        "num_generations": 2,
        "max_staleness": max_staleness,
        "token_budget": 0,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "learning_rate": 1e-3,
        "weight_sync_steps": sync_steps,
        "save_steps": 2,
        "report_to": "none",
        "disable_tqdm": True,
    }
    args = AsyncGRPOConfig(**(chosen | (arguments or {})))
    settings: dict[str, Any] = {
        "run": RUN,
        "adaptersync_config": Config(),
        "model": str(base),
        "reward_funcs": exact,
        "args": args,
        "train_dataset": Dataset.from_dict({"prompt": [[{"role": "user", "content": "1+1"}]], "answer": ["2"]}),
        "processing_class": build(),
        "peft_config": LoraConfig(r=4, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM"),
        "rollout_worker": StubWorker(BATCH),
    }
    return trl.AdapterSyncGRPOTrainer(**{**settings, **given})
