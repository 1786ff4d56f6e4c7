"""How large a deployment must be, from what it is for. Pure but for reading the base model's `config.json`.

Sizes of files are exact for models whose layers are named as Qwen's and Llama's; what they take in Redis is within a
factor of two (tested on a real one); times are what was measured on CPUs, and say so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from adaptersync.jobs.ledger import EVENTS_KEPT
from adaptersync_core.config import JobsSection
from adaptersync_core.errors import ConfigError
from adaptersync_core.fitness import ENGINE_RANKS
from adaptersync_core.keys import LANE_TTL_S, VERSION_TTL_S
from adaptersync_core.manifest import FLOATS, PREFIX, A, B
from adaptersync_tools.engines import LINEAR
from adaptersync_tools.simulator.adapter_files import BaseModel

MIB, GIB = 1 << 20, 1 << 30
NEST = {"q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn"}  # else mlp
CONFIG_BYTES = 2048  # of adapter_config.json; PEFT writes some 1.3 KB
ENGINE_BYTES = 2  # of a weight in an engine: bfloat16
BLOCK_BYTES = 100  # of the cache server for one owned block
ROW_BYTES = 1000  # of a ledger row in a stream, ids and phases included
EVENT_BYTES = 450
STORED_ROW_BYTES = 90  # of a ledger row and its fate in the archive, once a day's files are one
STORED_EVENT_BYTES = 60
FILE_BYTES = 20_000  # of the files of one drain of a run, besides what is in them; a day has that many
LINK_BYTES = 8192  # of a link in the archive's chain: a block for its directory, and one for its file
TABLES = 3  # rollouts, fates, events: a chain each
EVENTS = 8  # of a version, besides one ack a replica: published, staging, promoted, retiring, retired, ...
RECORD_BYTES = 900  # a version's record and its places in sets
LAYERS, SIZE = 2000, 1 << 32  # beyond any model: what is in its config.json is a mistake
SPARE = 2.0  # what a server is given beyond what is counted: fragmentation, buffers of clients, a day of trouble
LOAD_S = 0.02  # of a load besides its bytes, measured on vLLM's CPU build
LOADED_BYTES_S = 1e9  # bytes a second that a load reads and copies: 10 MB in 30 ms, measured the same way
AUDITED_BYTES_S = 0.8e9  # bytes a second that a proof compares in the engine


class Wanted(Struct, frozen=True, kw_only=True):
    """What the deployment is for. `window` is trainer.max_staleness; `step_s` passes between two publications."""

    rank: int = 16
    window: int = 2
    runs: int = 1
    replicas: int = 2
    targets: tuple[str, ...] = LINEAR
    dtype: str = "F32"
    step_s: float = 60.0
    rollouts: int = 256
    days: float = 30.0
    lane_bytes: int = 64 * MIB
    blocks_per_version: int = 500_000
    ledger_kept_s: float = JobsSection().ledger_kept_s
    ledger_s: float = JobsSection().ledger_s
    network_bytes_s: float = 1e9 / 8


class Number(Struct, frozen=True, kw_only=True):
    """One figure of the plan with its reason; bytes and seconds unless it is a count."""

    name: str
    value: float
    unit: str
    why: str


class Plan(Struct, frozen=True, kw_only=True):
    wanted: Wanted
    flags: dict[str, int]
    numbers: tuple[Number, ...]

    def __getitem__(self, name: str) -> float:
        return next(number.value for number in self.numbers if number.name == name)


def base_model(directory: Path) -> BaseModel:
    """Sizes of the base model; ConfigError where they cannot be told from its config."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        experts = [key for key in config if "expert" in key]
        if experts:
            raise ConfigError(
                "sizes of a mixture of experts are not known here",
                next_step="save an adapter of it, and multiply its size",
                key=experts[0],
                path=str(directory),
            )
        base = BaseModel.from_directory(directory)
        for name, size in msgspec.structs.asdict(base).items():
            if type(size) is not int or not 0 < size <= (LAYERS if name == "layers" else SIZE):
                raise ValueError(f"{name} cannot be {size}")
        return base
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError) as error:
        raise ConfigError(
            f"base model's config.json cannot be read: {error!r}",
            next_step="give the directory of a model whose layers are like Qwen's or Llama's",
            path=str(directory),
        ) from error


