"""How replicas' engines are started on a CPU, on GPUs, and simulated."""

from __future__ import annotations

import json
from pathlib import Path

from adaptersync.engine.audit import Auditor
from adaptersync.engine.door import TOKEN_FILE, Door
from adaptersync_tools.engines import EngineSettings, EventPorts, plain_spec, simulator_spec, vllm_spec

EVENTS = EventPorts(events=9101, replay=9102)
TOKEN = Path("/state/replica-0.token")
SETTINGS = EngineSettings(model=Path("/models/tiny"), max_lora_rank=8, max_model_len=128)


def value(command: tuple[str, ...], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_a_replica_on_a_cpu() -> None:
    spec = vllm_spec(SETTINGS, number=1, replicas=2, port=9001, gpus=0, token_file=TOKEN, event_ports=EVENTS)
    assert spec.command[1:3] == ("-m", "vllm.entrypoints.openai.api_server")
    assert value(spec.command, "--model") == "/models/tiny"
    assert value(spec.command, "--served-model-name") == "base"
    assert value(spec.command, "--host") == "127.0.0.1"
    assert value(spec.command, "--block-size") == "32"
    assert int(value(spec.command, "--kv-cache-memory-bytes")) < 1 << 30
    assert spec.environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert spec.environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "--enable-lora" in spec.command


def test_every_engine_has_our_door_and_our_auditor() -> None:
    real = vllm_spec(SETTINGS, number=0, replicas=1, port=9001, gpus=1, token_file=TOKEN, event_ports=EVENTS)
    assert value(real.command, "--middleware") == f"{Door.__module__}.{Door.__name__}"
    assert value(real.command, "--worker-extension-cls") == f"{Auditor.__module__}.{Auditor.__name__}"
    assert real.environment[TOKEN_FILE] == str(TOKEN)
    assert value(real.command, "--lora-target-modules") == "q_proj"
    assert "lm_head" not in real.command
    simulated = simulator_spec(SETTINGS, number=0, port=9001, token_file=TOKEN).command
    assert value(simulated, "--worker-extension-cls") == value(real.command, "--worker-extension-cls")
    assert value(simulated, "--token-file") == str(TOKEN)


def test_the_server_that_trl_works_with_alone_is_a_replica_without_what_is_ours() -> None:
    replica = vllm_spec(SETTINGS, number=0, replicas=1, port=9001, gpus=0, token_file=TOKEN, event_ports=EVENTS)
    plain = plain_spec(SETTINGS, port=9001, gpus=0)
    added = [part for part in replica.command if part not in plain.command]
    assert {part for part in added if part.startswith("--")} == {
        "--enable-prompt-tokens-details",
        "--kv-events-config",
        "--middleware",
        "--worker-extension-cls",
    }
    assert [part for part in replica.command if part not in added] == list(plain.command)
    assert plain.environment == {name: value for name, value in replica.environment.items() if name != TOKEN_FILE}


def test_every_engine_says_on_the_loopback_what_it_caches() -> None:
    """To an agent that listens: vLLM connects to an address without a wildcard."""
    real = vllm_spec(SETTINGS, number=0, replicas=1, port=9001, gpus=1, token_file=TOKEN, event_ports=EVENTS).command
    simulated = simulator_spec(SETTINGS, number=0, port=9001, token_file=TOKEN, event_ports=EVENTS).command
    config = json.loads(value(real, "--kv-events-config"))
    assert config["enable_kv_cache_events"]
    assert config["endpoint"] == value(simulated, "--kv-events-endpoint") == "tcp://127.0.0.1:9101"
    assert config["replay_endpoint"] == value(simulated, "--kv-replay-endpoint") == "tcp://127.0.0.1:9102"


def test_replicas_share_gpus_in_turn() -> None:
    specs = [
        vllm_spec(SETTINGS, number=number, replicas=3, port=9000, gpus=2, token_file=TOKEN, event_ports=EVENTS)
        for number in range(3)
    ]
    assert [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in specs] == ["0", "1", "0"]
    assert {value(spec.command, "--gpu-memory-utilization") for spec in specs} == {"0.450"}
    for spec in specs:
        assert not {"--dtype", "--block-size", "--kv-cache-memory-bytes"} & set(spec.command)
        assert "OMP_NUM_THREADS" not in spec.environment


def test_a_simulated_replica_has_the_same_limits() -> None:
    real = vllm_spec(SETTINGS, number=0, replicas=1, port=9001, gpus=0, token_file=TOKEN, event_ports=EVENTS).command
    simulated = simulator_spec(SETTINGS, number=0, port=9001, token_file=TOKEN).command
    for flag in ("--max-loras", "--max-cpu-loras", "--max-lora-rank", "--max-model-len", "--block-size", "--port"):
        assert value(simulated, flag) == value(real, flag)
    assert value(simulated, "--base-model-dir") == "/models/tiny"


def test_an_engine_gives_way_on_cores_that_it_shares() -> None:
    on_cpu, on_gpu = (plain_spec(SETTINGS, port=1, gpus=gpus).nice for gpus in (0, 1))
    assert on_cpu > on_gpu == 0
