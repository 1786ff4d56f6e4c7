"""What a real router recorded, replayed: by its own rules it comes out as it was, by others not."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import get_args

import msgspec
import orjson
import pytest

from adaptersync.router.policy import Policy
from adaptersync_core.blocks import block_hashes
from adaptersync_core.rollouts import Row, decode
from adaptersync_tools.cli import main
from adaptersync_tools.replay import Figures, Presence, Replay
from support.router_fleet import V1, Fleet

GROUPS, GROUP, CLIENTS, WINDOW = 48, 8, 32, 8
SPILL = 2


class Slowly:
    """A gate that lets each answer go after a time of its own."""

    def __init__(self) -> None:
        self._chance = random.Random(5)

    async def wait(self) -> None:
        await asyncio.sleep(self._chance.uniform(0.05, 0.4))

    def set(self) -> None:
        return None


async def load(fleet: Fleet) -> list[Row]:
    """Groups in shuffled windows, with a template; each third prompt goes on from one of the window before."""
    chance = random.Random(3)
    prompts = [[7] * 16 + [chance.randrange(150_000) for _ in range(60)] for _ in range(GROUPS)]
    for place in range(WINDOW + 2, GROUPS, 3):
        prompts[place] = prompts[place - WINDOW][:64] + [chance.randrange(150_000) for _ in range(32)]
    asked: list[list[int]] = []
    for first in range(0, GROUPS, WINDOW):
        window = [prompt for prompt in prompts[first : first + WINDOW] for _ in range(GROUP)]
        chance.shuffle(window)
        asked += window
    waiting = iter(asked)

    async def client() -> None:
        for prompt in waiting:
            assert (await fleet.complete("run-a", prompt)).status == 200

    for replica in fleet.replicas.values():
        replica.gate = Slowly()  # type: ignore[assignment]
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    await fleet.rows(len(asked))
    entries = await fleet.control.read_stream(fleet.keys.rollouts, "0", count=100_000)
    return [row for _, fields in entries if (row := decode(fields)) is not None]


def replayed(rows: list[Row], spill: int) -> dict[str, Figures]:
    presence = Presence()
    for row in rows:
        presence.read(row)
    replay = Replay(presence, get_args(Policy), spill=spill)
    for row in rows:
        replay.read(row)
    return {each.policy: each for each in replay.figures()}


async def test_the_same_policy_comes_to_the_same_and_another_does_not(
    fleet: Fleet, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router(spill=SPILL):
        rows = await load(fleet)
    found = replayed(rows, SPILL)
    recorded, same, other = found["recorded"], found["promise"], found["threshold"]
    count = GROUPS * GROUP
    assert recorded.requests == same.requests == other.requests == count
    # rows tell the time, and not in which order Redis was asked by two that came at once
    assert recorded.elsewhere == 0
    assert same.elsewhere < 0.15 * count, found  # more come at once on a busy machine
    assert same.warm_percent == pytest.approx(recorded.warm_percent, abs=2.0)
    assert abs(same.largest - recorded.largest) <= 2
    assert same.imbalance == pytest.approx(recorded.imbalance, abs=0.03)
    assert abs(same.spilled - recorded.spilled) <= 0.03 * count
    assert other.elsewhere > 2 * same.elsewhere, found
    assert other.warm_percent < recorded.warm_percent - 0.5
    assert other.imbalance < same.imbalance
    # warm as the rows say that it was expected
    known = sum(row.boilerplate + (row.owned_blocks or 0) for row in rows if row.outcome == "ok")
    assert recorded.warm_percent == pytest.approx(
        100 * known / sum(row.blocks for row in rows if row.outcome == "ok"), abs=0.01
    )

    file = tmp_path / "rollouts.jsonl"
    file.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    assert await asyncio.to_thread(main, ["route", "replay", str(file), "--spill", str(SPILL), "--json"]) == 0
    told = orjson.loads(capsysbinary.readouterr().out)
    assert told == [msgspec.to_builtins(each) for each in found.values()]


async def test_rows_keep_what_decisions_went_by(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    first, template = list(range(64)), list(range(16))
    asked: list[object] = [first, template + [99] * 48, [*first, *[98] * 32], [first, first, template], [1, 2]]
    async with fleet.router():
        for prompt in asked:
            assert (await fleet.complete("run-a", prompt)).status == 200
        await fleet.rows(len(asked))
        rows = await fleet.joined()
    assert [(row.blocks, row.boilerplate, row.weight, row.alike) for row in rows] == [
        (4, 0, 1, 1),
        (4, 1, 1, 1),  # it has begun like the first, which until then did not know that others would
        (6, 1, 1, 1),
        (4, 1, 3, 2),
        (0, 0, 1, 1),
    ]
    one, other, onward, again, short = (row.chain for row in rows)
    assert one == again == block_hashes(V1, first, 16, 9)[-1]
    assert other == block_hashes(V1, template + [99] * 48, 16, 9)[-1]
    assert onward == f"4:{one} {block_hashes(V1, [*first, *[98] * 32], 16, 9)[-1]}"
    assert short == ""
    assert [row.block_size for row in rows] == [16, 16, 16, 16, 0]


async def test_a_run_is_read_from_redis_and_exported(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    await fleet.tables.announce(V1)  # so that the run is known
    async with fleet.router():
        for model in ("run-a", "base", "run-a"):
            assert (await fleet.complete(model, list(range(40)))).status == 200
        await fleet.rows(3)
    monkeypatch.setenv("ADAPTERSYNC_REDIS__CONTROL_URL", fleet.control_url)
    monkeypatch.setenv("ADAPTERSYNC_GROUP__NAME", "test")
    assert await asyncio.to_thread(main, ["route", "export", "run-a"]) == 0
    lines = capsysbinary.readouterr().out.splitlines()
    assert [orjson.loads(line)["routing"] for line in lines] == ["cold", "affinity"]
    assert await asyncio.to_thread(main, ["route", "replay", "run-a"]) == 0
    shown = capsysbinary.readouterr().out.decode()
    assert "2 requests" in shown
    assert all(
        word in shown
        for word in ("recorded", "promise, spill 8", "threshold, spill 8", "50.00", "8000 tokens a second")
    )
    assert await asyncio.to_thread(main, ["route", "replay", "run-z"]) != 0
    assert "no such run" in capsysbinary.readouterr().err.decode()
