"""LoRA adapters as PEFT saves them, written without torch: for tests that need files, not training.

Knows the layout (`adapter_config.json`, `adapter_model.safetensors`) and the shapes of a Qwen2-like base.
The tensors are uniform noise from a seed: reproducible, and different for different seeds.
"""

import json
import random
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


def make_adapter(
    directory: Path,
    *,
    rank: int = 8,
    hidden: int = 128,
    intermediate: int = 256,
    layers: int = 2,
    scale: float = 0.5,
    seed: int = 0,
    targets: Sequence[str] = ("q_proj", "v_proj"),
    base_model: str = "base",
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write an adapter into `directory` (created) and return it.

    `scale` bounds every element of A and B; 0 gives an adapter that serves the base. `config` overrides or
    adds fields of adapter_config.json; a value of None removes the field.
    """
    directory.mkdir(parents=True, exist_ok=True)
    noise = random.Random(seed)
    tensors: dict[str, tuple[tuple[int, int], bytes]] = {}
    for layer in range(layers):
        for target in targets:
            fan_in = intermediate if target == "down_proj" else hidden
            fan_out = intermediate if target in ("gate_proj", "up_proj") else hidden
            block = "mlp" if target in _MLP else "self_attn"
            stem = f"base_model.model.model.layers.{layer}.{block}.{target}"
            tensors[f"{stem}.lora_A.weight"] = ((rank, fan_in), _uniform(noise, rank * fan_in, scale))
            tensors[f"{stem}.lora_B.weight"] = ((fan_out, rank), _uniform(noise, fan_out * rank, scale))
    write_safetensors(directory / "adapter_model.safetensors", tensors)
    settings: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(targets),
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
    }
    settings |= config or {}
    removed = [name for name, value in (config or {}).items() if value is None]
    for name in removed:
        del settings[name]
    (directory / "adapter_config.json").write_text(json.dumps(settings, indent=2))
    return directory


def write_safetensors(path: Path, tensors: Mapping[str, tuple[tuple[int, ...], bytes]]) -> None:
    """Write float32 tensors, given as (shape, little-endian bytes), in the safetensors format."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (shape, raw) in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + len(raw)]}
        offset += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for _, raw in tensors.values():
            out.write(raw)


def _uniform(noise: random.Random, count: int, scale: float) -> bytes:
    step = scale / 32768
    return array("f", [step * value + 0.0 for value in array("h", noise.randbytes(2 * count))]).tobytes()
