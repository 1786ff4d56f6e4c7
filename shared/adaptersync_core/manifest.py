"""What an adapter is: the manifest of a version, and the reading of a PEFT directory that it is made from.

`inspect` accepts only what vLLM can serve as it is, so that a trainer hears of a wrong adapter when it publishes and
not from a replica. `digest` is over names, sizes and hashes of the files that are published: those the engine reads,
nothing else that happens to lie in the directory.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from adaptersync_core.errors import AdapterInvalid
from adaptersync_core.identity import adapter_id
from adaptersync_core.tensors import TensorSpec, read_header

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
FILES = (CONFIG_FILE, WEIGHTS_FILE)
MANIFEST_FILE = "manifest.json"
CHUNK = 1 << 20  # bytes read at a time while hashing or copying
CONFIG_LIMIT = 1 << 20  # bytes
WEIGHTS_LIMIT = 4 << 30  # bytes; far above any LoRA adapter, far below what would fill a host by accident
MANIFEST_LIMIT = 8 << 20  # bytes; about 40,000 tensors


class FileEntry(Struct, frozen=True, kw_only=True):
    """One published file: name in the version's directory, bytes, SHA-256 in hex."""

    name: str
    size: int
    sha256: str


class AdapterShape(Struct, frozen=True, kw_only=True):
    """What the files say: LoRA rank (the largest of all modules), alpha, modules, base model and tensors.

    `tensors` maps a PEFT parameter name to its shape. `noop` is true when every `lora_B` is zero: such an adapter is
    servable and changes nothing.
    """

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    base_model: str
    dtype: str
    tensors: dict[str, tuple[int, ...]]
    noop: bool


class Manifest(Struct, frozen=True, kw_only=True):
    """The immutable description of one version; stored beside its files and under its own Redis key."""

    run: str
    seq: int
    epoch: int
    digest: str
    files: tuple[FileEntry, ...]
    shape: AdapterShape
    created_at: float
    step: int | None = None
    timings: dict[str, float] = {}
    format: int = 1

    @property
    def adapter_id(self) -> str:
        return adapter_id(self.run, self.seq, self.digest)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def content_digest(files: tuple[FileEntry, ...]) -> str:
    """SHA-256 in hex over the sorted (hash, size, name) of the files."""
    lines = "".join(f"{file.sha256} {file.size} {file.name}\n" for file in sorted(files, key=lambda file: file.name))
    return hashlib.sha256(lines.encode()).hexdigest()


def hash_file(path: Path) -> FileEntry:
    """Read a file once and say what it holds."""
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileEntry(name=path.name, size=size, sha256=digest.hexdigest())


