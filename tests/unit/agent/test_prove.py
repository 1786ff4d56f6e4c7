"""The prover beside a simulated engine: which lie is seen by which leg, and how often an engine is commissioned."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from adaptersync.agent import prove as prove_module
from adaptersync.agent.canary import write_canary
from adaptersync_core.errors import EngineRefused, EngineUnavailable, StagingFailed
from adaptersync_core.proof import Proof
from adaptersync_core.vllm import AUDIT_PARTS, WORKER_EXTENSION, VllmClient
from adaptersync_tools.simulator.adapter_files import BaseModel
from adaptersync_tools.simulator.engine import EngineConfig
from adaptersync_tools.simulator.faults import Faults
from adaptersync_tools.simulator.http import Simulator, SimulatorConfig, serving
from support.prover_bench import ProverBench, with_probe
from support.tiny_model import write_sizes

TOKENS = tuple(range(1, 257))


class Bench(ProverBench):
    """`simulator` is the engine, in this process."""

    simulator: Simulator

    def faults(self, **change: Any) -> None:
        self.simulator.set_faults(change)

    @property
    def loads(self) -> int:
        return self.simulator.calls["/v1/load_lora_adapter"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sizes(tmp_path_factory.mktemp("sizes") / "model")


@asynccontextmanager
async def beside(
    model: Path,
    directory: Path,
    *,
    extension: str = WORKER_EXTENSION,
    door: bool = True,
    port: int = 0,
    ranks: int = 1,
    **engine: Any,
) -> AsyncIterator[Bench]:
    token_file = directory / "token"
    token_file.write_text("token")
    (directory / "staged").mkdir(exist_ok=True)
    config = SimulatorConfig(
        engine=EngineConfig(
            root=str(model), base=BaseModel.from_directory(model), max_loras=2, max_cpu_loras=4, **engine
        ),
        token_file=token_file if door else None,
        worker_extension_cls=extension,
        ranks=ranks,
    )
    simulator = Simulator(config)
    async with serving(simulator, port=port) as address, VllmClient(address.url, token="token") as client:
        bench = Bench(client, directory / "staged")
        bench.simulator = simulator
        await bench.engine.observe(timeout_s=5)
        yield bench


@pytest.fixture
async def bench(model: Path, tmp_path: Path) -> AsyncIterator[Bench]:
    async with beside(model, tmp_path) as bench:
        yield bench


def verdicts(proof: Proof) -> tuple[str, str, str, str]:
    return proof.verdict, proof.commissioned.verdict, proof.content.verdict, proof.behaviour.verdict


async def test_an_honest_engine(bench: Bench) -> None:
    proof = await bench.loaded_and_proved(bench.version())
    assert verdicts(proof) == ("proved", "proved", "proved", "below noise")
    assert await bench.engine.resident() == set(await bench.client.adapters())


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("stale", "worker 0 holds other values in"),
        ("wrong_alpha", "worker 0 holds other values in 4 tensors"),
        ("corrupt_slot", "worker 0 holds other values in 1 tensors: model.layers.0.self_attn.q_proj.lora_A"),
        ("drop_on_load", "worker 0 does not hold it"),
    ],
)
async def test_a_slot_that_lies_is_seen_by_content(bench: Bench, fault: str, said: str) -> None:
    assert (await bench.loaded_and_proved(bench.version(1))).verdict == "proved"
    bench.faults(**{fault: True})
    proof = await bench.loaded_and_proved(bench.version(2))
    assert verdicts(proof)[:3] == ("refuted", "proved", "refuted")
    assert proof.reason.startswith(f"content: {said}")


async def test_answers_that_are_the_bases_are_seen_by_the_canary(bench: Bench) -> None:
    """And the engine has another chance with the next version."""
    bench.faults(serve_base=True)
    proof = await bench.loaded_and_proved(bench.version(1))
    assert verdicts(proof)[:3] == ("refuted", "refuted", "proved")
    assert "canary changed nothing" in proof.reason
    bench.faults(serve_base=False)
    assert (await bench.loaded_and_proved(bench.version(2))).verdict == "proved"


@pytest.mark.parametrize(
    ("dtype", "deltas"), [("float32", ()), ("bfloat16", ()), ("bfloat16", [1e-4] * (len(TOKENS) - 1))]
)
async def test_an_engine_that_stops_applying_adapters_is_seen_without_any_differences(
    model: Path, tmp_path: Path, dtype: str, deltas: Sequence[float]
) -> None:
    """It was commissioned and its slots are right; answers that are the base's have it asked for the canary again.

    Also where the differences are too small to tell anything.
    """
    async with beside(model, tmp_path, dtype=dtype) as bench:
        assert (await bench.loaded_and_proved(bench.version(1))).verdict == "proved"
        bench.faults(serve_base=True)
        proof = await bench.loaded_and_proved(with_probe(bench.version(2), TOKENS, deltas))
        assert verdicts(proof)[:3] == ("refuted", "refuted", "proved")
        assert "canary changed nothing" in proof.reason
        bench.faults(serve_base=False)
        assert (await bench.loaded_and_proved(bench.version(3))).verdict == "proved"


async def test_a_version_too_small_to_show_costs_one_canary(bench: Bench) -> None:
    await bench.loaded_and_proved(bench.version(1))
    before = bench.loads
    proof = await bench.loaded_and_proved(bench.version(2, scale=1e-40))
    assert verdicts(proof) == ("proved", "proved", "proved", "below noise")
    assert "to the last bit" in proof.behaviour.reason
    assert bench.loads == before + 2
    proof = await bench.loaded_and_proved(bench.version(3, scale=0.0))  # and one that says itself that it is none: none
    assert proof.verdict == "proved"
    assert bench.loads == before + 3


async def test_a_canary_is_good_for_a_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    await bench.loaded_and_proved(bench.version(1))
    before = bench.loads
    await bench.loaded_and_proved(bench.version(2))
    assert bench.loads == before + 1
    monkeypatch.setattr(prove_module, "RECHECK_S", 0.0)
    assert (await bench.loaded_and_proved(bench.version(3))).verdict == "proved"
    assert bench.loads == before + 3
    bench.faults(serve_base=True)
    proof = await bench.loaded_and_proved(bench.version(4, scale=0.0))  # whose own answers say nothing
    assert verdicts(proof)[:3] == ("refuted", "refuted", "proved")


async def test_every_rank_is_asked(model: Path, tmp_path: Path) -> None:
    """The second is wrong, and the workers that can be asked what they hold are the first one's."""
    async with beside(model, tmp_path, ranks=2) as bench:
        second = bench.simulator.ranks.engines[1]
        assert verdicts(await bench.loaded_and_proved(bench.version(1)))[:3] == ("proved",) * 3
        second.faults = Faults(stale=True)
        proof = await bench.loaded_and_proved(bench.version(2))
        assert verdicts(proof) == ("refuted", "proved", "proved", "refuted")
        assert "behaviour: rank 1: answers" in proof.reason
        second.faults = Faults(serve_base=True)
        proof = await bench.loaded_and_proved(bench.version(3))
        assert verdicts(proof)[:2] == ("refuted", "refuted")
        assert "commissioned: rank 1: canary changed nothing" in proof.reason
        second.faults = Faults()
        assert (await bench.loaded_and_proved(bench.version(4))).verdict == "proved"


