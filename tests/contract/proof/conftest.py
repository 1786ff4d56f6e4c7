"""Real vLLM servers behind our door: a Qwen2 in float32, a Llama in bfloat16.

Their models are tiny and random.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from adaptersync_core.vllm import VllmClient
from support import engines
from support.adapters import ALL_TARGETS
from support.prover_bench import ProverBench
from support.tiny_model import build_tiny_model

START_TIMEOUT_S = 300
Deltas = Callable[[Path, tuple[int, ...]], tuple[float, ...]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(START_TIMEOUT_S))


@pytest.fixture(scope="session", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    """Of the server; a session fixture with parameters, so that all tests of the one come before those of the other."""
    return str(request.param)


@pytest.fixture(scope="session")
def served(
    request: pytest.FixtureRequest, dtype: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[engines.Engine]:
    if dtype == "float32":
        yield request.getfixturevalue("real_engine")
        return
    model = build_tiny_model(tmp_path_factory.mktemp("proof") / "model", architecture="llama")
    with (
        TemporaryDirectory(prefix="engine-") as directory,
        engines.vllm_cpu(
            Path(directory), model, "--lora-target-modules", *ALL_TARGETS, guarded=True, dtype=dtype
        ) as engine,
    ):
        yield engine


@pytest.fixture(scope="session")
def model(served: engines.Engine) -> Path:
    return served.model_directory


@pytest.fixture(scope="session")
def trainer(model: Path) -> Deltas:
    """What a trainer in float32 sees of an adapter: differences of the log-probabilities of tokens[1:]."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

    def scores(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1].double()
        return logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]

    def deltas(adapter: Path, tokens: tuple[int, ...]) -> tuple[float, ...]:
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        adapted = PeftModel.from_pretrained(base, str(adapter)).eval()
        given = torch.tensor(tokens)
        version = scores(adapted, given)
        with adapted.disable_adapter():
            return tuple((version - scores(adapted, given)).tolist())

    return deltas


class Bench(ProverBench):
    """`served` is the engine, a process."""

    served: engines.Engine

    def empty(self) -> None:
        for name in self.served.listed():
            self.served.unload(name)
        for number in self.served.resident():
            self.served.post("/collective_rpc", {"method": "remove_lora", "args": [number]})


@pytest.fixture
async def bench(served: engines.Engine, tmp_path: Path) -> AsyncIterator[Bench]:
    stage = tmp_path / "staged"
    stage.mkdir()
    async with VllmClient(served.url, timeout_s=30, token=served.token) as client:
        bench = Bench(client, stage)
        bench.served = served
        await bench.engine.observe(timeout_s=30)
        yield bench
        bench.empty()


@pytest.fixture
def tokens() -> tuple[int, ...]:
    source = random.Random(1)
    return tuple(source.randrange(256) for _ in range(256))
