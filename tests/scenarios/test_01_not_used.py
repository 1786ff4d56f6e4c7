"""Rows 1 to 6: the adapter is not the one that is used."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from adaptersync_core.config import Config
from adaptersync_core.errors import AdapterInvalid
from adaptersync_core.events import AdapterPublished, ReplicaAcked
from adaptersync_core.manifest import WEIGHTS_FILE
from adaptersync_core.records import ReplicaReport
from adaptersync_core.registry import Registry
from adaptersync_core.tensors import read_header
from support.adapters import make_adapter, write_safetensors
from support.wait import wait_until
from support.whole_fleet import PROMPT, Replica, WholeFleet, whole_fleet

# 1: the load is answered 200, and the engine serves something else

LIES = {
    "base": ({"serve_base": True}, True, "canary changed nothing"),
    "the version before": ({"stale": True}, False, "holds other values"),
    "another scale": ({"wrong_alpha": True}, False, "holds other values"),
    "one tensor wrong": ({"corrupt_slot": True}, False, "holds other values"),
    "nothing": ({"drop_on_load": True}, False, "does not hold it"),
}


@pytest.mark.parametrize("liars", [1, 2])
async def test_s01_an_engine_that_stops_applying_adapters_is_found_out_with_the_next_version(
    config: Config, tmp_path: Path, liars: int
) -> None:
    """It was commissioned and its slots are right; that it answers as the base is its own fault, not the version's."""
    async with whole_fleet(config, tmp_path, replicas=2) as fleet:
        trainer = await fleet.trainer()
        old = await fleet.promoted(trainer)
        for number in range(liars):
            fleet[number].faults(serve_base=True)
        publication = await fleet.publish(trainer)
        outcome = await fleet.outcome(publication)
        if liars == 1:
            assert outcome.state == "current"
            assert "canary changed nothing" in (await fleet.table()).members["replica-0"].reason
            assert (await fleet.table()).ready() == ["replica-1"]
        else:
            assert outcome.state == "rolled_back"
            assert outcome.reason.count("canary changed nothing") == 2
            assert await fleet.current() == old


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("liars", [1, 3])
async def test_s01_an_engine_that_serves_something_else_is_found_out_before_the_promotion(
    config: Config, tmp_path: Path, lie: str, liars: int
) -> None:
    faults, anew, said = LIES[lie]
    async with whole_fleet(config, tmp_path, replicas=3) as fleet:
        trainer = await fleet.trainer()
        old = await fleet.promoted(trainer)
        fleet.on_engine.append(lambda replica: replica.faults(**faults))
        for number in range(liars):
            if anew:  # seen when an engine is commissioned, once in each life
                await fleet[number].restart_engine()
            else:
                fleet[number].faults(**faults)
        if anew and liars == 1:
            await fleet.state("replica-0", "joining", said)
        publication = await fleet.publish(trainer)
        if anew and liars == 3:  # nobody is left who could be believed
            await wait_until(lambda: _ready_count(fleet, 0), timeout_s=20)
            await asyncio.sleep(1.0)
            assert publication.outcome is None
        elif liars == 3:
            outcome = await fleet.outcome(publication)
            assert outcome.state == "rolled_back"
            assert said in outcome.reason
            assert len(re.findall(r"replica-\d: refuted", outcome.reason)) >= 2
            assert await fleet.current() == old
        else:
            assert (await fleet.outcome(publication)).state == "current"
            assert "replica-0" not in (await fleet.table()).ready()
            answer = await fleet.complete("run")
            assert answer.headers["x-adaptersync-replica"] != "replica-0"
        promoted = [event.replicas for event in await fleet.events("version.promoted", publication.adapter_id)]
        assert not any("replica-0" in replicas for replicas in promoted)


async def _ready_count(fleet: WholeFleet, count: int) -> bool:
    return len((await fleet.table()).ready()) == count


# 2: the path that rollouts take ignores the adapter while another has it