async def test_a_busy_cpu_is_not_asked_for_the_canary_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    await bench.loaded_and_proved(bench.version(1))
    assert bench.engine.facts is not None
    bench.engine.facts = replace(bench.engine.facts, device="cpu")
    monkeypatch.setattr(prove_module, "RECHECK_S", 0.0)

    async def busy(self: VllmClient) -> bool:
        return True

    monkeypatch.setattr(VllmClient, "busy", busy)
    before = bench.loads
    assert (await bench.loaded_and_proved(bench.version(2))).verdict == "proved"
    assert bench.loads == before + 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("fault", "verdict"),
    [("none", "proved"), ("serve_base", "refuted"), ("stale", "refuted"), ("wrong_alpha", "refuted")],
)
async def test_answers_that_lie_later_are_seen_with_the_trainers_differences(
    model: Path, tmp_path: Path, dtype: str, fault: str, verdict: str
) -> None:
    async with beside(model, tmp_path, dtype=dtype) as bench:
        manifest = bench.version(2, scale=0.2)
        assert (await bench.loaded_and_proved(bench.version(1, scale=0.2))).verdict == "proved"
        await bench.load(manifest)
        base = await bench.client.logprobs("base", TOKENS, timeout_s=5)
        version = await bench.client.logprobs(manifest.adapter_id, TOKENS, timeout_s=5)
        await bench.engine.unload(manifest.adapter_id)
        manifest = with_probe(manifest, TOKENS, [a - b for a, b in zip(version, base, strict=True)])
        if fault != "none":
            await bench.loaded_and_proved(bench.version(3, scale=0.2))
            bench.faults(**{fault: True})
        proof = await bench.loaded_and_proved(manifest)
        assert (proof.verdict, proof.behaviour.verdict) == (verdict, verdict), proof
        if fault == "serve_base":  # of the engine, which must not be taken for the version's
            assert verdicts(proof)[1:3] == ("refuted", "proved")


