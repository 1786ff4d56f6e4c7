"""Start a simulated vLLM replica: `python -m adaptersync_tools.simulator`. Flags have vLLM's names."""

import argparse
import asyncio
import signal
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from adaptersync_core.vllm import WORKER_EXTENSION
from adaptersync_tools.simulator.adapter_files import BaseModel
from adaptersync_tools.simulator.engine import EngineConfig
from adaptersync_tools.simulator.http import Simulator, SimulatorConfig, serving
from adaptersync_tools.simulator.publisher import PublisherConfig
from adaptersync_tools.simulator.scheduler import Latency
from adaptersync_tools.simulator.store import Mount
from adaptersync_tools.simulator.tokenizer import ModelTokenizer, Tokenizer


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m adaptersync_tools.simulator", description=__doc__)
    add = parser.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000, help="0 takes a free one; the address is printed on standard output")
    add("--model", default="base", help="the served name of the base model")
    add("--base-model-dir", type=Path, help="a model directory whose config.json gives the base's sizes")
    add("--tokenizer", help="a model directory with a tokenizer; without it a token is a byte")
    add("--max-loras", type=int, default=1)
    add("--max-cpu-loras", type=int, help="default: --max-loras")
    add("--max-lora-rank", type=int, default=16)
    add("--block-size", type=int, default=16)
    add("--num-blocks", type=int, default=1024, help="size of the prefix cache, in blocks")
    add("--max-model-len", type=int, default=2048)
    add("--max-num-seqs", type=int, default=8)
    add(
        "--kv-events-endpoint",
        help="binds if it has a * or is ipc, else connects, as vLLM does",
    )
    add("--kv-replay-endpoint")
    add("--kv-buffer-steps", type=int, default=10_000, help="what it can say once more")
    add("--data-parallel-size", type=int, default=1, help="engines behind one server, chosen by X-data-parallel-rank")
    add("--kv-events-topic", default="")
    add(
        "--latency",
        default="{}",
        help='JSON: {"prefill_tokens_per_s": 8000, "decode_tokens_per_s": 50, "load_s": 0.05}; 0 takes no time',
    )
    add("--stop-probability", type=float, default=0.0, help="that a token ends the answer before max_tokens")
    add("--enable-request-id-headers", action="store_true")
    add(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="bfloat16 rounds log-probabilities coarsely"
    )
    add("--lora-on-head", action="store_true", help="as vLLM for Llama and Qwen3: scoring a prompt may end the server")
    add("--worker-extension-cls", choices=("", WORKER_EXTENSION), default="", help="our auditor in the worker")
    add("--token-file", type=Path, help="put our door before the server, with the token in this file")
    add(
        "--mount",
        help='JSON: {"root": "/store", "visibility_delay_s": 3, "negative_ttl_s": 30}; adapters are read there',
    )
    add("--no-dev-mode", action="store_true", help="leave out the routes behind VLLM_SERVER_DEV_MODE")
    add("--death-grace-s", type=float, default=0.5, help="from the engine's death to the end of the process")
    return parser


def _config(options: argparse.Namespace) -> SimulatorConfig:
    directory: Path | None = options.base_model_dir
    kv_events = None
    if options.kv_events_endpoint:
        kv_events = PublisherConfig(
            endpoint=options.kv_events_endpoint,
            replay_endpoint=options.kv_replay_endpoint,
            buffer_steps=options.kv_buffer_steps,
            topic=options.kv_events_topic,
        )
    return SimulatorConfig(
        engine=EngineConfig(
            model=options.model,
            root=str(directory or options.model),
            max_loras=options.max_loras,
            max_cpu_loras=options.max_cpu_loras,
            max_lora_rank=options.max_lora_rank,
            block_size=options.block_size,
            num_blocks=options.num_blocks,
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_num_seqs,
            dtype=options.dtype,
            lora_on_head=options.lora_on_head,
            stop_probability=options.stop_probability,
            base=BaseModel.from_directory(directory) if directory else None,
        ),
        latency=msgspec.json.decode(options.latency, type=Latency),
        kv_events=kv_events,
        ranks=options.data_parallel_size,
        token_file=options.token_file,
        worker_extension_cls=options.worker_extension_cls,
        dev_mode=not options.no_dev_mode,
        request_id_headers=options.enable_request_id_headers,
        death_grace_s=options.death_grace_s,
        mount=msgspec.json.decode(options.mount, type=Mount) if options.mount else None,
    )


async def _serve(config: SimulatorConfig, tokenizer: Tokenizer | None, host: str, port: int) -> None:
    """Serve until a signal, or until some time after the engine has died."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    simulator = Simulator(config, tokenizer)
    async with serving(simulator, host=host, port=port) as address:
        print(f"ready {address.url}", flush=True)
        stopping = asyncio.create_task(stop.wait())
        dying = asyncio.create_task(simulator.scheduler.dead.wait())
        await asyncio.wait((stopping, dying), return_when=asyncio.FIRST_COMPLETED)
        dying.cancel()
        if not stopping.done():
            with suppress(TimeoutError):
                async with asyncio.timeout(config.death_grace_s):
                    await stopping


def main(arguments: list[str] | None = None) -> int:
    """Run a replica. Returns 0 even if its engine died: so does vLLM."""
    options = _parser().parse_args(arguments)
    tokenizer = ModelTokenizer(options.tokenizer) if options.tokenizer else None
    asyncio.run(_serve(_config(options), tokenizer, options.host, options.port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
