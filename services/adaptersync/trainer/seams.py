"""What is used of TRL, and where the installed release keeps it.

TRL has its asynchronous GRPO under `experimental`, where any release may move or rename what is in it; later ones do.
Whatever of ours needs something of TRL takes it from here, so where a release only keeps it elsewhere, this is all
there is to change. What TRL makes of it is known to `trl` and `rollout_process`, which override it, and to `cpu`.

A release is judged by what it has, not by its number. Importing this loads TRL.
"""

from __future__ import annotations

import inspect
from importlib import metadata
from typing import Any

from adaptersync_core.errors import ConfigError

NEEDED = "adaptersync works with trl 1.16: pip install 'trl>=1.16,<1.17' 'peft>=0.19'"


def installed() -> str:
    try:
        return f"trl {metadata.version('trl')} is installed"
    except metadata.PackageNotFoundError:
        return "trl is not installed"


try:
    from accelerate.utils import gather_object
    from trl.experimental.async_grpo import AsyncGRPOConfig, async_grpo_trainer, async_rollout_worker, packing
    from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer
    from trl.experimental.async_grpo.async_rollout_worker import (
        AsyncRolloutWorker,
        RolloutGroup,
        RolloutSample,
        TrainingSequence,
        _AsyncRolloutLoop,
    )
except ImportError as error:
    raise ImportError(f"{NEEDED} ({installed()}: {error})") from error

__all__ = [
    "AsyncGRPOConfig",
    "AsyncGRPOTrainer",
    "AsyncRolloutWorker",
    "RolloutSample",
    "_AsyncRolloutLoop",
    "async_grpo_trainer",
    "async_rollout_worker",
    "check_made",
    "check_seams",
    "gather_object",
    "packing",
]

# What is overridden, replaced, read or called, and by which parameters.
SEAMS: dict[Any, tuple[str, ...]] = {
    AsyncGRPOTrainer: (
        "__init__(model, reward_funcs, args, peft_config, rollout_worker, weight_transfer)",
        "_init_lora_sync(model)",
        "_sync_weight()",
        "_sync_weight_lora(t0)",
        "_save_checkpoint(model, trial)",
        "_inner_training_loop()",
        "get_train_dataloader()",
        "get_batch_samples(epoch_iterator, num_batches, device)",
        "log(logs, start_time)",
    ),
    AsyncRolloutWorker: (
        "_loop_cls",
        "start()",
        "stop()",
        "check_health(stale_after_s)",
        "update_model_version(model_version)",
    ),
    _AsyncRolloutLoop: (
        "_request_model",
        "model_version",
        "run()",
        "_generate_loop(stop_event)",
        "_generate_one(prompt)",
        "_generate_one_turn(prompt_ids)",
        "_post(path, payload, timeout)",
        "_score_group(group)",
    ),
    AsyncGRPOConfig: ("vllm_server_base_url", "max_staleness", "max_inflight_tasks", "queue_maxsize"),
    async_grpo_trainer: (
        "AsyncRolloutWorker",
        "DataLoader",
        "save_lora_adapter(model, accelerator, adapter_name, dest_dir)",
        "validate_lora_for_vllm_sync(model)",
        "get_peak_flops_per_device",
    ),
    async_rollout_worker: ("is_vllm_available",),
    packing: ("_flash_attn",),
    RolloutGroup: ("completions_sequences",),
    TrainingSequence: ("rollout_id",),
    RolloutSample: ("model_version",),
}

# What TRL's constructors leave on what they have made.
LEAVES: dict[Any, tuple[str, ...]] = {
    AsyncGRPOTrainer: (
        "model_version",
        "rollout_worker",
        "vllm_client",
        "_lora_dir",
        "_lora_name",
        "_adapter_name",
        "_metrics",
    ),
    AsyncRolloutWorker: (
        "rollout_buffer",
        "metrics_queue",
        "_model_version_value",
        "_loop_kwargs",
        "_mp_ctx",
        "_process",
        "_stop_event_mp",
    ),
    _AsyncRolloutLoop: (
        "session",
        "vllm_server_url",
        "lora_name",
        "environment_factories",
        "_counters",
        "_model_version_value",
    ),
}


def check_seams(seams: dict[Any, tuple[str, ...]] | None = None) -> None:
    """ConfigError, in one line, if the TRL that is installed is built another way than the one we know."""
    for place, seen in (SEAMS if seams is None else seams).items():
        missing = []
        for seam in seen:
            name, call, rest = seam.partition("(")
            if not hasattr(place, name) and name not in getattr(place, "__dataclass_fields__", ()):
                missing.append(f"{place.__name__}.{name}")
            elif call:
                wanted = [parameter for parameter in rest.removesuffix(")").split(", ") if parameter]
                missing += [f"{place.__name__}.{name}({lacks}=)" for lacks in _lacking(getattr(place, name), wanted)]
        _refuse(missing)


def _lacking(call: Any, wanted: list[str]) -> list[str]:
    """Of a wrapper, which passes on whatever it is given, nothing can be told."""
    taken = inspect.signature(call).parameters
    if any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in taken.values()):
        return []
    return [name for name in wanted if name not in taken]


def check_made(made: Any) -> None:
    """The same of what one of TRL's constructors has made."""
    leaves = [name for kind, names in LEAVES.items() if isinstance(made, kind) for name in names]
    _refuse([f"{type(made).__name__}().{name}" for name in leaves if not hasattr(made, name)])


def _refuse(missing: list[str]) -> None:
    if missing:
        raise ConfigError(f"{installed()}, which has no {', '.join(missing)}", next_step=NEEDED)