async def test_a_small_adapter_drowns_in_a_coarse_engine_and_is_proved_by_content(model: Path, tmp_path: Path) -> None:
    async with beside(model, tmp_path, dtype="bfloat16") as bench:
        manifest = with_probe(bench.version(scale=0.01), TOKENS, [1e-4] * (len(TOKENS) - 1))
        proof = await bench.loaded_and_proved(manifest)
        assert verdicts(proof) == ("proved", "proved", "proved", "below noise")
        assert "drown" in proof.behaviour.reason


async def test_without_our_extension_nothing_is_probed_and_the_engine_lives(model: Path, tmp_path: Path) -> None:
    for door in (True, False):
        async with beside(model, tmp_path, extension="", door=door) as bench:
            proof = await bench.loaded_and_proved(bench.version(1 + door))
            assert verdicts(proof) == ("not probed",) * 4
            assert "worker extension" in proof.content.reason
            assert not bench.simulator.scheduler.dead.is_set()


async def test_without_our_door_content_is_not_probed(model: Path, tmp_path: Path) -> None:
    async with beside(model, tmp_path, door=False) as bench:
        proof = await bench.loaded_and_proved(bench.version())
        assert verdicts(proof) == ("below noise", "proved", "not probed", "below noise")


async def test_a_head_with_lora_is_not_scored(model: Path, tmp_path: Path) -> None:
    async with beside(model, tmp_path, lora_on_head=True) as bench:
        manifests = [bench.version(seq) for seq in (1, 2)]
        for proof in await asyncio.gather(*(bench.loaded_and_proved(manifest) for manifest in manifests)):
            assert verdicts(proof) == ("below noise", "not probed", "proved", "not probed")
            assert "--lora-target-modules" in proof.reason
        assert not bench.simulator.scheduler.dead.is_set()


async def test_without_the_bases_weights_there_is_no_canary(tmp_path: Path) -> None:
    bare = write_sizes(tmp_path / "model")
    (bare / "model.safetensors").unlink()
    async with beside(bare, tmp_path) as bench:
        proof = await bench.loaded_and_proved(bench.version())
        assert verdicts(proof) == ("below noise", "not probed", "proved", "below noise")
        assert "no canary" in proof.reason


async def test_commissioned_once_in_a_life(model: Path, tmp_path: Path, bench: Bench) -> None:
    """Whatever comes at the same time; and nothing of the canary stays."""
    manifests = [bench.version(seq) for seq in (1, 2, 3)]
    for proof in await asyncio.gather(*(bench.loaded_and_proved(manifest) for manifest in manifests)):
        assert proof.verdict == "proved"
    assert bench.loads == 3 + 1
    names = {manifest.adapter_id for manifest in manifests}
    assert set(await bench.client.adapters()) == names
    (held,) = await bench.client.held()
    assert len(held.registered) == 3
    assert {path.name for path in bench.stage.iterdir()} == names


async def test_commissioned_again_in_another_life(model: Path, tmp_path: Path) -> None:
    async with beside(model, tmp_path) as first:
        assert (await first.loaded_and_proved(first.version(1))).verdict == "proved"
        port = int(first.client.url.rpartition(":")[2])
    async with beside(model, tmp_path, port=port) as second:
        second.faults(serve_base=True)
        before = first.engine.epoch
        async with VllmClient(second.client.url, token="token") as client:
            first.client = first.engine._client = first.prover._client = client
            await first.engine.observe(timeout_s=5)
            assert first.engine.epoch != before
            proof = await first.loaded_and_proved(first.version(2))
        assert verdicts(proof)[:2] == ("refuted", "refuted")


async def test_a_canary_that_an_agent_left_is_used_and_taken_away(bench: Bench) -> None:
    """It died, or its task was cancelled, between loading and unloading."""
    name = f"canary-{bench.engine.epoch}"
    assert write_canary(bench.stage / name, bench.engine.base)
    await bench.client.load(name, str(bench.stage / name), timeout_s=5)
    assert await bench.engine.loaded() == []  # none of ours to the plan
    manifest = bench.version()
    assert (await bench.loaded_and_proved(manifest)).verdict == "proved"
    assert set(await bench.client.adapters()) == await bench.engine.resident() == {manifest.adapter_id}


