"""Every rollout that was asked for leaves exactly one row, however it ended, and no replica is asked without one."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from msgspec.structs import replace

from adaptersync.router import ledger
from adaptersync.router.exchange import WHOLE_BYTES
from adaptersync.router.ledger import Ledger
from adaptersync.router.metrics import Metrics
from adaptersync_core.pipe import Pipe
from adaptersync_core.registry import Registry
from adaptersync_core.rollouts import FIELD, OPEN, UNKNOWN, Row, read_rollouts
from support.proxy import Fault, FaultProxy
from support.router_fleet import V1, V2, Fleet, Servers
from support.wait import wait_until


async def test_a_row_says_what_served_it(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        answer = await fleet.complete("run-a", list(range(40)))
        (row,) = await fleet.rows(1)
        assert row["request_id"] == answer.headers["x-adaptersync-request-id"]
        assert row["replica"] == answer.headers["x-adaptersync-replica"]
        expected = {
            "asked": "run-a",
            "run": "run-a",
            "version": V1,
            "digest": "000000000001" + "0" * 52,
            "engine_epoch": f"{row['replica']}-life-1",
            "outcome": "ok",
            "status": "200",
            "routing": "cold",
            "attempts": "1",
            "generation": "1",
            "path": "/v1/completions",
            "prompt_tokens": "20",
            "completion_tokens": "1",
            "cached_tokens": "16",
        }
        assert {name: row[name] for name in expected} == expected
        assert row["router"].startswith("router-0-")
        phases = {name: float(row[name]) for name in ("hold_s", "route_s", "first_byte_s", "total_s")}
        assert 0 <= phases["hold_s"] + phases["route_s"] + phases["first_byte_s"] <= phases["total_s"]


async def test_only_of_a_stream_is_it_known_when_its_first_token_came(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, {"replica-0": fleet.urls["replica-0"]})
    replica = fleet.replicas["replica-0"]
    replica.chunk_gate = asyncio.Semaphore(0)
    async with fleet.router():
        streaming = asyncio.create_task(fleet.complete(V1, stream=True))
        for _ in replica.chunks:  # vLLM says 200 at once, also to what it queues
            await wait_until(lambda: replica.in_flight == 1)
            await asyncio.sleep(0.2)
            replica.chunk_gate.release()
        await streaming
        replica.answer = lambda _: b"[" + b"0," * WHOLE_BYTES + b"0]"  # passed on as it comes, and is no stream
        await fleet.complete(V1)
        streamed, whole = await fleet.rows(2)
        assert float(streamed["first_byte_s"]) < 0.15
        assert 0.2 <= float(streamed["first_token_s"]) < 0.35
        assert float(streamed["total_s"]) >= 0.6
        assert "first_token_s" not in whole
        metrics = (await fleet.get("/metrics")).body.decode()
        assert f'first_token_seconds_count{{replica="replica-0",version="{V1}"}} 1.0' in metrics
        assert 'decode_seconds_count{replica="replica-0"} 1.0' in metrics
        (decode,) = [line for line in metrics.splitlines() if line.startswith("adaptersync_router_decode_seconds_sum")]
        assert 0.4 <= float(decode.rpartition(" ")[2]) < 0.6


async def test_a_row_says_which_name_a_relay_was_asked_for(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        body = {"model": V1, "prompt": [1]}
        await fleet.post("/v1/completions", body, headers={"x-adaptersync-substituted": "trl-policy-v2"})
        await fleet.complete(V1)
        marked, plain = await fleet.rows(2)
        assert (marked["version"], marked["substituted"]) == (V1, "trl-policy-v2")
        assert "substituted" not in plain


async def test_each_request_leaves_one_row(fleet: Fleet) -> None:
    await fleet.tables.record(V2, "retired")
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        await fleet.complete("run-a")
        await fleet.complete("base")
        await fleet.complete(V2)
        await fleet.complete("nobody")
        await fleet.post("/v1/completions", b"{")
        for replica in fleet.replicas.values():
            replica.fail = [500]
        await fleet.complete(V1)
        await fleet.post("/v1/chat/completions", {"model": V1, "messages": [], "stream": True})
        rows = await fleet.rows(7)
        assert [(row["outcome"], row["status"]) for row in rows] == [
            ("ok", "200"),
            ("ok", "200"),
            ("refused", "410"),
            ("refused", "404"),
            ("refused", "400"),
            ("upstream_error", "500"),
            ("ok", "200"),
        ]
        assert len({row["request_id"] for row in rows}) == 7
        assert rows[1]["version"] == "base"
        assert "run" not in rows[1]
        assert rows[2]["asked"] == V2


# opened and closed


async def test_no_replica_is_asked_before_the_row_is_on_disk(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    found = []

    def look(asked: Any) -> bytes:
        (path,) = fleet.spool.glob("*.spool")
        spooled = path.read_bytes()
        for replica in fleet.replicas.values():
            for seen in replica.seen:
                found.append(seen.headers["x-request-id"].encode() in spooled)
                found.append(f'"replica":"{replica.name}"'.encode() in spooled)
        return b"{}"

    for replica in fleet.replicas.values():
        replica.answer = look
    async with fleet.router():
        assert (await fleet.complete(V1)).status == 200
        assert found == [True, True]


async def test_a_long_request_is_told_of_before_it_ends(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "OPEN_S", 0.05)
    await fleet.tables.write({V1: "current"}, fleet.urls)
    for replica in fleet.replicas.values():
        replica.gate.clear()
    async with fleet.router():
        waiting = asyncio.create_task(fleet.complete(V1))
        await wait_until(lambda: _entries(fleet, 1))
        (told,) = await fleet.entries()
        (busy,) = [replica.name for replica in fleet.replicas.values() if replica.in_flight]
        assert (told["outcome"], told["version"], told["replica"]) == (OPEN, V1, busy)
        (meanwhile,) = await read_rollouts(Registry(fleet.control, fleet.keys))
        assert meanwhile.outcome == UNKNOWN
        for replica in fleet.replicas.values():
            replica.gate.set()
        answer = await waiting
        await fleet.rows(1)
    (row,) = await read_rollouts(Registry(fleet.control, fleet.keys))
    assert (row.outcome, row.request_id) == ("ok", answer.headers["x-adaptersync-request-id"])


async def test_a_short_request_leaves_one_entry(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        for _ in range(20):
            await fleet.complete(V1)
        await fleet.rows(20)
        assert not {entry["request_id"] for entry in await fleet.entries() if entry["outcome"] == OPEN}


async def test_a_lost_reply_leaves_a_row_twice_and_it_is_read_once(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    where = urlsplit(fleet.control_url)
    async with FaultProxy(where.hostname or "", where.port or 0) as proxy:
        fleet.control_url = f"redis://127.0.0.1:{proxy.port}/0"
        async with fleet.router():
            proxy.arm(Fault.LOSE_REPLY, match=b"XADD")
            answers = [await fleet.complete(V1) for _ in range(3)]
            await wait_until(lambda: _written(fleet, 3), timeout_s=15.0)
    assert proxy.faults_done == 1
    entries = await fleet.entries()
    assert len(entries) > 3
    asked = [answer.headers["x-adaptersync-request-id"] for answer in answers]
    assert [row.request_id for row in await fleet.joined()] == asked


# the spool


async def test_while_redis_is_away_rows_wait_and_survive_a_stop(own_fleet: Fleet, servers: Servers) -> None:
    fleet = own_fleet
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        await asyncio.to_thread(servers.control.kill)
        for _ in range(5):
            assert (await fleet.complete(V1)).status == 200
    await asyncio.to_thread(servers.control.start)
    async with fleet.router():
        rows = await fleet.rows(5)
        assert {row["outcome"] for row in rows} == {"ok"}
        await wait_until(lambda: _spooled(fleet, 0))
    assert list(fleet.spool.glob("*.spool")) == []


async def test_while_redis_takes_no_writes_rows_wait(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    """It answers each with an error of its own, and goes on answering."""
    await fleet.tables.write({V1: "current"}, fleet.urls)
    with redis.Redis.from_url(fleet.control_url) as control:
        async with fleet.router():
            control.config_set("min-replicas-to-write", 1)
            try:
                answers = [await fleet.complete(V1) for _ in range(3)]
                await wait_until(lambda: "ledger rows wait: Redis refused: NOREPLICAS" in caplog.text)
            finally:
                control.config_set("min-replicas-to-write", 0)
            rows = await fleet.rows(3)
    assert {row["request_id"] for row in rows} == {answer.headers["x-adaptersync-request-id"] for answer in answers}


async def test_when_the_spool_is_full_nothing_more_is_sent_on(own_fleet: Fleet, servers: Servers) -> None:
    fleet = own_fleet
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router(spool_bytes=32_768):
        await asyncio.to_thread(servers.control.kill)
        answers = [await fleet.complete(V1) for _ in range(40)]
        served = [answer for answer in answers if answer.status == 200]
        refused = [answer for answer in answers if answer.status == 503]
        assert len(served) + len(refused) == 40
        assert served
        assert all("spool is full" in answer.message and "Retry-After" in answer.headers for answer in refused)
        assert sum(len(replica.seen) for replica in fleet.replicas.values()) == len(served)
        health = await fleet.get("/health")
        assert (health.status, health.json["reason"]) == (503, "ledger's spool is full: nothing more can be recorded")
        assert (health.json["ledger"]["lost"], health.json["ledger"]["full"]) == (0, True)
        await asyncio.to_thread(servers.control.start)
        await wait_until(lambda: _healthy(fleet), timeout_s=15.0)
        assert (await fleet.complete(V1)).status == 200
    rows = await fleet.joined()
    assert len([row for row in rows if row.outcome == "ok"]) == len(served) + 1
    assert {row.outcome for row in rows} <= {"ok", "refused"}


async def test_serving_may_be_preferred_and_then_the_loss_is_counted(own_fleet: Fleet, servers: Servers) -> None:
    fleet = own_fleet
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router(spool_bytes=32_768, when_spool_full="serve"):
        await asyncio.to_thread(servers.control.kill)
        answers = [await fleet.complete(V1) for _ in range(40)]
        assert {answer.status for answer in answers} == {200}
        health = await fleet.get("/health")
        lost = health.json["ledger"]["lost"]
        assert (health.status, 0 < lost < 40) == (200, True)
        assert f"adaptersync_router_ledger_lost_total {lost}.0".encode() in (await fleet.get("/metrics")).body
        await asyncio.to_thread(servers.control.start)
        await wait_until(lambda: _waiting(fleet, 0), timeout_s=15.0)
    assert len(await fleet.joined()) == 40 - lost


async def test_an_end_that_cannot_be_written_is_lost_and_leaves_the_spool(fleet: Fleet, tmp_path: Path) -> None:
    rows, metrics = Pipe(fleet.control_url, name="test", timeout_s=2.0), Metrics()
    await rows.connect()
    own = await Ledger.at(
        rows, fleet.keys.rollouts, directory=tmp_path, name="test", capacity=65_536, kept=65_536, metrics=metrics
    )
    for number in range(3):
        opened = Row(
            request_id=f"a-{number}", router="test", path="/v1/completions", asked="run", outcome=OPEN, started_at=1.0
        )
        assert own.open(opened)
        own.close(replace(opened, outcome="ok", tried="r" * 4096 if number == 0 else ""), sent=True)
    assert (metrics.counted("ledger_lost"), own.waiting) == (1, 2)
    await own.stop(5.0)
    assert (metrics.counted("ledger_written"), own.waiting) == (2, 0)
    assert not await asyncio.to_thread(lambda: list(tmp_path.glob("*.spool")))  # nothing in it is waited for
    await rows.close()


async def test_entries_of_the_former_form_are_read_and_others_are_counted(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    """Formerly an entry had a field for each of a row's."""
    former = {"request_id": "a-1", "router": "a", "path": "/v1/completions", "asked": "run", "outcome": "ok"}
    former |= {"started_at": "12.500000", "status": "200", "gated": "true", "total_s": "0.250000"}
    for fields in ({"a": "b"}, former, {FIELD: "{"}, {FIELD: "7"}):
        await fleet.control.command("XADD", fleet.keys.rollouts, "*", *chain.from_iterable(fields.items()))
    (row,) = await read_rollouts(Registry(fleet.control, fleet.keys))
    assert (row.started_at, row.status, row.gated, row.total_s) == (12.5, 200, True, 0.25)
    (line,) = [record.getMessage() for record in caplog.records if "cannot be read" in record.getMessage()]
    assert line.startswith("3 ledger entries")


