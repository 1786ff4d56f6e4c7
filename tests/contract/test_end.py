"""A run whose trainer does not end it: the operator's command, and what a trainer is told that lives all the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest

from adaptersync.coordinator.protocol import decide
from adaptersync.trainer import publisher as publisher_module
from adaptersync.trainer.publisher import AdapterPublisher
from adaptersync_core.config import Config, GroupSection, RedisSection, StoreSection
from adaptersync_core.errors import ControlError, Fenced
from adaptersync_core.keys import Keys
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from adaptersync_tools.cli import main
from support.artifacts import small_adapter
from support.wait import wait_until


@pytest.fixture
def config(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("ADAPTERSYNC_REDIS__CONTROL_URL", redis_url)
    monkeypatch.setenv("ADAPTERSYNC_GROUP__NAME", "group")
    monkeypatch.delenv("ADAPTERSYNC_CONFIG", raising=False)
    (tmp_path / "store").mkdir()
    return Config(
        group=GroupSection(name="group"),
        redis=RedisSection(control_url=redis_url, lane_bytes=0),
        store=StoreSection(path=str(tmp_path / "store")),
    )


@pytest.fixture
async def registry(config: Config) -> AsyncIterator[Registry]:
    client = RedisClient(config.redis.control_url, name="test")
    yield Registry(client, Keys("group"))
    await client.close()


async def end(*more: str) -> int:
    return await asyncio.to_thread(main, ["end", "run", "--reason", "node lost", *more])


async def heard_ms(registry: Registry) -> int:
    return int(await registry.client.command("HGET", registry.keys.run("run"), "heartbeat_ms"))


async def test_a_living_trainer_is_ended_by_force_only_and_told_why(
    config: Config,
    registry: Registry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(publisher_module, "BEAT_S", 0.05)
    publisher = await asyncio.to_thread(AdapterPublisher, config, "run")
    await _heard_once_more(registry)
    assert await end() == 75
    assert "trainer of this run lives" in capsys.readouterr().err
    await asyncio.to_thread(publisher.publish, small_adapter(tmp_path / "one", seed=1))
    assert await end("--force") == 0
    assert "run run is ended" in capsys.readouterr().out
    with pytest.raises(Fenced, match="an operator ended this run: node lost"):
        await asyncio.to_thread(publisher.publish, small_adapter(tmp_path / "two", seed=2))
    await asyncio.to_thread(publisher.close)
    assert await end() == 0
    assert "had ended before" in capsys.readouterr().out
    following = await asyncio.to_thread(AdapterPublisher, config, "run")
    publication = await asyncio.to_thread(following.publish, small_adapter(tmp_path / "three", seed=3))
    assert publication.seq == 2
    await asyncio.to_thread(following.close)


async def test_by_force_a_run_ends_although_its_trainer_was_heard_of_in_the_future(registry: Registry) -> None:
    """The server's clock was set back since."""
    await registry.begin_run("run", nonce="a", max_staleness=1, trainer="host")
    await registry.client.command("HINCRBY", registry.keys.run("run"), "heartbeat_ms", 3_600_000)
    assert await end() == 75
    assert await end("--force") == 0
    assert (await registry.fleet()).runs["run"].ended_by == "node lost"


async def test_a_trainer_that_cannot_look_is_heard_of_all_the_same(
    config: Config, registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(self: Registry) -> object:
        raise ControlError("table cannot be read")

    monkeypatch.setattr(publisher_module, "BEAT_S", 0.05)
    monkeypatch.setattr(publisher_module, "LOOK_S", 0.05)
    publisher = await asyncio.to_thread(AdapterPublisher, config, "run")
    with monkeypatch.context() as broken:
        broken.setattr(Registry, "table", fail)
        await wait_until(lambda: "outcomes not known: table cannot be read" in caplog.text)
        await _heard_once_more(registry)
    await asyncio.to_thread(publisher.close)


async def test_a_trainer_that_was_replaced_says_so_once(
    config: Config, registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(publisher_module, "BEAT_S", 0.05)
    monkeypatch.setattr(publisher_module, "LOOK_S", 0.05)
    replaced = await asyncio.to_thread(AdapterPublisher, config, "run")
    present = await asyncio.to_thread(AdapterPublisher, config, "run")
    said = "run run is no longer trainer epoch 1's"
    await wait_until(lambda: said in caplog.text)
    for _ in range(3):
        await _heard_once_more(registry)
    assert caplog.text.count("is no longer") == 1
    for publisher in (replaced, present):
        await asyncio.to_thread(publisher.close)


async def _heard_once_more(registry: Registry) -> None:
    before = await heard_ms(registry)

    async def heard_again() -> bool:
        return await heard_ms(registry) > before

    await wait_until(heard_again, what="the trainer says that it lives")


async def test_the_status_says_which_trainers_live(registry: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    for run in ("lives", "hangs", "closed"):
        await registry.begin_run(run, nonce=run, max_staleness=1, trainer="host")
    await registry.client.command("HINCRBY", registry.keys.run("hangs"), "heartbeat_ms", -90_000)
    await registry.end_run("closed", epoch=1)
    await asyncio.to_thread(main, ["status", "--json"])
    runs = orjson.loads(capsys.readouterr().out)["runs"]
    assert {run["run"]: run["trainer"] for run in runs} == {"lives": "alive", "hangs": "silent", "closed": "ended"}
    await asyncio.to_thread(main, ["status"])
    rows = {line.split()[0]: line.rstrip() for line in capsys.readouterr().out.splitlines() if line.split()}
    assert rows["run"].endswith(" trainer")
    assert rows["lives"].endswith(" alive")
    assert rows["closed"].endswith(" ended")
    assert " silent 9" in rows["hangs"]


async def test_what_is_held_up_is_in_the_status(
    config: Config, registry: Registry, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    publisher = await asyncio.to_thread(AdapterPublisher, config, "run")
    publication = await asyncio.to_thread(publisher.publish, small_adapter(tmp_path / "one", seed=1))
    lease = await registry.lead("c1", "c1", lease_s=30)
    fleet = await registry.fleet()
    decision = decide(fleet, config)  # the run is taken in
    assert decision is not None
    await registry.decide(decision, lease, alive_s=5)
    assert await asyncio.to_thread(main, ["status", "--json"]) == 1
    (wait,) = orjson.loads(capsys.readouterr().out)["waits"]
    assert wait == {
        "version": publication.adapter_id,
        "state": "published",
        "waits_for": "1 replicas to be ready, 0 are",
        "left_s": None,
    }
    assert await asyncio.to_thread(main, ["status"]) == 1
    assert "1 replicas to be ready, 0 are" in capsys.readouterr().out
    await asyncio.to_thread(publisher.close)
