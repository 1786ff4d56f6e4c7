"""What an adapter is: the manifest of a version, and the reading of a PEFT directory that it is made from.

`inspect` accepts only what vLLM can serve as it is, so that a trainer hears of a wrong adapter when it publishes and
not from a replica. `digest` is over names, sizes and hashes of the files that are published: those the engine reads,
nothing else that happens to lie in the directory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
from msgspec import Meta, Struct

from adaptersync_core.errors import AdapterInvalid
from adaptersync_core.identity import adapter_id
from adaptersync_core.proof import Probe
from adaptersync_core.tensors import TensorSpec, finite, read_header

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
FILES = (CONFIG_FILE, WEIGHTS_FILE)
MANIFEST_FILE = "manifest.json"
CHUNK = 1 << 20  # bytes read at a time while hashing or copying
CONFIG_LIMIT = 1 << 20  # bytes
WEIGHTS_LIMIT = 4 << 30  # bytes; far above any LoRA adapter, far below what would fill a host by accident
BASE_LIMIT = 4096  # characters of a base model's name; no path is longer
MANIFEST_LIMIT = 8 << 20  # bytes; about 40,000 tensors
PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"  # of a tensor's name, as PEFT saves it
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # parts of names that only trainers have
FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes of the types an adapter may have
PLAIN_INITIALIZATIONS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")  # those that leave the base as it is


class FileEntry(Struct, frozen=True, kw_only=True):
    """One published file: name in the version's directory, bytes, SHA-256 in hex."""

    name: str
    size: int
    sha256: str


class PeftConfig(Struct, frozen=True, kw_only=True):
    """The fields of adapter_config.json that matter here; those that switch on what vLLM cannot serve may be anything.

    `target_modules` may be one name or pattern. `rank_pattern` maps module names or patterns to their own ranks.
    """

    r: Annotated[int, Meta(ge=1)]
    lora_alpha: float
    target_modules: str | Annotated[list[str], Meta(min_length=1)]
    peft_type: str = ""
    base_model_name_or_path: str | None = None
    rank_pattern: dict[str, Annotated[int, Meta(ge=1)]] | None = None
    bias: Any = "none"
    init_lora_weights: Any = True
    use_dora: Any = False
    lora_bias: Any = False
    modules_to_save: Any = None
    target_parameters: Any = None
    alora_invocation_tokens: Any = None
    layer_replication: Any = None
    use_bdlora: Any = None
    use_qalora: Any = False


class AdapterShape(Struct, frozen=True, kw_only=True):
    """What the files say: LoRA rank (the largest of all that the config names), alpha, modules, base model and tensors.

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
    """The immutable description of one version; stored beside its files and under its own Redis key.

    `repeats` is the version that the same trainer published before this one, where that has the very same bytes.
    `markers` is how many marker names are left for it in the store; as announced 0 when none could be.

    `timings` are seconds by the trainer's own monotonic clock. Of this version: `step_s` between the sync before and
    this one, `gather_s`, `save_s`, `queued_s` until its turn came, `hashed_s`. Of what went before it: `sync_s` for
    which the sync before held training up, `rollout_wait_s` for which training since then had no sample; and means of
    `score_s` a group, `sample_queue_s` a sample in the trainer's queue, `backpressure_s` one that found it full.
    `load` is how much of what was in use: `inflight` rollouts of `inflight_max`, `queued` samples of `queued_max`.
    Whatever is not there was not told. `traceparent` is the span of its publication, where that is traced.
    """

    run: str
    seq: int
    epoch: int
    digest: str
    files: tuple[FileEntry, ...]
    shape: AdapterShape
    created_at: float
    step: int | None = None
    probe: Probe | None = None
    repeats: str = ""
    markers: int = 0
    timings: dict[str, float] = {}
    load: dict[str, float] = {}
    traceparent: str = ""
    format: int = 1

    def __post_init__(self) -> None:
        """A manifest that was read may come from anywhere, and its file names become part of paths."""
        if not {file.name for file in self.files} <= set(FILES):
            raise ValueError(f"files may be {' and '.join(FILES)} only")

    @property
    def adapter_id(self) -> str:
        return adapter_id(self.run, self.seq, self.digest)

    @property
    def noop(self) -> str:
        """Why the version changes nothing, or nothing: the trainer may have trained, and this does not show it."""
        if self.shape.noop:
            return "every lora_B is zero"
        return f"same bytes as {self.repeats}" if self.repeats else ""

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
    config = read_config(directory / CONFIG_FILE)
    for objection in unservable(config):
        raise objection
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
            if noop and name.endswith(B):
                file.seek(data + tensor.data_offsets[0])
                noop = _zero(file, tensor.data_offsets[1] - tensor.data_offsets[0], FLOATS[tensor.dtype])
    modules = config.target_modules
    return AdapterShape(
        rank=rank,
        alpha=config.lora_alpha,
        target_modules=(modules,) if isinstance(modules, str) else tuple(sorted(modules)),
        base_model=_in_one_line(config.base_model_name_or_path or ""),
        dtype=min(tensor.dtype for tensor in tensors.values()),
        tensors={name: tensor.shape for name, tensor in sorted(tensors.items())},
        noop=noop,
    )


def _in_one_line(name: str) -> str:
    """A name as it may be logged: whoever made the adapter wrote it."""
    return (name if name.isprintable() else ascii(name)[1:-1])[:BASE_LIMIT]


def check_finite(directory: Path) -> None:
    """AdapterInvalid, with the tensor's name, where a weight is infinite or NaN: the engine would serve noise."""
    path = directory / WEIGHTS_FILE
    with path.open("rb") as file:
        tensors, data = read_header(file, size=path.stat().st_size, name=path.name)
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
            file.seek(data + tensor.data_offsets[0])
            if not finite(file, tensor):
                raise AdapterInvalid(
                    "tensor has values that are infinite or not a number",
                    next_step="training has diverged: go back to a checkpoint from before",
                    tensor=name,
                )