async def test_s02_the_probe_asks_as_a_rollout_does(config: Config, tmp_path: Path) -> None:
    """Under the version's name, for a completion, past the prefix cache: before the word that it is held."""
    asked: list[tuple[str, Any]] = []

    def watch(replica: Replica) -> None:
        run = replica.sim.scheduler.run

        def running(job: Any, **how: Any) -> Any:
            asked.append((job.request.lora.name if job.request.lora else "base", job.request.salt))
            return run(job, **how)

        replica.sim.scheduler.run = running  # type: ignore[method-assign]

    async with whole_fleet(config, tmp_path, start=False) as fleet:
        fleet.on_engine.append(watch)
        await fleet.start()
        trainer = await fleet.trainer()
        name = await fleet.promoted(trainer)
        mine = [salt for version, salt in asked if version == name]
        assert len(mine) >= len(fleet.replicas)
        assert None not in mine
        assert len(set(mine)) == len(mine)


# 3: the engine has it, its API layer does not list it


def _unlisted(replica: Replica, path: Path) -> None:
    registry = replica.sim.engine.registry
    registry.listed = lambda: []  # type: ignore[method-assign]


def _elsewhere(replica: Replica, path: Path) -> None:
    registry = replica.sim.engine.registry
    listed = registry.listed
    registry.listed = lambda: [replace(lora, path=str(path)) for lora in listed()]  # type: ignore[method-assign]


def _renamed(replica: Replica, path: Path) -> None:
    registry = replica.sim.engine.registry
    listed = registry.listed
    registry.listed = lambda: [replace(lora, name=f"{lora.name}-x") for lora in listed()]  # type: ignore[method-assign]


@pytest.mark.parametrize("lie", [_unlisted, _elsewhere, _renamed])
@pytest.mark.parametrize("liars", [1, 3])
async def test_s03_nothing_is_acknowledged_that_the_server_does_not_list(
    config: Config, tmp_path: Path, lie: Callable[[Replica, Path], None], liars: int
) -> None:
    async with whole_fleet(config, tmp_path, replicas=3) as fleet:
        trainer = await fleet.trainer()
        old = await fleet.promoted(trainer)
        for number in range(liars):
            lie(fleet[number], tmp_path)
        publication = await fleet.publish(trainer)
        outcome = await fleet.outcome(publication)
        if liars == 1:  # what the others proved is not the version's fault
            assert outcome.state == "current"
            assert "replica-0" not in (await fleet.table()).ready()
        else:
            assert outcome.state == "rolled_back"
            assert len(re.findall(r"replica-\d: ", outcome.reason)) >= 2  # most; nobody waits for the last one
            assert "list" in outcome.reason or "another directory" in outcome.reason
            assert await fleet.current() == old
        said = await fleet.events("replica.acked", publication.adapter_id)
        accepted = {event.replica for event in said if isinstance(event, ReplicaAcked) and event.accepted}
        assert accepted == {f"replica-{number}" for number in range(liars, 3)}


# 4: a request without a version falls back to the base, silently


@pytest.mark.parametrize("model", [None, "", "no-such-run", "run@v9", "run-v9-0123456789ab", "Base", "BASE", "/base"])
async def test_s04_the_base_answers_only_when_it_is_named(fleet: WholeFleet, model: str | None) -> None:
    trainer = await fleet.trainer()
    name = await fleet.promoted(trainer)
    generated = [replica.sim.calls["/v1/completions"] for replica in fleet.replicas.values()]
    answer = await fleet.complete(model)
    assert answer.status in (400, 404)
    assert answer.message
    assert [replica.sim.calls["/v1/completions"] for replica in fleet.replicas.values()] == generated
    for pointer in ("run", "run@current"):
        assert (await fleet.complete(pointer)).json["model"] == name
    assert (await fleet.complete("base")).json["model"] == "base"


async def test_s04_a_run_without_a_version_is_held_and_never_the_base(config: Config, tmp_path: Path) -> None:
    async with whole_fleet(config, tmp_path) as fleet:
        trainer = await fleet.trainer()
        held = asyncio.create_task(fleet.complete("run"))
        await wait_until(lambda: _held(fleet))
        name = await fleet.promoted(trainer)
        answer = await held
        assert (answer.status, answer.json["model"]) == (200, name)


async def _held(fleet: WholeFleet) -> bool:
    return bool((await fleet.get("/health")).json["held"])


# 5: the trainer sends the same weights again, or weights that change nothing


