"""The baseline suffers what it is said to suffer, and gives up what it cannot have everywhere."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from adaptersync_tools.bench import polling
from adaptersync_tools.simulator.engine import EngineConfig
from adaptersync_tools.simulator.http import Simulator, SimulatorConfig, serving
from adaptersync_tools.simulator.store import Mount
from support.artifacts import small_adapter

VISIBLE_S, BLIND_S, EVERY_S = 0.3, 1.5, 0.1


@contextlib.asynccontextmanager
async def engines(root: Path, *blind_s: float) -> AsyncIterator[dict[str, Simulator]]:
    """By address; each with a mount of its own that hides what was looked for too early."""
    async with contextlib.AsyncExitStack() as stack:
        found = {}
        for seconds in blind_s:
            mount = Mount(root=str(root), visibility_delay_s=VISIBLE_S, negative_ttl_s=seconds)
            simulator = Simulator(SimulatorConfig(engine=EngineConfig(max_loras=4), mount=mount))
            address = await stack.enter_async_context(serving(simulator))
            found[address.url] = simulator
        yield found


def published(root: Path, tmp_path: Path) -> Path:
    place = root / "policy-v1"
    polling.store(small_adapter(tmp_path / "adapter"), place)
    return place


async def synchronize(found: dict[str, Simulator], place: Path, timeout_s: float = 10.0) -> tuple[float, list[int]]:
    """Seconds, and how often each engine was asked."""
    began = time.monotonic()
    tries = await polling.synchronize(list(found), place.name, place, timeout_s=timeout_s, every_s=EVERY_S)
    return time.monotonic() - began, [tries[url] for url in found]


def has(simulator: Simulator) -> bool:
    return "policy-v1" in {lora.name for lora in simulator.engine.registry.listed()}


async def test_one_early_look_costs_the_whole_blind_time(tmp_path: Path) -> None:
    (root := tmp_path / "store").mkdir()
    async with engines(root, 0.0, BLIND_S) as found:
        place = published(root, tmp_path)
        took_s, (seeing, blind) = await synchronize(found, place)
        assert all(has(simulator) for simulator in found.values())
        assert BLIND_S <= took_s < 3 * BLIND_S  # the fleet is as slow as its slowest mount
        assert 2 <= seeing < blind  # the first look of each came too early
        assert not any(simulator.scheduler.paused for simulator in found.values())


async def test_who_looks_late_enough_is_not_blind(tmp_path: Path) -> None:
    (root := tmp_path / "store").mkdir()
    async with engines(root, BLIND_S) as found:
        place = published(root, tmp_path)
        await asyncio.sleep(VISIBLE_S)  # what is measured is that no look came before it
        took_s, tries = await synchronize(found, place)
        assert tries == [1]
        assert took_s < BLIND_S


async def test_the_fleet_stands_still_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root := tmp_path / "store").mkdir()
    async with engines(root, 0.0) as found:
        place = published(root, tmp_path)
        paused: list[bool] = []
        load = polling._load

        async def watched(*arguments: object) -> None:
            paused.extend(simulator.scheduler.paused for simulator in found.values())
            await load(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(polling, "_load", watched)
        await synchronize(found, place)
        assert paused == [True]


async def test_what_not_all_can_have_is_given_up_by_all_and_the_fleet_goes_on(tmp_path: Path) -> None:
    (root := tmp_path / "store").mkdir()
    async with engines(root, 0.0, 60.0) as found:
        place = published(root, tmp_path)
        with pytest.raises(polling.PollingFailed, match="not on every replica in 1 s"):
            await synchronize(found, place, timeout_s=1.0)
        for simulator in found.values():
            assert not has(simulator)
            assert not simulator.scheduler.paused


async def test_another_refusal_is_final(tmp_path: Path) -> None:
    (root := tmp_path / "store").mkdir()
    async with engines(root, 0.0, 0.0) as found:
        place = published(root, tmp_path)
        (place / "adapter_model.safetensors").write_bytes(b"torn")
        with pytest.raises(polling.PollingFailed, match="load refused"):
            await synchronize(found, place)
        assert not any(simulator.scheduler.paused for simulator in found.values())
