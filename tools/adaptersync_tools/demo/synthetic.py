"""A trainer without a model, for a fleet of simulated replicas: real files and requests, nothing that learns.

    python -m adaptersync_tools.demo.synthetic --run NAME --steps 60 --out OUT

Each step asks the router for groups of answers from the run's current version, writes an adapter of fitting shapes with
new random weights, and publishes it; a figure line goes to `OUT/steps.jsonl`. There is no reward: the weights mean
nothing, so none is made up. Torch-free, and with it the base model it belongs to (`write_base_model`).
"""

from __future__ import annotations

import argparse
import array
import asyncio
import math
import random
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

import aiohttp
import msgspec
from msgspec import Struct

from adaptersync.trainer import AdapterPublisher, Publication
from adaptersync.trainer.figures import WAIT, Figures
from adaptersync_core.config import Config, load_config
from adaptersync_core.errors import AdapterSyncError, PublicationFailed

RANK = 8
GROUPS, GROUP_SIZE = 4, 8  # prompts a step, answers a prompt
ANSWER_TOKENS = 8
REQUEST_S = 30.0
OUTCOME_S = 60.0
PROMPT = "Add two numbers of two digits each and answer with three digits, nothing else: {} + {} = "

Fill = Callable[[int], bytes]


class Sizes(Struct, frozen=True, kw_only=True):
    """Of a base model, and the rank of the adapters made for it; the default is as small as is useful."""

    hidden: int = 128
    intermediate: int = 256
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    vocabulary: int = 320
    rank: int = RANK

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Out x in, as in a Qwen2 layer."""
        key_value = self.hidden // self.heads * self.kv_heads
        return {
            "self_attn.q_proj": (self.hidden, self.hidden),
            "self_attn.k_proj": (key_value, self.hidden),
            "self_attn.v_proj": (key_value, self.hidden),
            "self_attn.o_proj": (self.hidden, self.hidden),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }


SMALL = Sizes()


class Step(Struct, frozen=True, kw_only=True):
    """One line of steps.jsonl. `behind` is how many publications the oldest answer's version was behind."""

    step: int
    seconds: float
    version: str
    rollouts: int
    failed: int
    behind: int
    rollout_s: float
    publish_s: float


