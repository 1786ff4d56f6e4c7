"""A fleet under traffic, in which versions come, are voided and retire, and engines start again: its ledger agrees."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from adaptersync.jobs.ledger import drain
from adaptersync_core.archive import Archive
from adaptersync_core.config import Config
from adaptersync_core.records import Request
from adaptersync_core.rollouts import Row
from adaptersync_core.store import ArtifactStore
from adaptersync_tools.audit.evidence import read_evidence
from adaptersync_tools.audit.rollouts import Rollout, read_rollouts
from adaptersync_tools.audit.verify import Audit
from support.wait import wait_until
from support.whole_fleet import Served, WholeFleet, whole_fleet


@pytest.mark.timeout(180)
async def test_what_a_fleet_did_agrees_with_itself_and_what_did_not_happen_is_told(
    config: Config, tmp_path: Path
) -> None:
    async with whole_fleet(config, tmp_path, replicas=2) as fleet:
        trainer = await fleet.trainer()
        versions = [await fleet.promoted(trainer)]
        async with fleet.traffic("run", clients=4) as served:
            for _ in range(3):
                await _more(served)
                versions.append(await fleet.promoted(trainer))
                await drain(fleet.config)
            await fleet[0].restart_engine()
            await fleet.ready(2)
            request = Request(kind="rollback", run="run", reason="bad", current=versions[-1])
            await fleet.registry.request(request)
            await wait_until(lambda: _current_is(fleet, versions[-2]))
            await _more(served)
        names = [each.answer.headers["x-adaptersync-request-id"] for each in served]
        trained = [each for each in served if each.version == versions[0]]
        ids = [each.answer.headers["x-adaptersync-request-id"] for each in trained]
        trainer.rollouts.trained(ids, step=1)
        await wait_until(lambda: _told(fleet))
        await wait_until(lambda: _written(fleet, len(names)))
        await drain(fleet.config)
        store, group = Path(config.store.path), config.group.name
        audit = await asyncio.to_thread(Audit, store, group, "run")
        assert await asyncio.to_thread(lambda: list(audit.contradictions())) == []
        rows = await asyncio.to_thread(_rollouts, store, group)
        assert sorted(row.request_id for row in rows) == sorted(names)
        assert {row.proof for row in rows} == {"proved"}
        assert {row.request_id for row in rows if row.fate == "trained"} == set(ids)
        assert {row.row.version for row in rows if row.row and row.row.voided} == {versions[-1]}
        assert (audit.counts.rollouts, audit.counts.trained, audit.counts.unproven) == (len(names), len(ids), 0)

        # somebody who can write to Redis adds one that never was
        forged = rows[-1].row
        assert forged is not None
        forgery = ("row", _forged(forged))
        await fleet.registry.client.command("XADD", fleet.registry.keys.rollouts, "*", *forgery)
        await drain(fleet.config)
        again = await asyncio.to_thread(lambda: list(Audit(store, group, "run").contradictions()))
        assert len(again) == 1
        assert "which never said that it holds it" in again[0]


async def _more(served: list[Served]) -> None:
    before = len(served)
    await wait_until(lambda: len(served) > before + 20)


async def _current_is(fleet: WholeFleet, version: str) -> bool:
    return await fleet.current() == version


async def _told(fleet: WholeFleet) -> bool:
    return bool(await fleet.registry.client.command("XLEN", fleet.registry.keys.fates))


async def _written(fleet: WholeFleet, count: int) -> bool:
    return len({row["request_id"] for row in await fleet.rows()}) >= count


def _rollouts(store: Path, group: str) -> list[Rollout]:
    archives = {name: Archive(store, group, name) for name in ("rollouts", "fates", "events")}
    evidence = read_evidence(archives["events"], ArtifactStore(store), "run")
    return [each for some in read_rollouts(archives["rollouts"], archives["fates"], "run", evidence) for each in some]


def _forged(row: Row) -> bytes:
    return msgspec.json.encode(replace(row, request_id="forged", engine_epoch="another life", outcome="ok"))
