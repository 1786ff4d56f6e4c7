"""What hosts are asked to run, as Redis keeps it."""

from __future__ import annotations

import pytest

from adaptersync.coordinator.observer import workers
from adaptersync_core import scaling
from adaptersync_core.errors import ControlError
from adaptersync_core.queue import worker_name, workers_key
from adaptersync_core.registry import Registry
from adaptersync_core.scaling import HOSTS, UP, Scale
from support.asking import insist

FOUR = Scale(replicas=4, routers=2, workers=3, keeper=UP, most=8)


async def test_what_was_asked_last_is_what_is_asked(registry: Registry, lossy: Registry) -> None:
    client, keys = registry.client, registry.keys
    await scaling.ask(client, keys, "a", Scale(replicas=1))
    await insist(lambda: scaling.ask(lossy.client, keys, "a", FOUR))
    await client.command("HSET", keys.scale, "b", "nonsense")
    assert await scaling.asked(client, keys) == {"a": FOUR}
    assert await scaling.forget(client, keys, "a")
    assert not await scaling.forget(client, keys, "a")
    assert await scaling.asked(client, keys) == {}


async def test_hosts_are_bounded_and_those_that_are_there_can_still_be_asked(registry: Registry) -> None:
    client, keys = registry.client, registry.keys
    for number in range(HOSTS):
        await scaling.ask(client, keys, f"host-{number}", Scale(replicas=1))
    with pytest.raises(ControlError, match="too many hosts"):
        await scaling.ask(client, keys, "one-more", Scale(replicas=1))
    await scaling.ask(client, keys, "host-3", FOUR)
    assert (await scaling.asked(client, keys))["host-3"] == FOUR


@pytest.mark.foreign_keys("rq's own")
async def test_workers_are_counted_by_host(registry: Registry) -> None:
    hosts = (("gpu-1", 7), ("gpu-1", 8), ("b.example.org", 7), ("b.example.org", 9))
    names = [f"rq:worker:{worker_name(host, pid)}" for host, pid in hosts]
    await registry.client.command("SADD", workers_key(registry.keys.group), *names)
    for name in names[:-1]:  # the last one died, and rq has yet to notice
        await registry.client.command("HSET", name, "last_heartbeat", "2026-11-30T12:00:00.000000Z")
    assert await workers(registry) == {"gpu-1": 2, "b.example.org": 1}
    await registry.client.command("DEL", workers_key(registry.keys.group), *names)
