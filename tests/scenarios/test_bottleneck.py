"""Runs that one side limits on purpose: what `adaptersync bottleneck` and `phases` make of what they left behind.

Engines and training are scripted, everything between them is real.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import ClientSession
from msgspec.structs import replace

from adaptersync.agent import request_times
from adaptersync_core.config import Config
from adaptersync_tools.cli import main, timing
from adaptersync_tools.explain import to_toml
from adaptersync_tools.simulator.scheduler import Latency
from support.scripted_trainer import ScriptedTrainer
from support.wait import wait_until
from support.whole_fleet import WholeFleet, whole_fleet

STEPS = 5

Ask = Callable[..., Awaitable[Any]]
Say = Callable[..., Awaitable[str]]
Make = Callable[..., AbstractAsyncContextManager[WholeFleet]]


@pytest.fixture
def make(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setattr(request_times, "LOOK_S", 0.1)

    @asynccontextmanager
    async def fleet(*, router: dict[str, Any] | None = None, **engine: Any) -> AsyncIterator[WholeFleet]:
        settings = replace(config, router=replace(config.router, **(router or {})))
        async with whole_fleet(settings, tmp_path, **engine) as fleet:
            yield fleet

    return fleet


@pytest.fixture
def say(config: Config, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Say:
    """What a command prints."""
    settings = tmp_path / "settings.toml"
    settings.write_text(
        to_toml({"group.name": config.group.name, "redis.control_url": config.redis.control_url}), encoding="utf-8"
    )

    async def say(*arguments: str, fails: int = 0) -> str:
        capfd.readouterr()
        assert await asyncio.to_thread(main, [*arguments, "--config", str(settings)]) == fails
        printed = capfd.readouterr()
        return printed.err if fails else printed.out

    return say


@pytest.fixture
def ask(say: Say) -> Ask:
    """A command's document."""

    async def ask(*arguments: str) -> Any:
        return orjson.loads(await say(*arguments, "--json"))

    return ask


async def train(fleet: WholeFleet, steps: int = STEPS, **script: Any) -> None:
    publisher = await fleet.trainer()
    await ScriptedTrainer(fleet, publisher, **script).train(steps)

    async def told() -> bool:  # ledger rows and engines' counters are a moment behind
        seen = (await fleet.registry.fleet()).replicas.values()
        return bool(await fleet.rows()) and any(each.report.request_times.requests for each in seen)

    await wait_until(told, what="what the engines answered is reported")


async def verdict(ask: Ask) -> tuple[str, Any]:
    document = await ask("bottleneck", "run")
    return document["verdict"]["limit"], document


async def test_a_run_whose_trainer_is_slow(make: Make, ask: Ask, say: Say) -> None:
    async with make(latency=Latency(decode_tokens_per_s=400)) as fleet:
        await train(fleet, inflight=8, samples=4, train_s=0.5, queue=8)
        limit, document = await verdict(ask)
        assert limit == "trainer", document
        assert document["evidence"]["queued"] > 4  # of 8: samples wait for the trainer
        told = await say("bottleneck", "run")
        assert "run  is limited by the trainer: samples are there before it is" in told
        assert f"  because  {document['verdict']['evidence'][0]}" in told
        assert f"  first    {document['verdict']['change'][0]}" in told
        assert "more trainer" in document["verdict"]["change"][0]


async def test_a_run_whose_engines_have_more_than_they_can_do(make: Make, ask: Ask) -> None:
    async with make(latency=Latency(decode_tokens_per_s=100), max_num_seqs=1) as fleet:
        await train(fleet, inflight=12, samples=8, train_s=0.02, tokens=20)
        limit, document = await verdict(ask)
        assert limit == "generation", document
        assert document["evidence"]["engine_queue"] > 0.5
        assert "more replicas" in document["verdict"]["change"][0]


async def test_a_run_with_too_little_in_flight(make: Make, ask: Ask) -> None:
    """Known once engines were seen with more at once."""
    async with make(latency=Latency(decode_tokens_per_s=100)) as fleet:
        limit, document = await capped(fleet, ask, inflight=6)
        assert limit in ("generation or in-flight", "in-flight"), document
        assert "a larger in-flight limit" in document["verdict"]["change"][0]
        limit, document = await capped(fleet, ask, inflight=12)
        assert limit == "in-flight", document
        assert "a larger in-flight limit" in document["verdict"]["change"][0]