@pytest.mark.parametrize("what", ["again", "zero"])
async def test_s05_what_changes_nothing_is_said_and_stops_nobody(
    fleet: WholeFleet, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    trainer = await fleet.trainer()
    source = fleet.adapter()
    first = await fleet.promoted(trainer, source)
    with caplog.at_level(logging.WARNING):
        publication = await fleet.publish(trainer, source if what == "again" else fleet.adapter(scale=0.0))
    assert (await fleet.outcome(publication)).state == "current"
    assert publication.adapter_id != first
    (event,) = await fleet.events("adapter.published", publication.adapter_id)
    assert isinstance(event, AdapterPublished)
    warned = [record.message for record in caplog.records if publication.adapter_id in record.message]
    assert event.noop
    if what == "zero":
        assert publication.manifest.shape.noop
    else:
        assert publication.manifest.repeats == first
    assert [line for line in warned if "changes nothing" in line]
    assert await fleet.promoted(trainer)  # training goes on


# 6: an adapter that does not fit the base loads with 200

MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "hidden size": ({"hidden": 4}, "fit"),
    "wider": ({"hidden": 16}, "fit"),
    "layers the base lacks": ({"layers": 2}, "layers.1"),
    "modules the base lacks": ({"targets": ("q_proj", "k_proj")}, "k_proj"),
    "only modules it lacks": ({"targets": ("v_proj",)}, "v_proj"),
    "rank above the engine's": ({"rank": 32}, "rank 32"),
}


@pytest.mark.parametrize("misfit", MISFITS)
async def test_s06_what_does_not_fit_the_base_is_refused_before_the_engine_sees_it(
    fleet: WholeFleet, misfit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, said = MISFITS[misfit]
    trainer = await fleet.trainer()
    old = await fleet.promoted(trainer)
    monkeypatch.setattr(Registry, "ready", _nobody)  # a trainer that could not ask them before it published
    loads = [replica.sim.calls["/v1/load_lora_adapter"] for replica in fleet.replicas.values()]
    fitting: dict[str, Any] = {"rank": 2, "hidden": 8, "intermediate": 16, "layers": 1, "targets": ("q_proj",)}
    source = make_adapter(fleet.directory / "misfit", **(fitting | shape))
    publication = await fleet.publish(trainer, source)
    outcome = await fleet.outcome(publication)
    assert outcome.state == "rolled_back"
    assert said in outcome.reason
    assert any(f"{replica}: " in outcome.reason for replica in fleet.replicas)
    assert [replica.sim.calls["/v1/load_lora_adapter"] for replica in fleet.replicas.values()] == loads
    assert (await fleet.complete("run", PROMPT)).json["model"] == old


async def _nobody(_: Registry) -> dict[str, ReplicaReport]:
    return {}


async def test_s06_a_rank_the_fleet_would_refuse_is_not_announced(fleet: WholeFleet) -> None:
    trainer = await fleet.trainer()
    old = await fleet.promoted(trainer)
    source = make_adapter(fleet.directory / "misfit", rank=32, hidden=8, layers=1, targets=("q_proj",))
    with pytest.raises(AdapterInvalid, match="rank 32 is above the limit of 2 of 2 replicas, 16"):
        await fleet.publish(trainer, source)
    assert [event.version for event in await fleet.events("adapter.published")] == [old]


async def test_s06_names_without_pefts_prefix_are_served_as_prime_rl_writes_them(fleet: WholeFleet) -> None:
    trainer = await fleet.trainer()
    source = fleet.adapter()
    path = source / WEIGHTS_FILE
    with path.open("rb") as file:
        specs, start = read_header(file, size=path.stat().st_size, name=path.name)
        raw = path.read_bytes()[start:]
    tensors = {
        name.removeprefix("base_model.model."): (spec.shape, raw[slice(*spec.data_offsets)])
        for name, spec in specs.items()
    }
    assert not tensors.keys() & specs.keys()
    write_safetensors(path, tensors)
    name = await fleet.promoted(trainer, source)  # proved by every replica
    assert (await fleet.complete(name, PROMPT)).json["model"] == name


@pytest.mark.parametrize(
    "odd",
    [{"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"bias": "all"}, {"peft_type": "IA3"}],
    ids=["dora", "modules_to_save", "bias", "ia3"],
)
async def test_s06_what_vllm_cannot_serve_is_refused_at_the_trainer(fleet: WholeFleet, odd: dict[str, Any]) -> None:
    trainer = await fleet.trainer()
    source = make_adapter(fleet.directory / "odd", hidden=8, config=odd)
    with pytest.raises(AdapterInvalid):
        await fleet.publish(trainer, source)
    assert await fleet.events("adapter.published") == []
