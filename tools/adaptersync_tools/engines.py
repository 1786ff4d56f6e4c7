"""The command and environment of one replica's engine: vLLM on CPU, vLLM on a GPU, or the simulator.

Every engine listens on the loopback, unless told otherwise, and behind our door: runtime LoRA loading and development
mode are for its agent.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import msgspec
from msgspec import Struct

from adaptersync.engine.door import TOKEN_FILE
from adaptersync_core.vllm import WORKER_EXTENSION
from adaptersync_tools.simulator.store import Mount
from adaptersync_tools.supervisor import Spec, python

HOST = "127.0.0.1"
CPU_BLOCK = 32  # tokens; what vLLM's CPU attention takes
CPU_KV_BYTES = 256 << 20  # without a number vLLM wants almost all memory of the host, and fails if it is not free
GPU_MEMORY_SHARE = 0.9
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CPU_NICE = 5  # an engine computes all the time: a trainer, a router or Redis on the same cores goes first
ENGINE_TIER = 1


class EngineSettings(Struct, frozen=True, kw_only=True):
    """What the operator may choose. A limit of None leaves it to the engine.

    `max_loras` bounds the versions served at once: the window, a candidate, and one to spare for a rollback target.
    """

    model: Path
    base_name: str = "base"
    max_loras: int = 5
    max_cpu_loras: int = 8
    max_lora_rank: int = 16
    max_num_seqs: int = 64
    max_model_len: int | None = None
    dtype: str = "float32"
    """On CPU: 32 bits make log-probabilities comparable with a trainer's. A GPU takes the model's own type."""
    lora_target_modules: tuple[str, ...] = LINEAR
    """Modules that adapters may change. Not the head: vLLM with LoRA on it ends when a prompt is scored under load."""
    grace_s: float = 8.0
    host: str = HOST
    """Where it listens."""
    arguments: tuple[str, ...] = ()
    """More of the engine's own; the last of a kind counts."""


class EventPorts(Struct, frozen=True, kw_only=True):
    """Loopback ports for what an engine says of its KV cache: its agent listens on the first, vLLM on the second.

    vLLM binds an address without a wildcard for its replay only, and connects to the other.
    """

    events: int
    replay: int

    @property
    def endpoint(self) -> str:
        return f"tcp://{HOST}:{self.events}"

    @property
    def replay_endpoint(self) -> str:
        return f"tcp://{HOST}:{self.replay}"


def gpu_count() -> int:
    """NVIDIA GPUs on this machine, as its driver lists them."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=False)  # noqa: S603
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def vllm_spec(
    settings: EngineSettings,
    *,
    number: int,
    replicas: int,
    port: int,
    gpus: int,
    token_file: Path,
    event_ports: EventPorts,
) -> Spec:
    """Replica `number` of `replicas`; with GPUs, they are dealt out in turn. Its agent leaves its token in the file."""
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": event_ports.endpoint,
        "replay_endpoint": event_ports.replay_endpoint,
    }
    added = ["--enable-prompt-tokens-details", "--kv-events-config", json.dumps(events)]
    added += ["--middleware", "adaptersync.engine.door.Door", "--worker-extension-cls", WORKER_EXTENSION]
    spec = _vllm(settings, added, number=number, replicas=replicas, port=port, gpus=gpus)
    return msgspec.structs.replace(spec, environment={**spec.environment, TOKEN_FILE: str(token_file)})


def plain_spec(settings: EngineSettings, *, port: int, gpus: int) -> Spec:
    """The one server that TRL's own sync works with: as a replica, but for all that is ours."""
    return _vllm(settings, [], number=0, replicas=1, port=port, gpus=gpus)


def _vllm(settings: EngineSettings, added: list[str], *, number: int, replicas: int, port: int, gpus: int) -> Spec:
    environment = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    arguments = ["--model", str(settings.model), "--served-model-name", settings.base_name, *_shared(settings, port)]
    arguments += ["--enable-lora", "--logprobs-mode", "processed_logprobs"]
    arguments += ["--lora-target-modules", *settings.lora_target_modules, *added]
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = str(number % gpus)
        share = GPU_MEMORY_SHARE / -(-replicas // gpus)
        arguments += ["--gpu-memory-utilization", f"{share:.3f}"]
    else:
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        arguments += ["--dtype", settings.dtype, "--block-size", str(CPU_BLOCK)]
        arguments += ["--kv-cache-memory-bytes", str(CPU_KV_BYTES)]
    return Spec(
        name=f"engine-{number}",
        command=python("vllm.entrypoints.openai.api_server", *arguments, *settings.arguments),
        environment=environment,
        tier=ENGINE_TIER,
        grace_s=settings.grace_s,  # its front may ignore SIGTERM for ever after an unanswered /is_paused
        nice=0 if gpus else CPU_NICE,
    )


def simulator_spec(
    settings: EngineSettings,
    *,
    number: int,
    port: int,
    token_file: Path | None,
    mount: Mount | None = None,
    event_ports: EventPorts | None = None,
    options: tuple[str, ...] = (),
) -> Spec:
    """The simulator takes the model's sizes from its directory, and a byte for a token.

    Without a token file nobody is kept out, without ports nothing is said of the cache.
    `mount` is how it reads adapters, if not as they lie on the disk.
    """
    arguments = ["--model", settings.base_name, "--base-model-dir", str(settings.model)]
    arguments += [*_shared(settings, port), "--block-size", str(CPU_BLOCK)]
    arguments += ["--worker-extension-cls", WORKER_EXTENSION]
    if token_file is not None:
        arguments += ["--token-file", str(token_file)]
    if event_ports is not None:
        arguments += ["--kv-events-endpoint", event_ports.endpoint, "--kv-replay-endpoint", event_ports.replay_endpoint]
    if mount is not None:
        arguments += ["--mount", msgspec.json.encode(mount).decode()]
    command = python("adaptersync_tools.simulator", *arguments, *options, *settings.arguments)
    return Spec(name=f"engine-{number}", command=command, tier=ENGINE_TIER)


def _shared(settings: EngineSettings, port: int) -> list[str]:
    flags: dict[str, str | int | None] = {
        "--host": settings.host,
        "--port": port,
        "--max-loras": settings.max_loras,
        "--max-cpu-loras": settings.max_cpu_loras,
        "--max-lora-rank": settings.max_lora_rank,
        "--max-num-seqs": settings.max_num_seqs,
        "--max-model-len": settings.max_model_len,
    }
    return [str(part) for flag, value in flags.items() if value is not None for part in (flag, value)]
