"""What is proved of a real engine, and what is refuted."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from adaptersync_core.errors import EngineRefused
from adaptersync_core.manifest import CONFIG_FILE, WEIGHTS_FILE
from contract.proof.conftest import Bench, Deltas
from support.adapters import ALL_TARGETS
from support.engines import MAX_CPU_LORAS, MODEL
from support.prover_bench import with_probe
from support.wait import wait_until

VISIBLE: dict[str, Any] = {
    "scale": 0.12,
    "targets": ALL_TARGETS,
}  # what a bfloat16 engine shows of it stands out of its noise


def _reworded(source: Path, target: Path, words: Callable[[bytes], bytes]) -> Path:
    """A copy of an adapter with another weights file; words of equal length keep the safetensors header valid."""
    shutil.copytree(source, target)
    weights = target / WEIGHTS_FILE
    weights.write_bytes(words(weights.read_bytes()))
    return target


@pytest.mark.parametrize(
    "how",
    [
        {},
        VISIBLE,
        {"targets": ("gate_proj",)},
        {"rank": 32, "config": {"lora_alpha": 1}},
        {"rank": 5, "config": {"use_rslora": True}},
        {"config": {"rank_pattern": {"v_proj": 8}, "alpha_pattern": {"v_proj": 3}}},
    ],
    ids=["plain", "all", "half of a packed one", "alpha", "rslora", "patterns"],
)
async def test_the_right_adapter_is_proved(bench: Bench, how: dict[str, Any]) -> None:
    """In both device slots, one after the other."""
    for seq in (1, 2):
        manifest = bench.version(seq, **how)
        await bench.load(manifest)
        proof = await bench.prove(manifest)
        assert proof.verdict == "proved", proof
        assert (proof.commissioned.verdict, proof.content.verdict) == ("proved", "proved")
        assert proof.commissioned.figures["effect"] > 1
        assert proof.content.figures["workers"] == 1
        assert proof.content.figures["tensors"] >= 28
        assert "to compare them with" in proof.behaviour.reason


async def test_a_tiny_adapter_is_proved_by_content(bench: Bench, dtype: str, tokens: tuple[int, ...]) -> None:
    manifest = bench.version(scale=1e-5)
    manifest = with_probe(manifest, tokens, (1e-10,) * (len(tokens) - 1))
    await bench.load(manifest)
    proof = await bench.prove(manifest)
    assert (proof.verdict, proof.content.verdict, proof.behaviour.verdict) == ("proved", "proved", "below noise")


async def test_an_adapter_that_changes_nothing_is_proved_by_content(bench: Bench) -> None:
    manifest = bench.version(scale=0.0)
    await bench.load(manifest)
    proof = await bench.prove(manifest)
    assert (proof.verdict, proof.behaviour.figures["effect"]) == ("proved", 0)
    assert "own manifest" in proof.behaviour.reason


async def test_the_previous_version_is_refuted(bench: Bench) -> None:
    before, manifest = bench.version(1), bench.version(2)
    await bench.load_instead(manifest, bench.path(before))
    proof = await bench.prove(manifest)
    assert proof.verdict == "refuted"
    assert "holds other values in 8 tensors: model.layers.0.self_attn.q_proj.lora_A" in proof.reason


async def test_one_bit_of_one_tensor_is_refuted(bench: Bench, tmp_path: Path) -> None:
    manifest = bench.version()
    path = bench.path(manifest)
    # the highest bits of the last float32: a change that bfloat16 keeps
    bad = _reworded(path, tmp_path / "bad", lambda raw: raw[:-1] + bytes([raw[-1] ^ 0x80]))
    await bench.load_instead(manifest, bad)
    proof = await bench.prove(manifest)
    assert proof.verdict == "refuted"
    assert "holds other values in 1 tensors: model.layers.1.self_attn.v_proj.lora_B" in proof.reason


async def test_a_wrong_alpha_is_refuted(bench: Bench, tmp_path: Path) -> None:
    manifest = bench.version(config={"lora_alpha": 16})
    bad = shutil.copytree(bench.path(manifest), tmp_path / "bad")
    config = json.loads((bad / CONFIG_FILE).read_text())
    (bad / CONFIG_FILE).write_text(json.dumps(config | {"lora_alpha": 17}))
    await bench.load_instead(manifest, bad)
    proof = await bench.prove(manifest)
    assert proof.verdict == "refuted"
    assert "holds other values in 4 tensors" in proof.reason


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (b"base_model.model.model.layers.", b"base_model.model.moden.layers."),
        (b"base_model.model.model.layers.", b"base_model.model.modellayers.."),
        (b".self_attn.", b".self-attn."),
    ],
)
async def test_the_base_under_its_name_is_refuted(bench: Bench, right: bytes, wrong: bytes) -> None:
    """Keys with a wrong prefix: vLLM loads them without a word. That the files themselves are so is no excuse."""
    manifest = bench.version()
    path = bench.path(manifest)
    (path / WEIGHTS_FILE).write_bytes((path / WEIGHTS_FILE).read_bytes().replace(right, wrong))
    await bench.load_instead(manifest, path)
    name = manifest.adapter_id
    said = [bench.served.complete(model, "the same", max_tokens=8, logprobs=0)["choices"][0] for model in (name, MODEL)]
    assert said[0] == said[1]
    proof = await bench.prove(manifest)
    assert proof.verdict == "refuted"
    assert "engine has no module for 4 of the adapter's" in proof.reason


async def test_what_was_evicted_is_refuted(bench: Bench) -> None:
    manifest = bench.version(1)
    await bench.load(manifest)
    assert (await bench.prove(manifest)).verdict == "proved"
    for seq in range(2, 2 + MAX_CPU_LORAS):
        await bench.load(bench.version(seq))
    proof = await bench.prove(manifest)
    assert (proof.verdict, proof.content.reason) == ("refuted", "worker 0 does not hold it")


async def test_a_name_that_is_not_served_is_refuted(bench: Bench) -> None:
    manifest = bench.version()
    proof = await bench.prove(manifest)
    assert (proof.verdict, proof.content.verdict) == ("refuted", "not probed")
    assert "does not answer under its name" in proof.reason


@pytest.mark.parametrize("scale", [0.01, 0.12])
async def test_the_trainers_differences_prove_it(
    bench: Bench, dtype: str, trainer: Deltas, tokens: tuple[int, ...], scale: float
) -> None:
    """At any size in float32; in bfloat16 where they stand out of its noise, and else they say so."""
    manifest = bench.version(scale=scale, targets=ALL_TARGETS)
    manifest = with_probe(manifest, tokens, trainer(bench.path(manifest), tokens))
    await bench.load(manifest)
    proof = await bench.prove(manifest)
    print(dtype, scale, proof.behaviour)
    assert proof.verdict == "proved"
    drowned = dtype == "bfloat16" and scale < 0.1
    assert proof.behaviour.verdict == ("below noise" if drowned else "proved")
    if dtype == "float32":
        assert proof.behaviour.figures["slope"] == pytest.approx(1, abs=0.01)
    elif not drowned:
        assert proof.behaviour.figures["slope"] == pytest.approx(1, abs=0.2)


async def test_another_adapters_differences_refute_it(bench: Bench, trainer: Deltas, tokens: tuple[int, ...]) -> None:
    """Though every tensor is that of the files: then files and trainer do not belong together."""
    other, manifest = bench.version(1, **VISIBLE), bench.version(2, **VISIBLE)
    manifest = with_probe(manifest, tokens, trainer(bench.path(other), tokens))
    await bench.load(manifest)
    proof = await bench.prove(manifest)
    print(proof.behaviour)
    assert (proof.verdict, proof.content.verdict, proof.behaviour.verdict) == ("refuted", "proved", "refuted")


@pytest.mark.parametrize("alpha", [0, 32])
async def test_the_trainers_differences_refute_base_and_wrong_alpha(
    bench: Bench, trainer: Deltas, tokens: tuple[int, ...], tmp_path: Path, alpha: int
) -> None:
    """Without a look into the workers: behaviour alone."""
    manifest = bench.version(**VISIBLE, config={"lora_alpha": 16})
    manifest = with_probe(manifest, tokens, trainer(bench.path(manifest), tokens))
    bad = shutil.copytree(bench.path(manifest), tmp_path / "bad")
    config = json.loads((bad / CONFIG_FILE).read_text())
    (bad / CONFIG_FILE).write_text(json.dumps(config | {"lora_alpha": alpha}))
    await bench.load_instead(manifest, bad)
    proof = await bench.prove(manifest)
    print(proof.behaviour)
    assert proof.behaviour.verdict == "refuted"


async def test_an_engine_is_commissioned_once(bench: Bench) -> None:
    """By versions that come at the same time, too; and nothing of the canary stays."""
    manifests = [bench.version(seq) for seq in (1, 2, 3)]
    for manifest in manifests:
        await bench.load(manifest)
    proofs = await asyncio.gather(*(bench.prove(manifest) for manifest in manifests))
    assert [proof.verdict for proof in proofs] == ["proved"] * 3
    names = {manifest.adapter_id for manifest in manifests}
    assert set(bench.served.listed()) == await bench.engine.resident() == names
    assert len(bench.served.resident()) == 3
    assert {path.name for path in bench.stage.iterdir()} == names


async def test_another_agent_beside_a_full_engine_proves_all_it_holds(bench: Bench) -> None:
    """Its canary takes the place of a version; that is given back."""
    manifests = [bench.version(seq) for seq in range(1, 1 + MAX_CPU_LORAS)]
    for manifest in manifests:
        await bench.load(manifest)
    bench.prover = bench.new_prover()
    for manifest in manifests:
        proof = await bench.prove(manifest)
        assert proof.verdict == "proved", proof


async def test_a_probe_longer_than_the_model_takes_is_no_refutation(bench: Bench) -> None:
    manifest = with_probe(bench.version(), tuple(range(1, 250)) * 3, ())
    await bench.load(manifest)
    proof = await bench.prove(manifest)
    assert (proof.verdict, proof.behaviour.verdict) == ("proved", "not probed")
    with pytest.raises(EngineRefused):
        await bench.client.logprobs(MODEL, [1] * 750, timeout_s=30)


async def test_a_busy_cpu_is_not_asked_for_the_base(bench: Bench) -> None:
    """In one batch with an adapter's request, vLLM on a CPU answers for the base with an adapter's values."""
    served, manifest = bench.served, bench.version()
    await bench.load(manifest)
    assert (await bench.prove(manifest)).verdict == "proved"
    body = {"model": manifest.adapter_id, "prompt": "hello", "max_tokens": 480, "ignore_eos": True, "stream": True}
    enough = threading.Event()

    def keep_busy() -> None:
        while not enough.is_set():
            assert served.post("/v1/completions", body).status == 200

    with ThreadPoolExecutor(2) as pool:
        requests = [pool.submit(keep_busy) for _ in range(2)]  # two, since each leaves a gap between its answers
        try:
            await wait_until(bench.client.busy, timeout_s=30)
            proof = await bench.prove(manifest)
        finally:
            enough.set()
        for request in requests:
            request.result(60)
    assert (proof.verdict, proof.content.verdict, proof.behaviour.verdict) == ("proved", "proved", "not probed")
    assert "engine is busy" in proof.behaviour.reason
    await wait_until(lambda: _idle(bench), timeout_s=30)
    assert (await bench.prove(manifest)).behaviour.verdict != "not probed"


async def _idle(bench: Bench) -> bool:
    return not await bench.client.busy()