def _zero(file: BinaryIO, size: int, width: int) -> bool:
    """Whether the next `size` bytes are floats of `width` bytes that are all zero, negative zero included."""
    while size > 0:
        chunk = file.read(min(CHUNK, size))
        if not chunk or chunk.count(0) + chunk[width - 1 :: width].count(0x80) != len(chunk):
            return False
        size -= len(chunk)
    return True


def read_config(path: Path) -> PeftConfig:
    """adapter_config.json; AdapterInvalid when there is none, or it is of no LoRA adapter."""
    if not path.is_file():
        raise AdapterInvalid(
            f"{CONFIG_FILE} is missing", next_step="give a PEFT adapter directory", path=str(path.parent)
        )
    if path.stat().st_size > CONFIG_LIMIT:
        raise AdapterInvalid("adapter_config.json is larger than the limit", path=str(path), limit=CONFIG_LIMIT)
    try:
        config = msgspec.json.decode(path.read_bytes(), type=PeftConfig)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise AdapterInvalid(f"adapter_config.json is not a LoRA configuration: {error}", path=str(path)) from error
    return config


def unservable(config: PeftConfig) -> Iterator[AdapterInvalid]:
    """What a configuration switches on that vLLM cannot serve, one by one."""
    initialization = config.init_lora_weights
    plain = not isinstance(initialization, str) or initialization.lower() in PLAIN_INITIALIZATIONS
    unsupported = {
        "peft_type": (config.peft_type == "LORA", "only LoRA adapters can be served"),
        "use_dora": (not config.use_dora, "vLLM cannot serve DoRA; train with use_dora=False"),
        "bias": (config.bias == "none", "vLLM cannot serve LoRA biases; train with bias='none'"),
        "lora_bias": (not config.lora_bias, "vLLM cannot serve LoRA biases; train with lora_bias=False"),
        "modules_to_save": (
            not config.modules_to_save,
            "vLLM cannot serve fully trained modules; drop modules_to_save",
        ),
        "target_parameters": (
            not config.target_parameters,
            "vLLM cannot serve target_parameters; use target_modules",
        ),
        "init_lora_weights": (plain, "this initialization changes the base weights; save a converted adapter"),
        "alora_invocation_tokens": (not config.alora_invocation_tokens, "vLLM cannot serve activated LoRA"),
        "layer_replication": (not config.layer_replication, "vLLM cannot serve replicated layers"),
        "use_bdlora": (not config.use_bdlora, "vLLM cannot serve block-diagonal LoRA"),
        "use_qalora": (not config.use_qalora, "vLLM cannot serve QALoRA"),
    }
    for key, (fine, next_step) in unsupported.items():
        if not fine:
            value = str(getattr(config, key))[:64]
            yield AdapterInvalid("adapter uses what vLLM cannot serve", next_step=next_step, key=key, value=value)