def tensors(base: BaseModel, *, rank: int, targets: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Names and shapes of what PEFT saves."""
    shapes: dict[str, tuple[int, int]] = {}
    for layer in range(base.layers):
        for module in targets:
            before, after = base.shape(module)
            stem = f"{PREFIX}model.layers.{layer}.{NEST.get(module, 'mlp')}.{module}"
            shapes[stem + A], shapes[stem + B] = (rank, before), (after, rank)
    return dict(sorted(shapes.items()))


def weights_size(shapes: Mapping[str, tuple[int, int]], dtype: str) -> int:
    """Bytes of the safetensors file: its header, as the library writes it, and the data."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (rows, columns) in sorted(shapes.items()):
        end = at + rows * columns * FLOATS[dtype]
        header[name] = {"dtype": dtype, "shape": [rows, columns], "data_offsets": [at, end]}
        at = end
    length = len(json.dumps(header, separators=(",", ":")))
    return 8 + -(-length // 8) * 8 + at


def manifest_size(shapes: Mapping[str, tuple[int, int]], targets: Sequence[str]) -> int:
    """Bytes of a manifest, in Redis and in the store: above all its list of tensors."""
    return len(msgspec.json.encode({"tensors": shapes, "modules": list(targets)})) + 900


def plan(base: BaseModel, wanted: Wanted) -> Plan:
    for option, value in (("--days", wanted.days), ("--step", wanted.step_s)):
        if not math.isfinite(value):
            raise ConfigError("option must be a number", option=option, value=value)
    if unknown := set(wanted.targets) - set(LINEAR):
        raise ConfigError("no such module", next_step=f"choose of {', '.join(LINEAR)}", module=sorted(unknown)[0])
    rank = next((one for one in ENGINE_RANKS if one >= wanted.rank), 0)
    if not rank:
        raise ConfigError("vLLM serves no such rank", next_step=f"choose at most {ENGINE_RANKS[-1]}", rank=wanted.rank)
    live = wanted.runs * (wanted.window + 2)
    flags = {"--max-loras": live + 1, "--max-cpu-loras": live + 4, "--max-lora-rank": rank}
    return Plan(wanted=wanted, flags=flags, numbers=tuple(_numbers(base, wanted, flags, live)))


def _numbers(base: BaseModel, wanted: Wanted, flags: Mapping[str, int], live: int) -> Iterator[Number]:
    shapes = tensors(base, rank=wanted.rank, targets=wanted.targets)
    parameters = sum(rows * columns for rows, columns in shapes.values())
    file = weights_size(shapes, wanted.dtype)
    version = file + CONFIG_BYTES
    manifest = manifest_size(shapes, wanted.targets)
    versions = wanted.runs * wanted.days * 86400 / wanted.step_s
    remembered = wanted.runs * min(wanted.days * 86400, VERSION_TTL_S) / wanted.step_s
    slots = tensors(base, rank=flags["--max-lora-rank"], targets=LINEAR)
    slot = sum(rows * columns for rows, columns in slots.values()) * ENGINE_BYTES
    rows_s = wanted.runs * wanted.rollouts / wanted.step_s
    events_s = wanted.runs * (EVENTS + wanted.replicas) / wanted.step_s
    streamed_s = wanted.ledger_kept_s + wanted.ledger_s  # what is younger is not trimmed

    def number(name: str, value: float, unit: str, why: str) -> Number:
        return Number(name=name, value=round(value, 6) if unit in ("s", "share") else round(value), unit=unit, why=why)

    yield number(
        "adapter",
        file,
        "bytes",
        f"{parameters:,} weights of rank {wanted.rank} in {wanted.dtype}: {len(shapes)} tensors, {base.layers} layers",
    )
    yield number(
        "versions live",
        live,
        "",
        f"of {wanted.runs} runs, each with its current version, {wanted.window} before it, and one on its way in",
    )
    yield number(
        "--max-loras",
        flags["--max-loras"],
        "",
        "versions live, and the canary that proves an engine; with fewer, a load evicts what is served",
    )
    yield number(
        "--max-cpu-loras",
        flags["--max-cpu-loras"],
        "",
        "the same, and three to spare: a load under way, one that failed, one that is not unloaded yet",
    )
    yield number(
        "--max-lora-rank",
        flags["--max-lora-rank"],
        "",
        f"the smallest that vLLM takes and that rank {wanted.rank} fits; larger costs memory and speed",
    )
    yield number(
        "device memory for slots",
        flags["--max-loras"] * slot,
        "bytes",
        f"slots of rank {flags['--max-lora-rank']} for all linear layers, in bfloat16; taken from the KV cache",
    )
    yield number(
        "host memory of an engine",
        flags["--max-cpu-loras"] * parameters * ENGINE_BYTES + 2 * file,
        "bytes",
        "--max-cpu-loras adapters in bfloat16, and a file twice while it is read; besides what vLLM itself takes",
    )
    yield number(
        "stage of a replica",
        (live + 1) * version,
        "bytes",
        "files of the versions live and of one that leaves; on local disk, or in /dev/shm",
    )
    remembers = remembered * (manifest + RECORD_BYTES)
    rows, events = rows_s * streamed_s, 2 * EVENTS_KEPT + events_s * streamed_s
    yield number(
        "control server",
        SPARE * (remembers + events * EVENT_BYTES + rows * ROW_BYTES) + 64 * MIB,
        "bytes",
        f"maxmemory: {remembered:,.0f} versions are remembered for {VERSION_TTL_S // 86400} days, with"
        f" {manifest + RECORD_BYTES:,} bytes each; {events:,.0f} events, and {rows:,.0f} ledger rows, those of"
        f" jobs.ledger_kept_s = {wanted.ledger_kept_s:g}: a worker archives the rest; twice that",
    )
    lane = version if version <= wanted.lane_bytes else 0
    lanes = wanted.runs * max(1.0, LANE_TTL_S / wanted.step_s) * lane
    how = f"bytes on their way for {LANE_TTL_S} s" if lane else "no bytes: above redis.lane_bytes they take the store"
    yield number(
        "cache server",
        SPARE * (lanes + live * wanted.blocks_per_version * BLOCK_BYTES / 4) + 64 * MIB,
        "bytes",
        f"maxmemory: {how}; a quarter of group.blocks_per_version for {live} versions; twice that. More is evicted",
    )
    yield number(
        "store",
        versions * (version + manifest),
        "bytes",
        f"{versions:,.0f} versions of {wanted.days:g} days, if nothing is removed before",
    )
    drains = 86400 / wanted.ledger_s  # of a day
    archived = (rows_s * STORED_ROW_BYTES + events_s * STORED_EVENT_BYTES) * wanted.days * 86400
    yield number(
        "ledger in the store",
        archived + wanted.days * drains * TABLES * LINK_BYTES + drains * wanted.runs * FILE_BYTES,
        "bytes",
        f"{rows_s * wanted.days * 86400:,.0f} rollouts of {wanted.days:g} days, with events; a link for each drain that"
        f" finds any, every {wanted.ledger_s:g} s; a file of each for a day. Nothing of it is ever removed",
    )
    stall = LOAD_S + file / LOADED_BYTES_S + file / AUDITED_BYTES_S
    yield number(
        "stall of an engine",
        stall,
        "s",
        "for which it generates nothing while a version comes: load and proof, in parts; as measured on CPUs",
    )
    yield number(
        "sync share of an engine",
        min(1.0, wanted.runs * stall / wanted.step_s),
        "share",
        f"that, each {wanted.step_s:g} s for each run: generation that is lost to synchronization",
    )
    yield number(
        "publication to promotion",
        (wanted.replicas + 1) * version / wanted.network_bytes_s + stall + 0.1,
        "s",
        f"{wanted.replicas + 1} copies over one link of {wanted.network_bytes_s * 8 / 1e9:g} Gbit/s, the stall, and"
        " 0.1 s of words; training, and the versions before, go on meanwhile",
    )
