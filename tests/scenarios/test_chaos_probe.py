"""The probe of chaos runs, on a whole fleet: it sees an adapter that an engine lost, and nothing where all is well."""

from __future__ import annotations

import asyncio

import pytest

from adaptersync_tools.chaos import probe as module
from adaptersync_tools.chaos.history import Violation
from adaptersync_tools.chaos.probe import Probe
from support.wait import wait_until
from support.whole_fleet import WholeFleet


async def test_the_probe_sees_a_version_that_an_engine_lost(fleet: WholeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REST_S", 0.05)
    trainer = await fleet.trainer()
    await fleet.promoted(trainer)
    retained = (await fleet.table()).window("run")[0]
    await fleet.promoted(trainer)
    table = await fleet.settled()
    found: list[Violation] = []
    probe = Probe(
        fleet.registry,
        found.append,
        token_file=lambda name: fleet.replicas[name].token_file,
        newest=lambda: table.generation,
        voided=(),
    )
    running = asyncio.create_task(probe.run())
    try:
        await wait_until(lambda: probe.checked > 8)
        assert found == []

        def seen() -> bool:
            if retained in fleet[0].listed():  # as often as its agent loads it again
                fleet[0].sim.engine.registry.unload(retained)
            return bool(found)

        await wait_until(seen, timeout_s=20.0)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert {violation.kind for violation in found} == {"evicted"}
    assert f"replica-0 answers 404 for {retained}" in found[0].what