async def test_a_run_whose_engines_are_saturated_and_queue_nobody(make: Make, ask: Ask) -> None:
    """All that may be are in flight, and none waits: the batch is what slows an engine down."""
    async with make(latency=Latency(decode_tokens_per_s=200, full_rate_seqs=2)) as fleet:
        limit, document = await capped(fleet, ask, inflight=8)
        assert limit in ("generation or in-flight", "generation"), document
        limit, document = await capped(fleet, ask, inflight=20)
        assert limit == "generation", document
        assert document["evidence"]["engine_queue"] < 0.1
        assert document["evidence"]["inflight"] >= 0.9 * document["evidence"]["inflight_max"]
        assert "more replicas" in document["verdict"]["change"][0]


async def capped(fleet: WholeFleet, ask: Ask, *, inflight: int) -> tuple[str, Any]:
    """The verdict on a trainer that has nothing to do but to wait for rollouts, of which it has so many in flight."""
    await train(fleet, inflight=inflight, samples=8, train_s=0.02, tokens=60)
    document = await ask("bottleneck", "run", "--last", str(STEPS))
    return document["verdict"]["limit"], document


async def test_a_run_whose_router_takes_no_more(make: Make, ask: Ask) -> None:
    async with make(latency=Latency(decode_tokens_per_s=100), router={"max_inflight": 2}) as fleet:
        await train(fleet, inflight=12, samples=6, train_s=0.02, tokens=20)
        limit, document = await verdict(ask)
        assert limit == "in-flight", document
        assert "router.max_inflight" in document["verdict"]["change"][0]


async def test_a_run_that_waits_for_promotions(make: Make, ask: Ask) -> None:
    async with make(latency=Latency(decode_tokens_per_s=400, load_s=0.5)) as fleet:
        await train(fleet, inflight=8, samples=4, train_s=0.05, waits=True)
        limit, document = await verdict(ask)
        assert limit == "sync", document
        assert document["evidence"]["phase"] in ("loaded", "proved")  # a proof may load the canary
        assert document["verdict"]["change"][0].startswith("look at `")


async def test_a_run_whose_rollouts_are_held_for_promotions(make: Make, ask: Ask) -> None:
    """Its trainer waits for rollouts, and these for the version: more replicas would gain nothing."""
    async with make(latency=Latency(decode_tokens_per_s=400, load_s=0.5)) as fleet:
        await train(fleet, inflight=8, samples=4, train_s=0.02, strict=True)
        limit, document = await verdict(ask)
        assert limit == "sync", document
        assert (
            document["evidence"]["held"] > 0.3
        )  # of rollouts' time; the rest is theirs, which a busy machine draws out


async def test_a_run_that_has_only_begun_is_not_judged(make: Make, ask: Ask) -> None:
    async with make() as fleet:
        await train(fleet, steps=1, inflight=2, samples=2, train_s=0.02)
        limit, document = await verdict(ask)
        assert limit == "unknown"
        assert "1 of the latest versions" in document["verdict"]["evidence"][0]


async def test_the_phases_of_a_version_add_up(make: Make, ask: Ask, say: Say) -> None:
    async with make(latency=Latency(decode_tokens_per_s=400, load_s=0.2)) as fleet:
        await train(fleet, steps=2, inflight=2, samples=2, train_s=0.1, waits=True)
        document = await ask("phases", "run", "2")
        version = document["version"]
        assert version["version"].startswith("run-v2-")
        took = {span["phase"]: span["seconds"] for span in version["spans"]}
        assert took.keys() >= {"step", "digest", "publish", "taken up", "committed", "first token"}
        assert 0.1 <= took["step"] < 1.0
        assert {each["replica"] for each in version["replicas"]} == {"replica-0", "replica-1"}
        for each in version["replicas"]:
            spans = each["spans"]
            assert [span["phase"] for span in spans] == [
                "noticed", "visible", "staged", "verified", "loaded", "proved"
            ]  # fmt: skip
            for before, after in pairwise(spans):
                assert before["start_s"] + before["seconds"] == pytest.approx(after["start_s"], abs=0.01)
            assert spans[-1]["start_s"] + spans[-1]["seconds"] == pytest.approx(each["acked_s"], abs=1e-6)
            assert spans[4]["seconds"] >= 0.2
            assert each["first_token_s"] is None or each["first_token_s"] >= version["promoted_s"] - 0.01
        slowest = next(each for each in version["replicas"] if each["replica"] == version["slowest"])
        way = took["taken up"] + sum(span["seconds"] for span in slowest["spans"]) + took["committed"]
        assert way == pytest.approx(version["promoted_s"], abs=0.01)
        (promoted,) = await fleet.events("version.promoted", version["version"])
        assert version["promoted_s"] == pytest.approx(promoted.waited_s, abs=0.1)
        assert sum(share["share"] for share in document["shares"]) == pytest.approx(1.0)
        assert {phase["phase"] for each in document["rollouts"] for phase in each["phases"]} == {
            "hold", "route", "whole answer"
        }  # fmt: skip
        assert document["engines"]
        async with ClientSession() as session, session.get(f"{fleet.url}/metrics") as answer:
            exported = await answer.text()
        for phase in ("step", "digest", "publish", "taken up", "committed"):
            assert f'adaptersync_router_version_phase_seconds_count{{phase="{phase}"}}' in exported
        assert 'version_phase_seconds_count{phase="first token"}' in exported
        for name in fleet.replicas:
            for phase in ("noticed", "visible", "staged", "verified", "loaded", "proved"):
                counted = f'adaptersync_router_replica_phase_seconds_count{{phase="{phase}",replica="{name}"}} 3.0'
                assert counted in exported, exported
        told = await say("phases", "run", "v2")
        for line in (version["version"], "digest", "replica-0", "replica-1", "committed", "whole answer"):
            assert line in told
        assert "█" in told  # loading has its place in the bars
        told = await say("phases", "nobody", fails=64)
        assert told == "adaptersync: error: no such run, or nothing was published (run=nobody); known runs: run\n"
        told = await say("phases", "run", "77", fails=64)
        assert "no such version (run=run version=77)" in told