async def test_requests_in_flight_at_the_bound_keep_room_for_their_end(own_fleet: Fleet, servers: Servers) -> None:
    fleet = own_fleet
    await fleet.tables.write({V1: "current"}, fleet.urls)
    for replica in fleet.replicas.values():
        replica.gate.clear()
    async with fleet.router(spool_bytes=65_536):
        await asyncio.to_thread(servers.control.kill)
        asking = [asyncio.create_task(fleet.complete(V1)) for _ in range(60)]
        await wait_until(lambda: sum(task.done() for task in asking) > 20)  # refused; the others are under way
        for replica in fleet.replicas.values():
            replica.gate.set()
        answers = await asyncio.gather(*asking)
        assert (await fleet.get("/health")).json["ledger"]["lost"] == 0
        await asyncio.to_thread(servers.control.start)
        await wait_until(lambda: _waiting(fleet, 0), timeout_s=15.0)
    served = {answer.headers["x-adaptersync-request-id"] for answer in answers if answer.status == 200}
    assert served == {row.request_id for row in await fleet.joined() if row.outcome == "ok"}


# voided versions


async def test_what_is_in_flight_when_its_version_is_voided_ends_marked(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "retained", V2: "current"}, fleet.urls)
    for replica in fleet.replicas.values():
        replica.gate.clear()
    async with fleet.router():
        asking = {version: asyncio.create_task(fleet.complete(version)) for version in (V1, V2)}
        await wait_until(lambda: sum(replica.in_flight for replica in fleet.replicas.values()) == 2)
        await fleet.table({V1: "current", V2: "retiring"}, voided=[V2])
        for replica in fleet.replicas.values():
            replica.gate.set()
        answers = {version: await task for version, task in asking.items()}
        assert {answer.status for answer in answers.values()} == {200}
        assert answers[V2].headers["x-adaptersync-voided"] == "1"
        assert "x-adaptersync-voided" not in answers[V1].headers
        rows = {row["version"]: row for row in await fleet.rows(2)}
        assert (rows[V2]["outcome"], rows[V2]["voided"]) == ("ok", "true")
        assert "voided" not in rows[V1]
        assert (await fleet.complete(V2)).status == 410  # nothing new is admitted


