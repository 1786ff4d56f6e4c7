"""The bench of prefixes counts what engines compute; on simulated ones, whose counters the conformance suite holds."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from adaptersync.trainer import AdapterPublisher
from adaptersync_tools.bench import prefixes
from adaptersync_tools.demo.synthetic import SMALL, write_adapter, write_base_model
from adaptersync_tools.up import Progress, Stack, StackSettings
from support.processes import family

pytestmark = pytest.mark.timeout(120)


def test_groups_are_computed_once(tmp_path: Path) -> None:
    wanted = StackSettings(
        model=write_base_model(tmp_path / "model"),
        state_dir=tmp_path / "fleet",
        replicas=2,
        simulated=True,
        overrides={"trainer.run": prefixes.RUN, "coordinator.min_ready": 2},
    )
    settings = prefixes.Settings(prompts=12, clients=8)
    adapter = write_adapter(tmp_path / "adapter", base="base", sizes=SMALL, seed=1)
    with Stack(wanted, Progress()) as stack, AdapterPublisher(stack.config) as publisher:
        assert publisher.publish(adapter).wait(prefixes.OUTCOME_S).state == "current"
        result = asyncio.run(prefixes.measure(stack, settings, Progress()))
    assert result.asked == 12 * 8 * settings.tokens
    assert result.ideal <= result.computed < 1.3 * result.ideal
    assert sum(result.share.values()) == pytest.approx(1.0)
    assert family(tmp_path) == []


def test_one_engine_computes_each_block_once() -> None:
    requests = [[1] * 40, [1] * 40, [1] * 32 + [2] * 8, [1] * 32]
    assert prefixes._ideal(requests, 16) == 40 + 8 + 8 + 16  # the last token is always computed, so its block is
