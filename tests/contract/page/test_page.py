"""What a coordinator's page answers: the fleet as a document, events as a stream, nothing to those it is not for."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from adaptersync.coordinator.app import _coordinate
from adaptersync.coordinator.page import server
from adaptersync.coordinator.page.server import FILES, STATIC, serve_page
from adaptersync.coordinator.recent import Happened
from adaptersync_core.api_keys import new_key
from adaptersync_core.config import Config, CoordinatorSection, PageSection, RedisSection, StoreSection
from adaptersync_core.errors import ControlUnavailable
from adaptersync_tools.cli import main
from adaptersync_tools.up import free_ports
from support.page import HOSTILE, V1, V2, Serve, Served, populate
from support.wait import wait_until


def settled(document: Any) -> Any:
    """Without what goes on with the time."""
    if isinstance(document, dict):
        return {name: settled(value) for name, value in document.items() if not name.endswith("_s")}
    return [settled(each) for each in document] if isinstance(document, list) else document


async def test_the_document_is_what_status_says_and_more(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await populate(served)
    status, told = await served.get("/api/fleet")
    assert status == 200
    monkeypatch.setenv("ADAPTERSYNC_REDIS__CONTROL_URL", served.config.redis.control_url)
    monkeypatch.setenv("ADAPTERSYNC_GROUP__NAME", "group")
    assert await asyncio.to_thread(main, ["status", "--json"]) == 1
    said = orjson.loads(capsys.readouterr().out)
    assert settled(told) | settled(said) == settled(told)
    assert told["problems"]
    assert (told["leader"], told["told_by"]) == ("coordinator-0", "coordinator-1")
    assert [each["version"] for each in told["versions"]] == [V2, V1]
    assert [cell.get("state") for cell in told["matrix"]["replica-0"]] == ["held", "held"]
    assert told["matrix"]["replica-1"][0] == {"state": "refused", "verdict": "refuted", "reason": HOSTILE}
    assert told["traffic"]["at"] == {"replica-0": 3}

    async def next_point() -> bool:
        nonlocal told
        _, told = await served.get("/api/fleet")
        return bool(told["series"]["in_flight"][-1] == 3)

    await wait_until(next_point)
    _, later = await served.get(f"/api/fleet?since={told['series']['at'][-1]}")
    assert all(line == [] for line in later["series"].values())


async def test_many_who_ask_are_one_look(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    fleet = served.registry.fleet

    async def counted(*arguments: Any) -> Any:
        nonlocal looks
        looks += 1
        return await fleet(*arguments)

    await served.get("/api/fleet")
    monkeypatch.setattr(served.registry, "fleet", counted)
    answers = await asyncio.gather(*(served.get("/api/fleet") for _ in range(40)))
    assert {status for status, _ in answers} == {200}
    assert looks <= 2


async def test_a_server_that_is_away_is_said(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away() -> Any:
        raise ControlUnavailable("Redis cannot be reached", next_step="check the server")

    monkeypatch.setattr(served.page.observer, "overview", lambda **_more: away())
    status, told = await served.get("/api/fleet")
    assert (status, told) == (503, {"error": "Redis cannot be reached; check the server"})


# the stream


async def read(answer: aiohttp.ClientResponse, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(10):
        while len(found) < count:
            line = await answer.content.readline()
            if line.startswith(b"data: "):
                found.append(orjson.loads(line[6:]))
    return found


async def test_events_come_as_they_happen_and_what_was_missed_first(served: Served) -> None:
    entries = [await served.happen(f"reason {place}") for place in range(3)]
    await wait_until(lambda: len(served.page.observer.recent.events) >= 3)
    async with served.session.get(f"{served.url}/api/events", headers={"Last-Event-ID": entries[0]}) as answer:
        assert answer.content_type == "text/event-stream"
        assert [each["id"] for each in await read(answer, 2)] == entries[1:]
        entry = await served.happen(HOSTILE)
        (told,) = await read(answer, 1)
        assert (told["id"], told["type"], told["subject"]) == (entry, "replica.state", "replica-1")
        assert HOSTILE in told["text"]
    await wait_until(lambda: not served.page.streams.listeners, what="the listener has left")


async def cut_off(served: Served) -> None:
    """Every connection but the one that says so; and they come again after a moment."""
    await served.registry.client.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


async def test_what_happened_while_the_server_was_away_is_told_once_it_is_back(served: Served) -> None:
    first = await served.happen("before")
    await wait_until(lambda: [event.id for event in served.page.observer.recent.events] == [first])
    async with served.session.get(f"{served.url}/api/events") as answer:
        await cut_off(served)
        entries = [await served.happen(f"meanwhile {place}") for place in range(2)]
        assert [each["id"] for each in await read(answer, 2)] == entries


async def test_events_of_a_life_that_redis_lost_are_forgotten(served: Served) -> None:
    await served.happen("of the former life")
    await wait_until(lambda: len(served.page.observer.recent.events) == 1)
    await served.registry.client.command("DEL", served.registry.keys.events)
    await served.registry.client.command("XADD", served.registry.keys.events, "5-1", "type", "control.restored")
    await cut_off(served)
    await wait_until(lambda: [event.id for event in served.page.observer.recent.events] == ["5-1"])


async def test_no_more_look_on_than_may_be(serve: Serve) -> None:
    async with serve(clients=1) as served, served.session.get(f"{served.url}/api/events") as answer:
        await answer.content.readline()
        status, told = await served.get("/api/events")
        assert (status, told) == (503, {"error": "as many look on as may be (page.clients)"})


async def test_who_does_not_read_along_is_dropped_and_others_are_served(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "WRITE_S", 0.3)
    host, port = served.url.removeprefix("http://").split(":")
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.to_thread(lazy.connect, (host, int(port)))
        lazy.send(f"GET /api/events HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        await wait_until(lambda: len(served.page.streams.listeners) == 1)
        (listener,) = served.page.streams.listeners
        fields = {"type": "replica.state", "reason": "x" * 16_000}
        for place in range(600):  # more than a kernel keeps for one, and than it may be behind
            served.page.streams.tell([Happened(id=f"{place}-0", at=0.0, type="replica.state", fields=fields)])
            await asyncio.sleep(0)
        assert (await served.get("/api/fleet"))[0] == 200
        await wait_until(lambda: not served.page.streams.listeners)
        assert listener.dropped


# the door


@pytest.mark.parametrize("host", ["127.0.0.1:1", "localhost", "[::1]:80", "10.1.2.3", "fleet.example:8443"])
async def test_addresses_and_names_that_are_listed_are_let_in(serve: Serve, host: str) -> None:
    async with serve(hosts=("fleet.example",)) as served:
        assert (await served.get("/api/fleet", headers={"Host": host}))[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "a[b", ""])
async def test_a_name_of_somebody_else_is_refused(served: Served, host: str) -> None:
    for path in ("/", "/api/fleet", "/api/events"):
        assert (await served.get(path, headers={"Host": host}))[0] == 421


async def test_every_answer_is_guarded(served: Served) -> None:
    for path in (*FILES, "/api/fleet", "/nowhere", "/api/fleet?since=x", "/vendor/../server.py"):
        async with served.session.get(served.url + path) as answer:
            policy = answer.headers["Content-Security-Policy"]
            assert answer.status in (200, 404, 400), path
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "script-src 'self';" in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


async def test_a_file_that_is_known_is_not_sent_again(served: Served) -> None:
    async with served.session.get(f"{served.url}/uPlot.js") as answer:
        assert answer.content_type == "text/javascript"
        tag = answer.headers["ETag"]
    async with served.session.get(f"{served.url}/uPlot.js", headers={"If-None-Match": tag}) as answer:
        assert (answer.status, await answer.read()) == (304, b"")


def test_the_page_takes_nothing_from_elsewhere_and_writes_no_markup() -> None:
    page = (STATIC / "page.html").read_text()
    assert re.findall(r"<script[^>]*>[^<]|<style|\son\w+=|style=", page) == []
    assert set(re.findall(r'(?:src|href)="([^"]+)"', page)) - {"/api/fleet"} <= set(FILES)
    for name in ("page.js", "draw.js"):
        script = (STATIC / name).read_text()
        assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", script) == []
        assert set(re.findall(r"https?://[^\"'` ]+", script)) <= {"http://www.w3.org/2000/svg"}


def test_what_is_not_ours_says_whose_it_is() -> None:
    vendor = STATIC / "vendor"
    assert "MIT License" in (vendor / "uPlot.LICENSE").read_text()
    (version,) = re.findall(rb"uPlot \(v([\d.]+)\)", (vendor / "uPlot.iife.min.js").read_bytes())
    assert f"uPlot {version.decode()} (MIT" in (vendor / "README.md").read_text()


# requests


async def ask(served: Served, key: str | None, **fields: Any) -> tuple[int, Any]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = {"kind": "rollback", "run": "run-a", "reason": "fell", "current": V2} | fields
    async with served.session.post(f"{served.url}/api/requests", headers=headers, json=body) as answer:
        return answer.status, await answer.json()


async def test_a_page_without_keys_is_read_only(served: Served) -> None:
    assert await served.get("/api/requests") == (200, {"open": False})
    assert (await ask(served, "anything"))[0] == 403
    assert (await served.registry.fleet()).requests == {}


async def test_who_has_a_key_for_it_may_ask(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    admins, admin = new_key("ada", ["admin"])
    other, rollout = new_key("client", ["rollout", "publish"])
    file.write_text(admin.line() + rollout.line())
    async with serve(keys_file=str(file)) as served:
        assert await served.get("/api/requests") == (200, {"open": True})
        for wrong in (None, "", "other", admin.sha256.hex()):
            assert (await ask(served, wrong))[0] == 401
        assert (await ask(served, other))[0] == 403
        assert (await ask(served, admins, kind="format the disk"))[0] == 400
        assert (await served.registry.fleet()).requests == {}
        status, told = await ask(served, admins)
        assert status == 202
        (request,) = (await served.registry.fleet()).requests.items()
        assert request[0] == told["request"]
        assert (request[1].kind, request[1].current, request[1].reason) == ("rollback", V2, "fell")
        file.write_text(rollout.line())
        assert (await ask(served, admins))[0] == 401  # taken back, at once
        file.unlink()
        assert await ask(served, admins) == (500, {"error": "keys cannot be read: the coordinator's log says why"})


async def test_a_key_is_in_no_log(serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    key, kept = new_key("ada", ["admin"])
    file.write_text(kept.line())
    caplog.set_level(logging.DEBUG)
    async with serve(keys_file=str(file)) as served:
        assert (await ask(served, key))[0] == 202
        assert (await ask(served, f"{key}-wrong"))[0] == 401
    assert "ada asks through the page: rollback of run run-a" in caplog.text
    assert key not in caplog.text


# beside the coordinator


def settings(redis_url: str, tmp_path: Path, name: str, port: int) -> Config:
    return Config(
        redis=RedisSection(control_url=redis_url),
        store=StoreSection(path=str(tmp_path)),
        coordinator=CoordinatorSection(name=name),
        page=PageSection(port=port),
    )


async def get(port: int) -> Any:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/api/fleet") as answer:
        return await answer.json()


async def answers(port: int) -> bool:
    try:
        return bool((await get(port))["leader"])
    except (aiohttp.ClientError, KeyError):
        return False


async def test_every_coordinator_has_one_and_says_who_leads(redis_url: str, tmp_path: Path) -> None:
    ports = free_ports(2)
    configs = [settings(redis_url, tmp_path, f"coordinator-{n}", port) for n, port in enumerate(ports)]
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(_coordinate(config)) for config in configs]
        for port in ports:
            await wait_until(lambda port=port: answers(port), timeout_s=15.0)  # type: ignore[misc]
        told = [await get(port) for port in ports]
        assert [each["told_by"] for each in told] == ["coordinator-0", "coordinator-1"]
        (leader,) = {each["leader"] for each in told}
        assert leader in ("coordinator-0", "coordinator-1")
        for task in running:
            task.cancel()


async def test_a_port_that_is_taken_stops_nobody(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "RETRY_S", 0.02)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        task = asyncio.create_task(serve_page(settings(redis_url, tmp_path, "coordinator-0", port)))
        await wait_until(lambda: "page cannot be served" in caplog.text)

    async def is_back() -> bool:
        try:
            return bool((await get(port))["told_by"])
        except aiohttp.ClientError:
            return False

    await wait_until(is_back)
    assert caplog.text.count("page cannot be served") == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
