"""A real TRL script trains to its end through all that may happen to a fleet: unmodified behind the relay, and as ours.

Both are whole trainings with a rollout process each, in processes of their own, on a simulated fleet. The table in
tests/README.md says which of the rows of what goes wrong in the field they show.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from aiohttp import web
from msgspec.structs import replace

from adaptersync.trainer.relay import Relay
from adaptersync_core.config import Config
from adaptersync_core.events import VersionPromoted
from adaptersync_core.manifest import WEIGHTS_FILE
from adaptersync_core.rollouts import Row, join
from adaptersync_core.rollouts import decode as decode_row
from adaptersync_tools.simulator.scheduler import Latency
from support import trainers
from support.source import PACKAGES
from support.wait import wait_until
from support.whole_fleet import WholeFleet, whole_fleet

pytestmark = [pytest.mark.trl, pytest.mark.filterwarnings("default"), pytest.mark.timeout(480)]

STALENESS = 4  # TRL's own
ENOUGH_S = 200.0
Trouble = Callable[[Relay], Awaitable[None]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With room for whatever simulated engines say, which are bytes of ASCII."""
    trainers.load_trl()
    from transformers import AutoModelForCausalLM

    directory = trainers.tiny_model(tmp_path_factory.mktemp("base"))
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    model.resize_token_embeddings(128, mean_resizing=False)
    model.save_pretrained(directory)
    return directory


@contextlib.asynccontextmanager
async def hurried(config: Config, tmp_path: Path, base: Path) -> Any:
    """A crashed replica is out soon; every answer takes a while, so that some are under way whatever happens."""
    settings = replace(
        config,
        coordinator=replace(config.coordinator, alive_s=1.5),
        agent=replace(config.agent, probe_timeout_s=0.5),
        trainer=replace(config.trainer, max_staleness=STALENESS),
    )
    slow = Latency(decode_tokens_per_s=40)
    async with whole_fleet(settings, tmp_path, base=base, latency=slow, max_loras=8, max_cpu_loras=12) as fleet:
        yield fleet


