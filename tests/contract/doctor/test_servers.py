"""Findings of `adaptersync doctor` about its two servers, each provoked on real ones."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
from msgspec.structs import replace

from adaptersync_core.keys import Keys
from adaptersync_core.redis import RedisClient
from adaptersync_tools.doctor import Verdict, servers
from support.doctor import Host, changed, look, said


@pytest.mark.parametrize(
    ("which", "settings", "what", "level"),
    [
        ("control", {"maxmemory_policy": "allkeys-lru"}, "it evicts what must not be lost", "error"),
        ("control", {"appendonly": "no"}, "it loses what was decided when it ends", "error"),
        ("control", {"appendfsync": "everysec"}, "in the last second may be lost", "warning"),
        ("control", {"maxmemory": "0"}, "its memory is not bounded", "warning"),
        ("control", {"maxmemory": "1100000"}, "MiB are taken", "error"),
        ("cache", {"maxmemory_policy": "noeviction"}, "at its bound it refuses bytes and choices", "error"),
        ("cache", {"maxmemory_policy": "allkeys-lru"}, "it may forget counts that are in use", "warning"),
        ("cache", {"appendonly": "yes"}, "it writes to disk what may be forgotten", "warning"),
    ],
)
async def test_a_server_is_set_up_wrongly(
    well: Host, which: str, settings: dict[str, str], what: str, level: str
) -> None:
    server = well.control if which == "control" else well.cache
    async with changed(server, **settings):
        findings = await look(well.config)
        assert said(findings, what, level)
        assert {finding.about for finding in findings} == {f"{which} server"}


async def test_a_server_is_away(well: Host) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{nobody.getsockname()[1]}/0"
        redis = replace(well.config.redis, control_url=url)
        assert said(await look(replace(well.config, redis=redis)), "Redis cannot be reached")


async def test_one_server_does_for_both(well: Host) -> None:
    redis = replace(well.config.redis, cache_url="")
    assert said(await look(replace(well.config, redis=redis)), "it is the control server", "warning")


@pytest.mark.parametrize(
    ("rules", "what", "level"),
    [
        (("-get",), "this user may not read its keys", "error"),
        (("-hgetall",), "this user may not read records", "error"),
        (("-xrevrange",), "this user may not follow events", "error"),
        (("-evalsha", "-eval"), "this user may not run scripts", "error"),
        (("-time",), "its clock cannot be read", "error"),
        (("-info",), "it does not say how it is set up", "warning"),
        (("-config",), "", ""),
    ],
)
async def test_a_user_lacks_a_right(well: Host, rules: tuple[str, ...], what: str, level: str) -> None:
    client = RedisClient(well.control.url, name="test")
    try:
        await client.command("ACL", "SETUSER", "half", "reset", "on", ">secret", "~*", "+@all", *rules)
        url = well.control.url.replace("redis://", "redis://half:secret@")
        found = await look(replace(well.config, redis=replace(well.config.redis, control_url=url)))
        assert said(found, what, level) if what else found == []
        assert "secret" not in "".join(map(str, found))
    finally:
        await client.command("ACL", "DELUSER", "half")
        await client.close()


@pytest.mark.parametrize("off_s", [-90.0, 90.0])
async def test_a_clock_is_wrong(well: Host, off_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    monkeypatch.setattr(servers.time, "time", lambda: real() + off_s)  # type: ignore[attr-defined]
    found = [finding for finding in await look(well.config) if "its clock is" in finding.what]
    assert [finding.about for finding in found] == ["control server", "cache server"]
    assert ("behind" if off_s > 0 else "ahead of") in found[0].what


async def test_a_server_is_far_away(well: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "FAR_S", 0.0)
    assert said((await look(well.config))[:1], "an answer takes", "warning")


def test_a_server_is_too_old_or_has_a_full_disk() -> None:
    for told, fine in (
        ({"redis_version": "6.2.14"}, False),
        ({"redis_version": "7.0.15"}, True),
        ({"redis_version": "10.1.0"}, True),
        ({"redis_version": "7.2.4", "valkey_version": "7.2.8"}, False),
        ({"redis_version": "7.2.4", "valkey_version": "8.0.1"}, True),
    ):
        verdict = Verdict()
        servers._version(verdict, "control server", told)
        assert verdict.well == fine
        assert fine or said(verdict.findings, "it is too old")


async def test_a_write_to_disk_failed(well: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    told = servers._told

    async def failed(*arguments: Any) -> dict[str, str]:
        return {**await told(*arguments), "aof_last_write_status": "err"}

    monkeypatch.setattr(servers, "_told", failed)
    assert said(await look(well.config), "its last write to disk failed")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://far:6379/0", {"without encryption": "warning", "without a password": "error"}),
        ("redis://u:p@far:6379/0", {"without encryption": "warning"}),
        ("rediss://u:p@far:6379/0", {}),
        ("redis://127.0.0.1:6379/0", {}),
    ],
)
async def test_a_server_for_everybody(
    well: Host, url: str, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "RedisClient", lambda _url, **more: RedisClient(well.control.url, **more))
    verdict = Verdict()
    await servers._server(verdict, "control server", url, Keys("group"))
    assert len(verdict.findings) == len(expected)
    assert all(said(verdict.findings, what, level) for what, level in expected.items())