async def test_what_nobody_of_ours_wrote_and_what_is_no_longer_kept_is_left_out(
    make: Make, ask: Ask, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "CLOCKS_S", 0.0)  # one clock here
    async with make() as fleet:
        await train(fleet, steps=2, inflight=2, samples=2, train_s=0.02, waits=True)
        before = await ask("phases", "run", "1")
        name = before["version"]["version"]
        client, keys = fleet.registry.client, fleet.registry.keys
        word = {"type": "replica.acked", "version": name, "replica": "x", "engine_epoch": "1", "accepted": "true"}
        for wrong in ({"accepted": None}, {"replica": None}, {"loaded_s": "soon"}, {"loaded_s": "inf"}):
            fields = {field: value for field, value in {**word, **wrong}.items() if value is not None}
            await client.command("XADD", keys.events, "*", *(text for pair in fields.items() for text in pair))
        await client.command("DEL", keys.manifest(name))
        document = await ask("phases", "run", "1")
        assert document["version"]["version"] == name
        assert [each["replica"] for each in document["version"]["replicas"]] == ["replica-0", "replica-1"]
        assert document["version"]["promoted_s"] == before["version"]["promoted_s"]
        assert (document["version"]["step"], document["trainer"]) == (None, None)
        assert before["trainer"]
        assert "its manifest is no longer kept" in await say("phases", "run", "1")
        assert await ask("bottleneck", "run")


async def test_a_stream_tells_first_token_and_decoding_apart(make: Make, ask: Ask) -> None:
    async with make(latency=Latency(decode_tokens_per_s=100)) as fleet:
        await train(fleet, steps=1, inflight=1, samples=1, train_s=0.01)
        await fleet.complete("run", list(range(36)), max_tokens=36, stream=True)

        async def streamed() -> bool:
            return any("first_token_s" in row for row in await fleet.rows())

        await wait_until(streamed, what="the stream is in the ledger")
        document = await ask("phases", "run")
        took = {phase["phase"]: phase["p50_s"] for each in document["rollouts"] for phase in each["phases"]}
        assert took["first token"] < 0.3
        assert 0.3 <= took["decode"] < 0.6


async def test_what_a_publication_took_is_said_as_it_becomes_known(fleet: WholeFleet) -> None:
    publisher = await fleet.trainer()
    publication = await asyncio.to_thread(
        publisher.publish, fleet.adapter(), timings={"step_s": 2.0}, load={"inflight": 3.0, "inflight_max": 4.0}
    )
    assert publication.timings.keys() == {"step_s", "hashed_s", "stored_s"}
    assert (await fleet.outcome(publication)).state == "current"
    assert publication.timings.keys() == {"step_s", "hashed_s", "stored_s", "promoted_s"}
    manifest = fleet.store.read_manifest(publication.adapter_id)
    assert manifest == publication.manifest == await fleet.registry.manifest(publication.adapter_id)
    assert manifest.timings.keys() == {"step_s", "hashed_s"}
    assert manifest.load == {"inflight": 3.0, "inflight_max": 4.0}
    (announced,) = await fleet.events("adapter.published")
    assert announced.stored_s == pytest.approx(publication.timings["stored_s"], abs=1e-5)
    (promoted,) = await fleet.timed_events("version.promoted")
    (published,) = await fleet.timed_events("adapter.published")
    waited_s = (promoted[0] - published[0]) / 1000
    assert waited_s - 0.1 < publication.timings["promoted_s"] < waited_s + 1.5  # it is woken, or looks once a second
