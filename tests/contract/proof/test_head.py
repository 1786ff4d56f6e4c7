"""A server started as vLLM has it by default for a Llama: with LoRA on the model's head."""

from __future__ import annotations

import asyncio
from pathlib import Path

from adaptersync_core.vllm import VllmClient
from support import engines
from support.prover_bench import ProverBench
from support.tiny_model import build_tiny_model


async def test_a_head_with_lora_is_not_scored(tmp_path: Path) -> None:
    """Scored in one batch with another request, it would end the server."""
    model = build_tiny_model(tmp_path / "model", architecture="llama")
    with engines.vllm_cpu(tmp_path, model, guarded=True) as served:
        async with VllmClient(served.url, timeout_s=30, token=served.token) as client:
            bench = ProverBench(client, tmp_path / "staged")
            await bench.engine.observe(timeout_s=30)
            manifests = [bench.version(seq) for seq in (1, 2)]
            proofs = await asyncio.gather(*(bench.loaded_and_proved(manifest) for manifest in manifests))
            for proof in proofs:
                assert (proof.verdict, proof.content.verdict) == ("below noise", "proved")
                assert "--lora-target-modules" in proof.reason
            assert served.get("/health").status == 200