async def test_a_canary_that_cannot_be_written_is_this_hosts_fault(bench: Bench) -> None:
    manifest = bench.version()
    await bench.load(manifest)
    (bench.stage / f"canary-{bench.engine.epoch}").write_text("in the way")
    with pytest.raises(StagingFailed, match="canary could not be written") as refusal:
        await bench.prove(manifest)
    assert refusal.value.own_fault


async def test_a_canary_that_the_engine_will_not_give_back_is_its_own_fault(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And another version finds it gone."""

    async def refuse(self: VllmClient, name: str) -> None:
        raise EngineRefused("not now", status=500, name=name)

    manifest = bench.version(1)
    with monkeypatch.context() as broken:
        broken.setattr(VllmClient, "unload", refuse)
        proof = await bench.loaded_and_proved(manifest)
    assert verdicts(proof)[:3] == ("refuted", "refuted", "proved")
    assert "canary could not be taken out: not now" in proof.reason
    assert {path.name for path in bench.stage.iterdir()} == {manifest.adapter_id}
    other = bench.version(2)
    assert (await bench.loaded_and_proved(other)).verdict == "proved"
    assert set(await bench.client.adapters()) == {manifest.adapter_id, other.adapter_id}


async def test_a_full_engine_gets_back_what_the_canary_displaced(bench: Bench) -> None:
    manifests = [bench.version(seq) for seq in range(1, 5)]
    for manifest in manifests:
        await bench.load(manifest)
    for manifest in manifests:
        assert (await bench.prove(manifest)).verdict == "proved"


async def test_an_engine_that_does_not_answer_has_no_verdict(model: Path, tmp_path: Path) -> None:
    async with beside(model, tmp_path) as bench:
        manifest = bench.version()
        await bench.load(manifest)
    async with VllmClient(bench.client.url, token="token") as client:
        bench.engine._client = bench.prover._client = client
        with pytest.raises(EngineUnavailable):
            await bench.prove(manifest)


async def test_a_busy_cpu_is_not_asked_for_the_base(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = bench.version()
    await bench.load(manifest)

    async def busy(self: VllmClient) -> bool:
        return True

    monkeypatch.setattr(VllmClient, "busy", busy)
    assert (await bench.prove(manifest)).behaviour.verdict == "below noise"
    assert bench.engine.facts is not None
    bench.engine.facts = replace(bench.engine.facts, device="cpu")
    proof = await bench.prove(manifest)
    assert verdicts(proof) == ("proved", "proved", "proved", "not probed")
    assert "busy" in proof.behaviour.reason


async def test_a_proof_stops_the_engine_for_what_it_must_see_only(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call into the workers is answered between two steps: nothing is generated meanwhile."""
    await bench.loaded_and_proved(bench.version(1))
    before = bench.simulator.calls["/collective_rpc"]
    assert (await bench.loaded_and_proved(bench.version(2))).content.verdict == "proved"
    assert bench.simulator.calls["/collective_rpc"] == before + 1
    monkeypatch.setattr("adaptersync_core.vllm.AUDITED_AT_ONCE", 1024)
    manifest = bench.version(3)
    parts = -(-manifest.size // 1024)
    assert (await bench.loaded_and_proved(manifest)).content.verdict == "proved"
    assert bench.simulator.calls["/collective_rpc"] == before + 1 + min(parts, AUDIT_PARTS)
    assert parts > 2


async def test_an_engine_of_little_context_is_proved_with_fewer_tokens(model: Path, tmp_path: Path) -> None:
    async with beside(model, tmp_path, max_model_len=24) as bench:
        manifest = bench.version(1)
        proof = await bench.loaded_and_proved(manifest)
        assert verdicts(proof) == ("proved", "proved", "proved", "below noise")
        assert proof.behaviour.figures["tokens"] == 22  # one is answered, and the first is not scored
        proof = await bench.prove(with_probe(manifest, TOKENS[:23]))
        assert proof.behaviour.figures["tokens"] == 22
        proof = await bench.prove(with_probe(manifest, TOKENS[:24]))
        assert verdicts(proof) == ("proved", "proved", "proved", "not probed")
        assert proof.behaviour.reason == "probe has 24 tokens, and the engine's context takes 23"
