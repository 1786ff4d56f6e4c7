"""An adapter of large effect, made from the shapes of the base model: what an engine is commissioned with.

It says nothing about any version; it shows that this engine applies a LoRA adapter when it is asked for by name.
"""

from __future__ import annotations

import json
import random
import struct
from array import array
from collections.abc import Mapping
from math import sqrt
from pathlib import Path

from adaptersync_core.manifest import CONFIG_FILE, WEIGHTS_FILE

RANK = 1  # every engine that serves LoRA takes it
WEIGHTS = 16  # how many of the base's weights it touches; enough for a large effect, small to load
TARGETS = ("o_proj", "down_proj")  # they write into the residual stream, so the effect reaches every later layer
STRENGTH = 4.0


def write_canary(directory: Path, base: Mapping[str, tuple[int, ...]]) -> bool:
    """Write the canary for a base model (parameter name to shape, out x in); False when it has no weight we know."""
    touched = [name for name in sorted(base) if name.endswith(tuple(f".{target}.weight" for target in TARGETS))][
        :WEIGHTS
    ]
    if not touched:
        return False
    noise = random.Random(0)  # noqa: S311 - the same canary everywhere is the point
    header: dict[str, object] = {}
    data = bytearray()
    for name in touched:
        rows, columns = base[name]
        stem = "base_model.model." + name.removesuffix(".weight")
        pair = {"lora_A": ((RANK, columns), STRENGTH / sqrt(columns)), "lora_B": ((rows, RANK), STRENGTH)}
        for half, (shape, scale) in pair.items():
            values = array("f", (noise.uniform(-scale, scale) for _ in range(shape[0] * shape[1]))).tobytes()
            offsets = [len(data), len(data) + len(values)]
            header[f"{stem}.{half}.weight"] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
            data += values
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(header).encode()
    (directory / WEIGHTS_FILE).write_bytes(struct.pack("<Q", len(text)) + text + data)
    modules = sorted({name.split(".")[-2] for name in touched})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": modules, "bias": "none"}
    (directory / CONFIG_FILE).write_text(json.dumps(config | {"base_model_name_or_path": ""}))
    return True
