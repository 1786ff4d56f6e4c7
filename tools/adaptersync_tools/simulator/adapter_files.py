"""What vLLM sees when it reads an adapter directory, and what it objects to.

Reads `adapter_config.json` and `adapter_model.safetensors` for real. Raises `WorkerFailure` with the words of
vLLM's worker, or FileNotFoundError where vLLM calls the adapter absent. Knows nothing about slots or HTTP.
"""

import json
import math
import struct
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")
MODULES = (*QKV, "o_proj", *GATE_UP, "down_proj")

# Initialisations that only choose starting weights; every other named one rewrites the base model.
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
_REQUIRED = ("r", "lora_alpha", "target_modules")
_MAX_HEADER = 100_000_000  # bytes, the library's limit
_SAMPLE = 64  # elements looked at to judge a tensor's size


class WorkerFailure(Exception):
    """An exception in vLLM's worker; the message is what the API quotes."""


class BaseModel(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a Qwen2- or Llama-like base that an adapter must fit."""

    hidden: int
    query: int
    key_value: int
    intermediate: int
    layers: int
    vocab: int

    @classmethod
    def from_directory(cls, directory: Path) -> "BaseModel":
        config = json.loads((directory / "config.json").read_text())
        heads = config["num_attention_heads"]
        head = config.get("head_dim") or config["hidden_size"] // heads
        return cls(
            hidden=config["hidden_size"],
            query=heads * head,
            key_value=(config.get("num_key_value_heads") or heads) * head,
            intermediate=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            vocab=config["vocab_size"],
        )

    def shape(self, module: str) -> tuple[int, int]:
        """(input, output) size of a linear layer by the last part of its name."""
        return {
            "q_proj": (self.hidden, self.query),
            "k_proj": (self.hidden, self.key_value),
            "v_proj": (self.hidden, self.key_value),
            "o_proj": (self.query, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }[module]

    def slot_tensors(self) -> int:
        """How many tensors one adapter has in a device slot, all layers' A and B."""
        return 2 * self.layers * len(MODULES)


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter as read from disk.

    `identity` covers the tensors that take effect on this base, without their scaling; it is empty if none do (B all
    zero, or only modules the base lacks), in which case vLLM silently serves the base. `effect`, 0..1, is how far it
    moves the output. `misfit` is the error of copying it into a device slot, if a tensor is too large for the base.
    `tensors` are digests of what lies in the slot, alpha folded in, by module and half; `unused` are modules that the
    base lacks.
    """

    identity: bytes
    effect: float
    misfit: str | None
    tensors: dict[str, bytes]
    unused: list[str]


def read_adapter(path: str, *, max_lora_rank: int, base: BaseModel | None) -> Adapter:
    """Read and check an adapter in vLLM's order: config, features and rank, module names, then tensors."""
    directory = Path(path)
    try:
        config = _checked_config((directory / "adapter_config.json").read_text(), max_lora_rank)
        weights = directory / "adapter_model.safetensors"
        if not weights.is_file():
            raise WorkerFailure(f"{path} doesn't contain tensors")
        tensors = _read_tensors(weights.read_bytes())
    except FileNotFoundError:
        raise
    except (OSError, json.JSONDecodeError) as error:
        raise WorkerFailure(str(error)) from error
    modules = {name: _module(name) for name in tensors}
    unexpected = [module for module in modules.values() if module.rsplit(".", 1)[-1] not in MODULES]
    if unexpected:
        raise WorkerFailure(
            f"While loading {path}, expected target modules in {set(MODULES)} but received {unexpected}. "
            "Please verify that the loaded LoRA module is correct"
        )
    scaling = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    return Adapter(
        identity=_identity(tensors, modules, base),
        effect=_effect(tensors, modules, scaling, config["r"], base),
        misfit=_misfit(tensors, modules, max_lora_rank, base) if base else None,
        tensors=_in_slot(tensors, modules, scaling, base),
        unused=sorted({module for module in modules.values() if not _in_base(module, base)}),
    )


class _Tensor(msgspec.Struct, frozen=True, kw_only=True):
    shape: list[int]
    dtype: str
    raw: Any  # memoryview, which msgspec has no type for

    def magnitude(self) -> float:
        """Mean absolute value of a few elements spread over the tensor; 0 only if every byte is 0."""
        code, width = {"F32": ("f", 4), "F16": ("e", 2), "BF16": ("", 2)}.get(self.dtype, ("", 0))
        count = len(self.raw) // width if width else 0
        if not count:
            return 1.0 if any(self.raw) else 0.0
        values = []
        for index in range(0, count, max(1, count // _SAMPLE)):
            cell = bytes(self.raw[index * width : (index + 1) * width])
            # A bfloat16 is the upper half of a float32.
            values.append(abs(struct.unpack("<" + (code or "f"), cell if code else b"\0\0" + cell)[0]))
        mean = math.fsum(values) / len(values)
        return mean if mean else (1e-9 if bytes(self.raw).strip(b"\0") else 0.0)


def _read_tensors(raw: bytes) -> dict[str, _Tensor]:
    """Every tensor of a safetensors file, by name in file order; refused in the words of that library."""

    def refuse(reason: str) -> WorkerFailure:
        return WorkerFailure(f"Error while deserializing header: {reason}")

    if len(raw) < 8:
        raise refuse("header too small")
    size = int.from_bytes(raw[:8], "little")
    if size > _MAX_HEADER:
        raise refuse("header too large")
    if 8 + size > len(raw):
        raise refuse("invalid header length")
    try:
        header: dict[str, Any] = json.loads(raw[8 : 8 + size])
        header.pop("__metadata__", None)
        spans = {name: slice(*entry["data_offsets"]) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise refuse(f"invalid JSON in header: {error}") from error
    data = memoryview(raw)[8 + size :]
    if max((span.stop for span in spans.values()), default=0) != len(data):
        raise refuse("incomplete metadata, file not fully covered")
    return {
        name: _Tensor(shape=entry["shape"], dtype=entry["dtype"], raw=data[spans[name]])
        for name, entry in header.items()
    }


def _checked_config(text: str, max_lora_rank: int) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(text)
    if missing := {name for name in _REQUIRED if name not in config}:
        raise WorkerFailure(f"Missing required configuration fields: {missing}")
    rank = config["r"]
    if rank <= 0:
        raise WorkerFailure(f"LoRA rank `r` must be a positive integer, got {rank}.")
    objections = list(_unsupported_features(config))
    largest = max([rank, *(config.get("rank_pattern") or {}).values()])
    if largest > max_lora_rank:
        objections.append(f"LoRA rank {largest} is greater than max_lora_rank {max_lora_rank}.")
    if config.get("bias", "none") != "none":
        objections.append("Adapter bias is not supported.")
    if objections:
        raise WorkerFailure(" ".join(objections))
    return config


def _unsupported_features(config: dict[str, Any]) -> Iterable[str]:
    saved = [name for name in config.get("modules_to_save") or () if name not in ("classifier", "score")]
    if saved:
        yield (
            'vLLM only supports modules_to_save being either None or ["classifier", "score"] for '
            f"classification models. Unsupported modules_to_save: {saved}"
        )
    if config.get("use_dora"):
        yield "vLLM does not yet support DoRA."
    if config.get("lora_bias"):
        yield "vLLM does not support LoRA bias (lora_bias)."
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        yield f"vLLM does not support init_lora_weights={init!r}. Inits such as PiSSA modify the base."
    if config.get("alora_invocation_tokens"):
        yield "vLLM does not support Activated LoRA (aLoRA)."
    if config.get("layer_replication"):
        yield "vLLM does not support layer_replication."
    if config.get("use_bdlora"):
        yield "vLLM does not support block-diagonal LoRA (BD-LoRA)."
    if config.get("use_qalora"):
        yield "vLLM does not support QALoRA."


def _module(tensor: str) -> str:
    stem = tensor.replace("base_model.model.", "")
    for suffix in (".lora_A.weight", ".lora_B.weight"):
        if stem.endswith(suffix):
            return stem.removesuffix(suffix)
    raise WorkerFailure(f"{tensor} is unsupported LoRA weight")


def _in_base(module: str, base: BaseModel | None) -> bool:
    """Whether the base has this layer. vLLM ignores tensors of layers it lacks, without a word."""
    if base is None:
        return True
    parts = module.split(".")
    return len(parts) == 5 and parts[:2] == ["model", "layers"] and int(parts[2]) < base.layers


def _identity(tensors: dict[str, _Tensor], modules: dict[str, str], base: BaseModel | None) -> bytes:
    digest = sha256()
    live = False
    for name in sorted(tensors):
        if not _in_base(modules[name], base):
            continue
        digest.update(name.encode() + b"\0")
        digest.update(tensors[name].raw)
        live = live or (name.endswith("lora_B.weight") and tensors[name].magnitude() > 0)
    return digest.digest() if live else b""


def _in_slot(
    tensors: dict[str, _Tensor], modules: dict[str, str], scaling: float, base: BaseModel | None
) -> dict[str, bytes]:
    """A digest for each tensor that takes effect; one that is zero everywhere leaves the slot as if it were not."""
    held = {}
    for name, tensor in tensors.items():
        if _in_base(modules[name], base) and bytes(tensor.raw).strip(b"\0"):
            half = "lora_A" if ".lora_A." in name else "lora_B"
            folded = repr(scaling).encode() if half == "lora_B" else b""
            held[f"{modules[name]}.{half}"] = sha256(folded + tensor.raw).digest()
    return held


def _effect(
    tensors: dict[str, _Tensor], modules: dict[str, str], scaling: float, rank: int, base: BaseModel | None
) -> float:
    sizes = {
        side: [t.magnitude() for name, t in tensors.items() if f".{side}." in name and _in_base(modules[name], base)]
        for side in ("lora_A", "lora_B")
    }
    if not all(sizes.values()):
        return 0.0
    mean_a, mean_b = (math.fsum(values) / len(values) for values in sizes.values())
    # the parts a rank adds up are independent, so they grow with its root; 8 is a usual rank
    return min(1.0, scaling * math.sqrt(8 * rank) * mean_a * mean_b)


def _misfit(tensors: dict[str, _Tensor], modules: dict[str, str], max_lora_rank: int, base: BaseModel) -> str | None:
    """The first copy into a device slot that fails. Smaller tensors fit: vLLM copies them into a corner."""
    by_module: dict[str, dict[str, Sequence[int]]] = {}
    for name, tensor in tensors.items():
        by_module.setdefault(modules[name], {})["A" if ".lora_A." in name else "B"] = tensor.shape
    ordered = sorted(
        (module for module in by_module if _in_base(module, base)),
        key=lambda module: (int(module.split(".")[2]), MODULES.index(module.rsplit(".", 1)[-1])),
    )
    for module in ordered:
        fan_in, fan_out = base.shape(module.rsplit(".", 1)[-1])
        for side, room in (("A", (max_lora_rank, fan_in)), ("B", (fan_out, max_lora_rank))):
            shape = by_module[module].get(side)
            for dimension in (1, 0):
                if shape is not None and shape[dimension] > room[dimension]:
                    return (
                        f"The size of tensor a ({room[dimension]}) must match the size of tensor b "
                        f"({shape[dimension]}) at non-singleton dimension {dimension}"
                    )
    return None