def write_base_model(directory: Path, sizes: Sizes = SMALL) -> Path:
    """A model directory with the sizes and tensor names of a Qwen2; the weights are zeros."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }
    (directory / "config.json").write_bytes(msgspec.json.encode(config))
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (sizes.vocabulary, sizes.hidden)}
    tensors["model.norm.weight"] = (sizes.hidden,)
    for layer in range(sizes.layers):
        tensors |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in sizes.shapes().items()}
    with (directory / "model.safetensors").open("wb") as file:
        write_tensors(file, tensors, bytes)
    return directory


def write_adapter(directory: Path, *, base: str, seed: int, sizes: Sizes = SMALL) -> Path:
    """A PEFT adapter on every linear layer, with random weights of its own."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": sizes.rank,
        "lora_alpha": 2 * sizes.rank,
        "target_modules": sorted(name.rpartition(".")[2] for name in sizes.shapes()),
        "bias": "none",
        "modules_to_save": None,
    }
    (directory / "adapter_config.json").write_bytes(msgspec.json.encode(config))
    tensors: dict[str, tuple[int, ...]] = {}
    for layer in range(sizes.layers):
        for name, (rows, columns) in sizes.shapes().items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = (sizes.rank, columns)
            tensors[f"{prefix}.lora_B.weight"] = (rows, sizes.rank)
    rng = random.Random(seed)  # noqa: S311 (weights, not secrets)

    def fill(count: int) -> bytes:
        values = array.array("f", (rng.uniform(-0.05, 0.05) for _ in range(count // 4)))
        if sys.byteorder == "big":
            values.byteswap()
        return values.tobytes()

    with (directory / "adapter_model.safetensors").open("wb") as file:
        write_tensors(file, tensors, fill)
    return directory


def write_tensors(file: BinaryIO, tensors: dict[str, tuple[int, ...]], fill: Fill) -> None:
    """A safetensors file of 32-bit floats; `fill` makes that many bytes of a tensor."""
    header, end = {}, 0
    for name, shape in tensors.items():
        count = 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": (end, end + count)}
        end += count
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for shape in tensors.values():
        file.write(fill(4 * math.prod(shape)))


class SyntheticTrainer:
    """Rollouts and publications at the pace of the fleet, within the staleness bound."""

    def __init__(self, config: Config, publisher: AdapterPublisher, scratch: Path) -> None:
        self._router = config.trainer.router_url
        self._base = config.group.base_model
        self._publisher = publisher
        self._scratch = scratch
        self._waiting: list[Publication] = []
        self._figures = Figures()

    def train(self, steps: int) -> Iterable[Step]:
        """One figure line a step, when it is done."""
        began = time.monotonic()
        with self._figures.sync():
            self._publish(step=0)
            self._settle(0)
        for step in range(1, steps + 1):
            started = time.monotonic()
            served, failed = asyncio.run(self._rollouts(step))
            rolled = time.monotonic()
            self._figures.logged({WAIT: rolled - started})
            with self._figures.sync():
                publication = self._publish(step=step)
                published = time.monotonic()
                self._settle(self._publisher.max_staleness)
            oldest = min((int(name.rpartition("-v")[2].partition("-")[0]) for name in served), default=publication.seq)
            yield Step(
                step=step,
                seconds=round(published - began, 3),
                version=max(served, key=lambda name: served[name], default=""),
                rollouts=served.total(),
                failed=failed,
                behind=publication.seq - oldest - 1,
                rollout_s=round(rolled - started, 4),
                publish_s=round(published - rolled, 4),
            )
        self._settle(0)

    def _publish(self, *, step: int) -> Publication:
        began = time.monotonic()
        adapter = write_adapter(self._scratch, base=self._base, seed=step)
        timings = self._figures.timings(step) | {"save_s": time.monotonic() - began}
        publication = self._publisher.publish(adapter, step=step, timings=timings)
        self._waiting.append(publication)
        return publication

    def _settle(self, open_at_most: int) -> None:
        while len(self._waiting) > open_at_most:
            publication = self._waiting.pop(0)
            outcome = publication.wait(OUTCOME_S)
            if outcome.state not in ("current", "superseded"):
                raise PublicationFailed(
                    f"{outcome.state}: {outcome.reason}", next_step="see its events", version=publication.adapter_id
                )

    async def _rollouts(self, step: int) -> tuple[Counter[str], int]:
        """How many answers each version gave, and how many requests failed."""
        rng = random.Random(step)  # noqa: S311
        # token ids, a byte each: what the simulator would make of the text, so that the router need not ask anybody
        prompts = [list(PROMPT.format(rng.randint(10, 99), rng.randint(10, 99)).encode()) for _ in range(GROUPS)]
        timeout = aiohttp.ClientTimeout(total=REQUEST_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            calls = [
                self._ask(session, prompt, seed=step * GROUP_SIZE + number)
                for prompt in prompts
                for number in range(GROUP_SIZE)
            ]
            answers = await asyncio.gather(*calls)
        return Counter(version for version in answers if version), sum(not version for version in answers)

    async def _ask(self, session: aiohttp.ClientSession, prompt: list[int], *, seed: int) -> str:
        """The version that answered, "" when none did."""
        body = {"model": self._publisher.run, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "seed": seed}
        try:
            async with session.post(f"{self._router}/v1/completions", json=body) as answer:
                await answer.read()
                return answer.headers.get("x-adaptersync-version", "") if answer.status == 200 else ""
        except (aiohttp.ClientError, TimeoutError):
            return ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m adaptersync_tools.demo.synthetic", description=__doc__)
    parser.add_argument("--run", required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    config = load_config()
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        with (
            AdapterPublisher(config, run=options.run) as publisher,
            (options.out / "steps.jsonl").open("wb", buffering=0) as lines,
        ):
            for step in SyntheticTrainer(config, publisher, options.out / "adapter").train(options.steps):
                lines.write(msgspec.json.encode(step) + b"\n")
    except AdapterSyncError as error:
        print(f"training failed: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
