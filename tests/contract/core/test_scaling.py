"""What hosts are asked to run, as Redis keeps it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from adaptersync.coordinator.observer import workers
from adaptersync_core import scaling
from adaptersync_core.errors import ControlError
from adaptersync_core.queue import worker_name, workers_key
from adaptersync_core.registry import Registry
from adaptersync_core.scaling import HOSTS, UP, Scale
from adaptersync_tools.cli import main
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
    with pytest.MonkeyPatch.context() as patched:
        trips: list[object] = []
        for way in ("command", "pipeline"):
            patched.setattr(registry.client, way, counted(getattr(registry.client, way), trips))
        assert await workers(registry) == {"gpu-1": 2, "b.example.org": 1}
    assert len(trips) == 2  # however many there are
    await registry.client.command("DEL", workers_key(registry.keys.group), *names)


def counted(call: Callable[..., Any], calls: list[object]) -> Callable[..., Any]:
    def counting(*arguments: object) -> Any:
        calls.append(arguments)
        return call(*arguments)

    return counting


def test_what_is_to_be_run_on_another_host_is_refused_there_no_more_than_here(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ADAPTERSYNC_REDIS__CONTROL_URL", redis_url)
    monkeypatch.delenv("ADAPTERSYNC_CONFIG", raising=False)
    assert main(["scale", "1", "--host", "gpu-2.example.org", "--force"]) == 0
    assert capsys.readouterr().out.rstrip().endswith(": adaptersync scale 1 --force")