async def trained(fleet: WholeFleet, base: Path, url: str, **options: object) -> list[dict[str, Any]]:
    """What TRL logged of its steps, once the script has ended well."""
    out = fleet.directory / "out"
    given = {"base": base, "out": out, "url": url} | options
    command = [sys.executable, "-W", "ignore", "-m", "support.training_script"]
    command += [part for name, value in given.items() for part in (f"--{name}", str(value))]
    log = fleet.directory / f"script-{options['steps']}.log"
    with log.open("wb") as said:
        process = await asyncio.create_subprocess_exec(*command, env=environment(fleet), stdout=said, stderr=said)
    try:
        await asyncio.wait_for(process.wait(), ENOUGH_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
            print(log.read_text()[-6000:])
    assert process.returncode == 0, log.read_text()[-6000:]
    state = json.loads((out / f"checkpoint-{options['steps']}" / "trainer_state.json").read_bytes())
    assert state["global_step"] == options["steps"]
    return [entry for entry in state["log_history"] if "ratio" in entry]


def environment(fleet: WholeFleet) -> dict[str, str]:
    roots = [str(root.parent) for root in PACKAGES.values()] + [str(Path(trainers.__file__).parents[1])]
    return os.environ | {
        "ADAPTERSYNC_GROUP__NAME": fleet.config.group.name,
        "ADAPTERSYNC_REDIS__CONTROL_URL": fleet.config.redis.control_url,
        "ADAPTERSYNC_REDIS__CACHE_URL": fleet.config.redis.cache_url,
        "ADAPTERSYNC_STORE__PATH": fleet.config.store.path,
        "PYTHONPATH": os.pathsep.join(roots),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }


class Meets:
    """Troubles by TRL's own name of the version whose load they come before; `told` is what each name became."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.before: dict[str, Trouble] = {}
        self.told: dict[str, str] = {}
        load = Relay.load

        async def loading(relay: Relay, request: web.Request) -> web.Response:
            name = orjson.loads(await request.read())["lora_name"]
            if name in self.before:
                await self.before.pop(name)(relay)
            answer = await load(relay, request)
            self.told[name] = str(answer.text).removesuffix(".").rpartition(" ")[2]
            return answer

        monkeypatch.setattr(Relay, "load", loading)


async def test_unmodified_trl_trains_to_the_end_through_everything(
    config: Config, tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meets = Meets(monkeypatch)
    restarting = SimpleNamespace(coordinator=None)
    async with hurried(config, tmp_path, base) as fleet, fleet.relay(promotion_timeout_s=60.0) as url:

        async def delayed(_: Relay) -> None:
            slow(fleet, 0.7)

        async def crashed(_: Relay) -> None:
            slow(fleet, 0.0)
            await wait_until(lambda: bool(fleet[0].sim.engine.running), timeout_s=30)
            await fleet[0].stop_engine()

        async def back(_: Relay) -> None:
            await wait_until(lambda: out(fleet), timeout_s=30)
            await fleet[0].start_engine()

        async def coordinator_away(_: Relay) -> None:
            await fleet.stop_coordinator()
            restarting.coordinator = asyncio.get_running_loop().call_later(0.7, fleet.start_coordinator)

        async def too_slow(relay: Relay) -> None:
            await fleet.ready()
            slow(fleet, 2.5)
            relay._config = replace(relay._config, relay=replace(relay._config.relay, promotion_timeout_s=0.5))

        async def in_time_again(relay: Relay) -> None:
            await wait_until(lambda: substituted(fleet, "trl-policy-v6"), timeout_s=30)
            slow(fleet, 0.0)
            relay._config = replace(relay._config, relay=replace(relay._config.relay, promotion_timeout_s=60.0))

        meets.before = {
            "trl-policy-v2": delayed,
            "trl-policy-v3": crashed,
            "trl-policy-v4": back,
            "trl-policy-v5": coordinator_away,
            "trl-policy-v6": too_slow,
            "trl-policy-v7": in_time_again,
        }
        steps = await trained(fleet, base, url, steps=8)
        assert not meets.before
        first = dict(meets.told)
        assert list(first) == [f"trl-policy-v{number}" for number in range(1, 10)]
        assert first["trl-policy-v6"] == first["trl-policy-v5"]
        assert len(set(first.values())) == 8

        # its fourth step again: names come back, and mean other bytes
        checkpoint = fleet.directory / "out" / "checkpoint-4"
        again = await trained(fleet, base, url, steps=10, resume=checkpoint)
        assert len(again) == 10  # those of the first four steps are in the checkpoint
        number = json.loads((checkpoint / "rollout_state.json").read_bytes())["model_version"] + 1
        resumed = fleet.store.read_manifest(meets.told[f"trl-policy-v{number}"])
        assert (number in range(5, 8), resumed.epoch) == (True, 2)
        assert resumed.adapter_id != first[f"trl-policy-v{number}"]
        held = (checkpoint / WEIGHTS_FILE).read_bytes()
        assert (fleet.store.directory(resumed.adapter_id) / WEIGHTS_FILE).read_bytes() == held

        rows = await judged(fleet)
        assert {row.outcome for row in rows} <= {"ok", "client_gone"}  # the latter as a training ends
        assert not any("rollout/vllm_retry_total" in entry for entry in [*steps, *again])  # TRL heard of nothing
        marked = {row.substituted for row in rows if row.version == first["trl-policy-v5"] and row.substituted}
        assert "trl-policy-v6" in marked
        assert any(row.attempts > 1 for row in rows)  # the crash met some


def slow(fleet: WholeFleet, seconds: float) -> None:
    for replica in fleet.replicas.values():
        if replica.up:
            replica.faults(delay_load_s=seconds)


async def out(fleet: WholeFleet) -> bool:
    return (await fleet.table()).ready() == ["replica-1"]


async def substituted(fleet: WholeFleet, name: str) -> bool:
    return any(row.substituted == name for row in await rows_of(fleet))


async def rows_of(fleet: WholeFleet) -> list[Row]:
    stream = await fleet.control.read_stream(fleet.keys.rollouts, "0", count=100_000)
    return join([decode_row(fields) for _, fields in stream])


async def judged(fleet: WholeFleet) -> list[Row]:
    """The ledger, of which all is well: nobody was served what was not promoted yet, nor by one who had not said so."""
    rows = await rows_of(fleet)
    promoted: dict[str, float] = {}
    for at, event in await fleet.timed_events("version.promoted"):
        assert isinstance(event, VersionPromoted)
        promoted[event.version] = at / 1000
    assert len(rows) > 30
    for row in rows:
        if row.outcome == "ok":
            assert promoted[row.version] <= row.started_at + (row.hold_s or 0.0) + 0.002
            assert row.digest.startswith(row.version.rpartition("-")[2])
            assert not row.voided
    for replica in fleet.replicas.values():
        assert not replica.sim.calls["/pause"]
        assert not replica.sim.scheduler.paused
    return rows


async def test_our_trainer_trains_to_the_end_through_everything(config: Config, tmp_path: Path, base: Path) -> None:
    async with hurried(config, tmp_path, base) as fleet:
        slow(fleet, 0.3)
        training = asyncio.create_task(trained(fleet, base, fleet.url, steps=24, run="run", budget=0))
        try:
            await promotions(fleet, 1)
            await wait_until(lambda: bool(fleet[0].sim.engine.running), timeout_s=90)
            await fleet[0].stop_engine()
            await wait_until(lambda: out(fleet), timeout_s=30)
            await promotions(fleet, 1)
            await fleet[0].start_engine()
            await fleet.stop_coordinator()
            fleet.start_coordinator()
            await promotions(fleet, 1)
            slow(fleet, 1.5)
            await promotions(fleet, 1)
            slow(fleet, 0.0)
            assert not training.done()
            steps = await training
        finally:
            training.cancel()
            await asyncio.gather(training, return_exceptions=True)
        assert steps[-1]["adaptersync/published"] == 25
        assert not any(entry.get("adaptersync/served_mismatch_total") for entry in steps)
        rows = await judged(fleet)
        assert {row.outcome for row in rows} <= {"ok", "client_gone", "refused"}
        assert {row.status for row in rows if row.outcome == "refused"} <= {410}  # asked for as it retired: asked anew
        for row in rows:
            if row.outcome == "ok":
                assert row.version.startswith(f"run-v{row.asked.removeprefix('run@v')}-")
        await young_enough(fleet, rows, steps)


async def young_enough(fleet: WholeFleet, rows: list[Row], steps: list[dict[str, Any]]) -> None:
    """How old it was what was trained on, by the steps the versions are of and not by what the trainer made of them."""
    syncs = {}
    for version in {row.version for row in rows if row.outcome == "ok"}:
        manifest = fleet.store.read_manifest(version)
        assert manifest.step is not None
        syncs[manifest.seq] = manifest.step + 1
    lines = (fleet.directory / "out" / "taken").read_text().splitlines()
    ages = Counter(int(clock) - syncs[int(version)] for clock, version in map(str.split, lines))
    assert ages.total() >= 4 * len(steps)
    assert max(ages) <= STALENESS
    assert any(entry.get("sample/dropped_stale_total") for entry in steps), ages  # others would have been too old


async def promotions(fleet: WholeFleet, more: int) -> None:
    before = len(await fleet.events("version.promoted"))
    await wait_until(lambda: _promoted(fleet, before + more), timeout_s=90)


async def _promoted(fleet: WholeFleet, count: int) -> bool:
    return len(await fleet.events("version.promoted")) >= count
