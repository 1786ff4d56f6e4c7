"""What the command line hears of a rollback it asked for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial

import pytest

from adaptersync.coordinator.retirement import requests
from adaptersync_core.config import Config
from adaptersync_core.errors import ControlError
from adaptersync_core.events import Event, RequestRefused, VersionRolledBack, VersionVoided, to_fields
from adaptersync_core.keys import Keys
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from adaptersync_tools.cli import main
from adaptersync_tools.cli.changing import answer, rollback_told, rolled_back
from support.asking import events
from support.tables import TableWriter, version_name

V1, V2, V3 = version_name(1), version_name(2), version_name(3)
RUN = V1.partition("-v")[0]
OTHERS = VersionVoided(version="other-v1-0123456789ab", generation=2, reason="r", current="other-v0-0123456789ab")


@pytest.fixture
async def registry(redis_url: str) -> AsyncIterator[Registry]:
    client = RedisClient(redis_url, name="test")
    yield Registry(client, Keys("group"))
    await client.close()


async def heard(registry: Registry, about: str, *events: Event) -> str:
    for event in events:
        await registry.client.command("XADD", registry.keys.events, "*", *to_fields(event))
    done = partial(rolled_back, about=about)
    return str(rollback_told(await answer(registry, done, after="0", run=RUN, request="q")))


async def test_the_current_version_was_voided(registry: Registry) -> None:
    voided = VersionVoided(version=V2, generation=3, reason="r", current=V1)
    assert await heard(registry, V2, OTHERS, voided) == f"voided {V2}; {V1} is current"


async def test_the_version_on_its_way_in_was_given_up(registry: Registry) -> None:
    others = VersionRolledBack(version=V2, generation=2, reason="r")
    assert await heard(registry, V3, others, VersionRolledBack(version=V3, generation=3, reason="r")) == f"gave up {V3}"


async def test_it_was_refused(registry: Registry) -> None:
    others = RequestRefused(request="p", reason="another request")
    with pytest.raises(ControlError, match="not retained"):
        await heard(registry, V1, others, RequestRefused(request="q", reason=f"{V1} is not retained"))


async def test_what_nobody_answered_stays_queued_and_a_repeat_voids_nothing_more(
    registry: Registry, redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No coordinator leads, so the operator asks twice; then one answers both."""
    monkeypatch.setenv("ADAPTERSYNC_REDIS__CONTROL_URL", redis_url)
    monkeypatch.setenv("ADAPTERSYNC_GROUP__NAME", "group")
    monkeypatch.delenv("ADAPTERSYNC_CONFIG", raising=False)
    await TableWriter(registry.client, registry.keys).write({V1: "retained", V2: "retained", V3: "current"}, {})
    for _ in range(2):
        ask = ["rollback", RUN, "--reason", "bad", "--timeout", "0.2"]
        assert await asyncio.to_thread(main, ask) == 69
        told = capsys.readouterr().err
        assert "no coordinator answered in time" in told
        assert f"the request stays queued, and is about {V3} only" in told
    lease = await registry.lead("c1", "c1", lease_s=30)
    await registry.client.command("HSET", registry.keys.control, "generation", 1)
    for _ in range(2):
        draft = requests(await registry.fleet(), Config())
        assert draft is not None
        await registry.decide(draft.decision(1), lease, alive_s=5)
    assert (await registry.table()).window(RUN) == [V2, V1]
    counted = Counter(fields["type"] for fields in await events(registry))
    assert (counted["version.voided"], counted["request.refused"]) == (1, 1)