async def test_a_stream_that_began_before_the_voiding_is_marked_in_the_ledger(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    for replica in fleet.replicas.values():
        replica.chunk_gate = asyncio.Semaphore(1)
    async with fleet.router() as url:
        body = {"model": V1, "prompt": [1], "stream": True}
        async with fleet.session.post(url + "/v1/completions", json=body) as answer:
            assert await answer.content.readany() == b"data: one\n\n"
            assert "x-adaptersync-voided" not in answer.headers
            await fleet.table({V1: "retiring", V2: "current"}, voided=[V1])
            for replica in fleet.replicas.values():
                for _ in range(10):
                    replica.chunk_gate.release()
            await answer.content.read()
        (row,) = await fleet.rows(1)
        assert (row["outcome"], row["voided"]) == ("ok", "true")


async def test_rows_that_ended_before_their_version_was_voided_are_read_as_voided(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        await fleet.complete(V1)
        await fleet.complete("base")
        await fleet.rows(2)
    registry = Registry(fleet.control, fleet.keys)
    assert [row.voided for row in await read_rollouts(registry)] == [False, False]
    await fleet.tables.record(V1, "voided", "answers nonsense")
    assert [row.voided for row in await read_rollouts(registry)] == [True, False]


# labels


async def test_what_stands_for_another_version_says_so(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    body = {"model": V1, "prompt": [1]}
    async with fleet.router():
        for label in ("trl-policy-v7", "x" * 500, "é\udcff"):
            headers = {"x-adaptersync-substituted": label.encode(errors="surrogateescape").decode("latin-1")}
            assert (await fleet.post("/v1/completions", body, headers=headers)).status == 200
        assert (await fleet.complete(V1)).status == 200
        rows = await fleet.rows(4)
        assert rows[0]["substituted"] == "trl-policy-v7"
        assert len(rows[1]["substituted"]) == 128
        assert rows[2]["substituted"]
        assert "substituted" not in rows[3]
    seen = [one.headers for replica in fleet.replicas.values() for one in replica.seen]
    assert not any("x-adaptersync-substituted" in headers for headers in seen)


async def test_a_version_at_the_gate_is_for_whoever_has_its_token(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current", V2: "ready"}, fleet.urls)
    body = {"model": V2, "prompt": [1]}
    async with fleet.router(gate_token="sesame", hold_s=0.05):
        for headers in ({}, {"x-adaptersync-gate": ""}, {"x-adaptersync-gate": "sesam"}, {"x-adaptersync-gate": "é"}):
            assert (await fleet.post("/v1/completions", body, headers=headers)).status == 503
        opened = {"x-adaptersync-gate": "sesame"}
        answer = await fleet.post("/v1/completions", body, headers=opened)
        assert (answer.status, answer.headers["x-adaptersync-version"]) == (200, V2)
        current = await fleet.post("/v1/completions", {"model": "run-a", "prompt": [1]}, headers=opened)
        assert current.headers["x-adaptersync-version"] == V1
        rows = await fleet.rows(6)
        assert [row.get("gated") for row in rows] == [None] * 4 + ["true"] * 2
    seen = [one.headers for replica in fleet.replicas.values() for one in replica.seen]
    assert len(seen) == 2
    assert not any("x-adaptersync-gate" in headers for headers in seen)


async def test_without_a_token_nobody_passes_the_gate(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current", V2: "ready"}, fleet.urls)
    async with fleet.router(hold_s=0.05):
        for token in ("", "None", "sesame"):
            headers = {"x-adaptersync-gate": token}
            answer = await fleet.post("/v1/completions", {"model": V2, "prompt": [1]}, headers=headers)
            assert answer.status == 503


async def _entries(fleet: Fleet, count: int) -> bool:
    return len(await fleet.entries()) >= count


async def _ledger(fleet: Fleet) -> dict[str, Any]:
    return (await fleet.get("/health")).json["ledger"]  # type: ignore[no-any-return]


async def _written(fleet: Fleet, count: int) -> bool:
    return bool((await _ledger(fleet))["written"] >= count)


async def _waiting(fleet: Fleet, count: int) -> bool:
    return bool((await _ledger(fleet))["waiting"] == count)


async def _spooled(fleet: Fleet, count: int) -> bool:
    return bool((await _ledger(fleet))["spool_bytes"] == count)


async def _healthy(fleet: Fleet) -> bool:
    return (await fleet.get("/health")).status == 200


async def test_rollouts_are_numbered_without_a_gap(fleet: Fleet) -> None:
    """So that the ledger tells whether it lacks any; what leaves no row is counted apart."""
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        for _ in range(2):
            await fleet.complete("run-a", [1, 2])
            tokenized = await fleet.post("/tokenize", {"model": "run-a", "prompt": "x"})
            assert tokenized.headers["x-adaptersync-request-id"].partition("-")[2].startswith("t")
        rows = await fleet.rows(2)
    (life,) = {row["request_id"].partition("-")[0] for row in rows}
    assert sorted(row["request_id"] for row in rows) == [f"{life}-1", f"{life}-2"]


async def test_a_row_knows_its_prompt_by_its_digest(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        for body in (
            b'{"model": "run-a", "prompt": [1, 2],  "max_tokens": 1}',
            b'{"prompt":[1, 2],"model":"run-a","max_tokens":1,"seed":7}',
        ):
            await fleet.post("/v1/completions", body)
        await fleet.post("/v1/chat/completions", b'{"model": "run-a", "messages": [{"role": "user", "content": "x"}]}')
        rows = await fleet.rows(3)
    assert [row["prompt"] for row in rows] == [
        sha256(text).hexdigest()[:32] for text in (b"[1, 2]", b"[1, 2]", b'[{"role": "user", "content": "x"}]')
    ]
