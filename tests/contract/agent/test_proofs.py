"""What an agent makes of a proof: the word it gives on a version, and what it leaves alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from adaptersync.agent import app
from adaptersync_core.config import ProofSection
from support.agent_bench import Bench, bench_on
from support.engines import Engine, simulator
from support.wait import wait_until


def faults(engine: Engine, **change: Any) -> None:
    assert engine.post("/simulator/faults", change).status == 200


def calls(engine: Engine, path: str) -> int:
    return int(engine.get("/simulator/calls").json["calls"][path])


async def told(bench: Bench, name: str) -> list[dict[str, str]]:
    """The events of a version's acks."""
    entries = await bench.registry.client.read_stream(bench.registry.keys.events, "0")
    return [fields for _, fields in entries if fields["type"] == "replica.acked" and fields["version"] == name]


async def heartbeats(bench: Bench, count: int) -> None:
    for _ in range(count):
        last = await heartbeat(bench)
        await wait_until(lambda last=last: later(bench, last))  # type: ignore[misc]


async def heartbeat(bench: Bench) -> str:
    return str(await bench.registry.client.command("HGET", bench.registry.keys.replica("r1"), "heartbeat_ms"))


async def later(bench: Bench, last: str) -> bool:
    return await heartbeat(bench) != last


async def test_a_proved_version_is_accepted_with_its_proof(bench: Bench) -> None:
    name = await bench.publish()
    await bench.want(name)
    ack = await bench.ack(name)
    assert (ack.accepted, ack.proof.verdict, ack.reason) == (True, "proved", "")
    assert ack.proof.commissioned.figures["effect"] > 0.3
    assert ack.proof.content.figures == {"workers": 1, "tensors": 14}
    (event,) = await told(bench, name)
    assert (event["accepted"], event["proof"]) == ("true", "proved")


LIES = {
    "stale": "holds other values",
    "wrong_alpha": "holds other values in 1 tensors: model.layers.0.self_attn.q_proj.lora_B",
    "corrupt_slot": "holds other values in 1 tensors: model.layers.0.self_attn.q_proj.lora_A",
    "drop_on_load": "does not hold it",
}


@pytest.mark.parametrize("fault", LIES)
async def test_a_refuted_version_is_refused_given_up_and_left_alone(
    bench: Bench, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then, when it has rested, it is loaded anew: what was wrong may have passed."""
    good = await bench.publish()
    await bench.want(good)
    await bench.ack(good, accepted=True)
    monkeypatch.setattr(app, "REST_S", 3600.0)
    faults(bench.engine, **{fault: True})
    bad = await bench.publish()
    await bench.want(good, bad)
    ack = await bench.ack(bad)
    assert (ack.accepted, ack.proof.verdict) == (False, "refuted")
    assert ack.reason.startswith("refuted: content: worker 0 ")
    assert LIES[fault] in ack.reason
    (event,) = await told(bench, bad)
    assert (event["accepted"], event["proof"], event["reason"]) == ("false", "refuted", ack.reason)
    await wait_until(lambda: bench.listed() == {good})
    before = calls(bench.engine, "/v1/load_lora_adapter"), calls(bench.engine, "/v1/completions")
    await heartbeats(bench, 5)
    assert before == (calls(bench.engine, "/v1/load_lora_adapter"), calls(bench.engine, "/v1/completions"))
    assert len(await told(bench, bad)) == 1
    assert (await bench.registry.acks("r1"))[good].accepted


async def test_a_refuted_version_is_tried_again_after_its_rest(bench: Bench) -> None:
    faults(bench.engine, corrupt_slot=True)
    name = await bench.publish()
    await bench.want(name)
    assert (await bench.ack(name)).proof.verdict == "refuted"
    faults(bench.engine, corrupt_slot=False)
    assert (await bench.ack(name, accepted=True)).proof.verdict == "proved"


async def test_an_engine_that_does_not_apply_lora_accepts_nothing(bench: Bench) -> None:
    faults(bench.engine, serve_base=True)
    name = await bench.publish()
    await bench.want(name)
    ack = await bench.ack(name)
    assert not ack.accepted
    assert "commissioned: canary changed nothing" in ack.reason
    faults(bench.engine, serve_base=False)
    assert (await bench.ack(name, accepted=True)).proof.commissioned.verdict == "proved"


async def test_an_agent_that_was_replaced_falls_silent_and_refuses_nothing(bench: Bench) -> None:
    """Its token is old. Were it to say that the engine refuses it, the version would be given up."""
    assert bench.engine.token_file is not None
    first, second = await bench.publish(), await bench.publish()
    await bench.want(first)
    await bench.ack(first, accepted=True)
    bench.engine.token_file.write_text("the token of a newer agent")
    last = await heartbeat(bench)
    await bench.want(first, second)
    await asyncio.sleep(0.5)  # nothing is to happen, so there is nothing to wait for
    assert set(await bench.registry.acks("r1")) == {first}
    assert float(await heartbeat(bench)) - float(last) < 300
    assert bench.listed() == {first}


@pytest.fixture
async def plain(redis_url: str, model_directory: Path, tmp_path: Path) -> AsyncIterator[tuple[Engine, Path, str]]:
    """An engine without our door and extension, and what a bench on it needs."""
    with simulator(tmp_path, model_directory) as engine:
        yield engine, tmp_path, redis_url


@pytest.mark.parametrize("promote_on", [("proved",), ("proved", "below noise"), ("not probed",)])
async def test_what_is_enough_is_a_setting(plain: tuple[Engine, Path, str], promote_on: tuple[Any, ...]) -> None:
    engine, directory, redis_url = plain
    async with bench_on(redis_url, engine, directory, proof=ProofSection(promote_on=promote_on)) as bench:
        name = await bench.publish()
        await bench.want(name)
        ack = await bench.ack(name)
        assert (ack.accepted, ack.proof.verdict) == ("not probed" in promote_on, "not probed")
        assert ack.accepted or "worker extension" in ack.reason


async def test_a_refuted_version_is_never_enough(bench: Bench, redis_url: str, tmp_path: Path) -> None:
    bench.agent.cancel()
    await asyncio.gather(bench.agent, return_exceptions=True)
    faults(bench.engine, corrupt_slot=True)
    everything = ProofSection(promote_on=("proved", "refuted", "below noise", "not probed"))
    (tmp_path / "again").mkdir()
    async with bench_on(redis_url, bench.engine, tmp_path / "again", proof=everything) as lax:
        name = await lax.publish()
        await lax.want(name)
        assert not (await lax.ack(name)).accepted
