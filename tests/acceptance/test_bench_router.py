"""The bench of routers measures what it says, small and quickly; how large the figures are is not judged here."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaptersync_tools.bench.routers.cases import Figures
from adaptersync_tools.bench.routers.load import Load, press
from adaptersync_tools.bench.routers.parties import DIRECT, OURS, OURS_AGENTS, OURS_TWO, RULE, VLLM, Party, Replicas
from adaptersync_tools.bench.routers.run import Result, Settings, run
from adaptersync_tools.up import Progress
from support.processes import family

pytestmark = pytest.mark.timeout(240)


def figures(result: Result, case: str, party: Party) -> Figures:
    (found,) = (each for each in result.outcomes if (each.case, each.party) == (case, party.name))
    return found.medians


def test_who_fails_is_said_to(tmp_path: Path) -> None:
    """And the others are measured all the same."""
    program = tmp_path / "vllm-router"
    program.write_text("#!/bin/sh\necho no such flag\nexit 2\n")
    program.chmod(0o755)
    settings = Settings(
        seconds=1, repeat=1, cases=("template",), routers=("vllm-router", "hf-rule"), programs={"vllm-router": program}
    )
    result = run(settings, tmp_path, Progress())
    failed = {outcome.party: outcome.failed for outcome in result.outcomes}
    assert "no such flag" in failed[VLLM.name]
    assert failed[RULE.name] == ""
    assert 25 <= figures(result, "template", RULE)["busiest_percent"] < 100
    assert all(peer.version == "unknown" for peer in result.peers)
    assert family(tmp_path) == []


async def test_load_is_of_groups(tmp_path: Path) -> None:
    """Before one replica, all but the first of a prompt's completions are warm."""
    replicas = Replicas(tmp_path, 1)
    with replicas.supervisor:
        await replicas.start()
        found = await press(replicas.urls[0], Load(connections=8, window=4), DIRECT, "base", seconds=1)
        (counts,) = await replicas.counts()
    assert found.errors == 0
    assert counts.requests >= found.requests > 100
    assert counts.warm / counts.requests == pytest.approx(7 / 8, abs=4 / counts.requests)
    assert family(tmp_path) == []


def test_router(tmp_path: Path) -> None:
    settings = Settings(
        seconds=1,
        repeat=1,
        cases=("two-routers", "restarted", "throughput"),
        routers=("adaptersync", "vllm-router", "hf-rule"),
        programs={"vllm-router": tmp_path / "nowhere"},
    )
    result = run(settings, tmp_path, Progress())
    for case in settings.cases:
        assert figures(result, case, OURS)["errors"] == 0
        assert figures(result, case, VLLM) == {}  # it is missing, and said to be
    assert all("pip install vllm-router==0.1.17" in peer.note for peer in result.peers)
    assert len(result.peers) == 2
    assert any("vllm-router" in reason for reason in result.unjudged)
    # what routers of one fleet know together, others know apart
    shared, apart = (figures(result, "two-routers", party)["warm_percent"] for party in (OURS, RULE))
    assert apart < shared < 88
    # the replica that came back answers 404, which the rule passes on
    assert figures(result, "restarted", RULE)["not_found"] > 0
    for party in (OURS, OURS_AGENTS):
        assert figures(result, "restarted", party)["not_found"] == 0
        assert figures(result, "restarted", party)["answers"] > 0
    for party in (OURS, OURS_TWO):
        found = figures(result, "throughput", party)
        assert min(found[name] for name in ("requests_per_s", "router_cpu_us", "redis_cpu_us", "p50_ms")) > 0
    assert figures(result, "throughput", DIRECT)["router_cpu_us"] == 0
    assert family(tmp_path) == []