def inspect(directory: Path) -> AdapterShape:
    """Read a PEFT adapter directory; AdapterInvalid names what vLLM could not serve and what to change."""
    config = _config(directory / CONFIG_FILE)
    path = directory / WEIGHTS_FILE
    if not path.is_file():
        raise AdapterInvalid(
            f"{WEIGHTS_FILE} is missing",
            next_step="save it with save_pretrained(safe_serialization=True)",
            path=str(directory),
        )
    size = path.stat().st_size
    if size > WEIGHTS_LIMIT:
        raise AdapterInvalid("adapter is larger than the limit", path=str(path), size=size, limit=WEIGHTS_LIMIT)
    with path.open("rb") as file:
        tensors, data = read_header(file, size=size, name=path.name)
        rank = _check_tensors(tensors, config)
        noop = True
        for name, tensor in tensors.items():
            if ".lora_B." in name and noop:
                file.seek(data + tensor.data_offsets[0])
                noop = not any(file.read(tensor.data_offsets[1] - tensor.data_offsets[0]))
    return AdapterShape(
        rank=rank,
        alpha=config["lora_alpha"],
        target_modules=tuple(sorted(config["target_modules"])),
        base_model=config.get("base_model_name_or_path") or "",
        dtype=min(tensor.dtype for tensor in tensors.values()),
        tensors={name: tensor.shape for name, tensor in sorted(tensors.items())},
        noop=noop,
    )


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise AdapterInvalid(
            f"{CONFIG_FILE} is missing", next_step="give a PEFT adapter directory", path=str(path.parent)
        )
    if path.stat().st_size > CONFIG_LIMIT:
        raise AdapterInvalid("adapter_config.json is larger than the limit", path=str(path), limit=CONFIG_LIMIT)
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise AdapterInvalid(f"adapter_config.json is not a JSON object: {error}", path=str(path)) from error
    unsupported = {
        "peft_type": (config.get("peft_type") == "LORA", "only LoRA adapters can be served"),
        "use_dora": (not config.get("use_dora"), "vLLM cannot serve DoRA; train with use_dora=False"),
        "bias": (
            config.get("bias", "none") == "none",
            "vLLM cannot serve LoRA biases; train with bias='none'",
        ),
        "lora_bias": (
            not config.get("lora_bias"),
            "vLLM cannot serve LoRA biases; train with lora_bias=False",
        ),
        "modules_to_save": (
            not config.get("modules_to_save"),
            "vLLM cannot serve fully trained modules; drop modules_to_save",
        ),
        "target_parameters": (
            not config.get("target_parameters"),
            "vLLM cannot serve target_parameters; use target_modules",
        ),
        "init_lora_weights": (
            not str(config.get("init_lora_weights")).lower().startswith(("pissa", "corda", "olora", "loftq")),
            "this initialization changes the base weights; save a converted adapter",
        ),
    }
    for key, (fine, next_step) in unsupported.items():
        if not fine:
            raise AdapterInvalid(
                "adapter uses what vLLM cannot serve",
                next_step=next_step,
                key=key,
                value=str(config.get(key))[:64],
            )
    rank, alpha, modules = config.get("r"), config.get("lora_alpha"), config.get("target_modules")
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float):
        raise AdapterInvalid("adapter_config.json lacks a positive r and a lora_alpha", path=str(path))
    if isinstance(modules, str):
        config["target_modules"] = [modules]
    elif not isinstance(modules, list) or not modules:
        raise AdapterInvalid("adapter_config.json names no target_modules", path=str(path))
    return config


def _check_tensors(tensors: dict[str, TensorSpec], config: dict[str, Any]) -> int:
    """The largest rank; every tensor must be one half of a pair (A: rank x in, B: out x rank) of the config's rank."""
    if not tensors:
        raise AdapterInvalid("adapter has no tensors", file=WEIGHTS_FILE)
    ranks = {config["r"], *(config.get("rank_pattern") or {}).values()}
    largest = 0
    for name, tensor in tensors.items():
        half, other = (".lora_A.", ".lora_B.") if ".lora_A." in name else (".lora_B.", ".lora_A.")
        if half not in name or not name.startswith("base_model.model.") or not name.endswith(".weight"):
            raise AdapterInvalid("tensor is not a LoRA weight in PEFT's naming; vLLM would ignore it", tensor=name)
        if len(tensor.shape) != 2 or name.replace(half, other) not in tensors:
            raise AdapterInvalid("tensor is not one half of a LoRA pair", tensor=name, shape=str(tensor.shape))
        rank = tensor.shape[0 if half == ".lora_A." else 1]
        if rank not in ranks:
            raise AdapterInvalid("tensor has a rank the config does not name", tensor=name, rank=rank)
        largest = max(largest, rank)
    return largest


def check_against_base(shape: AdapterShape, base: dict[str, tuple[int, ...]]) -> None:
    """AdapterInvalid unless every pair fits a weight of the base model (`base`: parameter name to shape, out x in).

    vLLM loads an adapter of a smaller hidden size, or for layers the base lacks, without a word and serves nonsense.
    """
    for name, size in shape.tensors.items():
        is_a = ".lora_A." in name
        target = name.removeprefix("base_model.model.").replace(".lora_A." if is_a else ".lora_B.", ".")
        fits = base.get(target)
        if fits is None:
            raise AdapterInvalid(
                "base model has no such weight", next_step="check the base model of the trainer", tensor=name
            )
        if size[1 if is_a else 0] != fits[1 if is_a else 0]:
            raise AdapterInvalid(
                "tensor does not fit the base model's weight",
                next_step="check the base model of the trainer",
                tensor=name,
                shape=str(size),
                base=str(fits),
            )