def _check_tensors(tensors: dict[str, TensorSpec], config: PeftConfig) -> int:
    """The rank as vLLM counts it, which is the largest in the config, be it of no module.

    Every tensor must be half of a pair (A: rank x in, B: out x rank) of a rank in the config. PEFT's prefix may be
    missing, as in what PRIME-RL writes: vLLM takes both.
    """
    if not tensors:
        raise AdapterInvalid("adapter has no tensors", file=WEIGHTS_FILE)
    ranks = {config.r, *(config.rank_pattern or {}).values()}
    modules: dict[str, str] = {}
    for name, tensor in tensors.items():
        _check_name(name)
        other = tensors.get(name.removesuffix(A) + B if name.endswith(A) else name.removesuffix(B) + A)
        if other is None or len(tensor.shape) != 2 or len(other.shape) != 2:
            raise AdapterInvalid("tensor is not one half of a LoRA pair", tensor=name, shape=str(tensor.shape))
        rank = tensor.shape[0 if name.endswith(A) else 1]
        if rank not in ranks or rank != other.shape[1 if name.endswith(A) else 0]:
            raise AdapterInvalid("tensor has a rank the config or its other half does not name", tensor=name, rank=rank)
        if tensor.dtype not in FLOATS:
            raise AdapterInvalid("tensor has a type vLLM cannot serve", tensor=name, dtype=tensor.dtype)
        if (twin := modules.setdefault(name.removeprefix(PREFIX), name)) != name:
            raise AdapterInvalid(f"tensor is there twice, also as {twin}", next_step="save it once", tensor=name)
    return max(ranks)


def _check_name(name: str) -> None:
    """AdapterInvalid unless vLLM takes the tensor for half of a LoRA pair, and of the module that was trained."""
    parts = name.removeprefix(PREFIX).split(".")
    wrapper = next((part for part in parts if part in WRAPPERS), "module" if parts[0] == "module" else "")
    next_step = ""
    if "lora_magnitude_vector" in parts:
        next_step = "vLLM cannot serve DoRA; train with use_dora=False"
    elif "lora_embedding_A" in parts or "lora_embedding_B" in parts:
        next_step = "the fleet serves no trained embeddings; leave them out of target_modules"
    elif name.endswith(".bias"):
        next_step = "vLLM cannot serve biases; train with bias='none' and lora_bias=False"
    elif "lora_A" not in parts and "lora_B" not in parts:
        next_step = "vLLM serves no whole weights; drop modules_to_save, and save with save_embedding_layers=False"
    elif not name.endswith((A, B)) or wrapper == "module":
        next_step = "a state dict is no adapter: save it with the unwrapped model's save_pretrained"
    elif wrapper:
        next_step = f"vLLM would ignore it: take {wrapper} out of the name, or save the unwrapped model"
    elif parts[0] == "base_model":
        next_step = f"vLLM would ignore it: names begin with {PREFIX}, or with the model's own first module"
    if next_step:
        raise AdapterInvalid("tensor is not a LoRA weight that the fleet can serve", next_step=next_step, tensor=name)


def check_against_base(shape: AdapterShape, base: dict[str, tuple[int, ...]]) -> None:
    """AdapterInvalid unless every pair fits a weight of the base model (`base`: parameter name to shape, out x in).

    vLLM loads an adapter of a smaller hidden size, or for layers the base lacks, without a word and serves nonsense.
    """
    for name, size in shape.tensors.items():
        half = A if name.endswith(A) else B
        shared = 1 if half == A else 0  # the dimension a half has in common with the base's weight
        fits = base.get(name.removeprefix(PREFIX).removesuffix(half) + ".weight")
        if fits is None:
            raise AdapterInvalid(
                "base model has no such weight", next_step="check the base model of the trainer", tensor=name
            )
        if len(fits) != 2 or size[shared] != fits[shared]:
            raise AdapterInvalid(
                "tensor does not fit the base model's weight",
                next_step="check the base model of the trainer",
                tensor=name,
                shape=str(size),
                base=str(fits),
            )
