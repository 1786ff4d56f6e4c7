"""The gate from end to end on real servers: a coordinator, a scripted replica, and the operator's command."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest
from msgspec.structs import replace

from adaptersync.coordinator.app import Coordinator
from adaptersync_core.config import Config, CoordinatorSection, GroupSection, JobsSection, RedisSection, StoreSection
from adaptersync_core.keys import Keys
from adaptersync_core.records import Ack, ReplicaReport
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from adaptersync_tools.cli import main
from support.wait import wait_until
from support.world import manifest

REPORT = ReplicaReport(
    url="http://r1", base_model="base", engine_epoch="1", max_loras=4, max_cpu_loras=4, max_lora_rank=16, block_size=16
)
V1, V2 = manifest("run", 1), manifest("run", 2)


@pytest.fixture
def config(redis_url: str, tmp_path: Path) -> Config:
    return Config(
        group=GroupSection(name="group"),
        redis=RedisSection(control_url=redis_url),
        store=StoreSection(path=str(tmp_path / "store")),
        coordinator=CoordinatorSection(gate=True),
        jobs=JobsSection(verify=False),
    )


@pytest.fixture
def variables(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAPTERSYNC_REDIS__CONTROL_URL", config.redis.control_url)
    monkeypatch.setenv("ADAPTERSYNC_GROUP__NAME", "group")
    monkeypatch.delenv("ADAPTERSYNC_CONFIG", raising=False)


@pytest.fixture
async def registry(config: Config) -> AsyncIterator[Registry]:
    """Beside it a coordinator works, and a replica that accepts whatever is on its way in."""
    client = RedisClient(config.redis.control_url, name="test")
    registry = Registry(client, Keys("group"))
    await registry.begin_run("run", nonce="n", max_staleness=1, trainer="t")
    await asyncio.to_thread(Path(config.store.path).mkdir)
    coordinator = Coordinator(config, registry)

    async def live() -> None:
        while True:
            table = await registry.table()
            await registry.report_replica("r1", replace(REPORT, loaded=tuple(table.wanted())))
            for name in table.wanted():
                await registry.ack("r1", name, Ack(accepted=True, engine_epoch="1"))
            await registry.forget_acks("r1", [n for n in await registry.acks("r1") if n not in table.wanted()])
            await coordinator.work()
            await asyncio.sleep(0.01)

    living = asyncio.create_task(live())
    yield registry
    living.cancel()
    await asyncio.gather(living, return_exceptions=True)
    await client.close()


async def _publish(registry: Registry, number: int) -> str:
    version = (V1, V2)[number - 1]
    await registry.reserve("run", epoch=1, nonce=str(number))
    await registry.publish(version, published_at=1.0)
    await wait_until(lambda: _is(registry, version.adapter_id, "ready"))
    return version.adapter_id


async def _is(registry: Registry, name: str, state: str) -> bool:
    record = await registry.version(name)
    return record is not None and record.state == state


@pytest.mark.usefixtures("variables")
async def test_an_operator_admits_one_and_refuses_another(
    registry: Registry, capsys: pytest.CaptureFixture[str]
) -> None:
    one = await _publish(registry, 1)
    assert (await registry.table()).runs["run"].current is None
    assert await asyncio.to_thread(main, ["gate", "admit", "run", one]) == 0
    assert f"{one} is current" in capsys.readouterr().out
    two = await _publish(registry, 2)
    assert await asyncio.to_thread(main, ["gate", "refuse", "run", two, "--reason", "answers too long"]) == 0
    assert f"{two} is rolled_back" in capsys.readouterr().out
    record = await registry.version(two)
    assert record is not None
    assert (record.state, record.reason) == ("rolled_back", "answers too long")
    assert (await registry.table()).runs["run"].current == one
    assert await asyncio.to_thread(main, ["gate", "admit", "run", one]) == 1
    assert f"{one} is current, not at the gate" in capsys.readouterr().err
    assert await asyncio.to_thread(main, ["gate", "admit", "nowhere", one]) == 64


@pytest.mark.usefixtures("variables")
async def test_versions_say_which_rollouts_are_voided(registry: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    names = []
    for number in (1, 2):
        names.append(await _publish(registry, number))
        assert await asyncio.to_thread(main, ["gate", "admit", "run", names[-1]]) == 0
        row: dict[str, object] = {"request_id": f"a-{number}", "router": "g", "path": "/", "asked": "run", "run": "run"}
        row |= {"outcome": "ok", "started_at": 1.0, "version": names[-1]}
        await registry.client.command("XADD", registry.keys.rollouts, "*", "row", orjson.dumps(row))
    assert await asyncio.to_thread(main, ["rollback", "run", "--reason", "answers nonsense"]) == 0
    capsys.readouterr()
    assert await asyncio.to_thread(main, ["versions", "run", "--rollouts", "--json"]) == 0
    found = {view["version"]: view for view in orjson.loads(capsys.readouterr().out)}
    assert {name: found[name]["rollouts"]["voided"] for name in names} == {names[0]: 0, names[1]: 1}
    assert {name: found[name]["rollouts"]["total"] for name in names} == {names[0]: 1, names[1]: 1}
    assert await asyncio.to_thread(main, ["versions", "run", "--rollouts"]) == 0
    assert "1, 1 voided" in capsys.readouterr().out
