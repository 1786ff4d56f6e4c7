"""Replicas that fail, servers that are killed: what the client then sees."""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp
import pytest

from adaptersync.router import exchange
from support.raw_server import Script, Talk, answering, raw_server
from support.router_fleet import V1, V2, V3, Fleet, Servers, free_port
from support.wait import wait_until

LONG = list(range(64))  # four blocks


async def test_a_dead_replica_is_replaced(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        await fleet.complete(V1, LONG)
        owner = next(replica for replica in fleet.replicas.values() if replica.seen)
        other = next(replica for replica in fleet.replicas.values() if replica is not owner)
        await owner.stop()
        for _ in range(5):
            answer = await fleet.complete(V1, LONG)
            assert (answer.status, answer.headers["x-adaptersync-replica"]) == (200, other.name)
        rows = await fleet.rows(6)
        assert rows[1]["attempts"] == "2"
        assert rows[5]["attempts"] == "1"  # left out for a moment, and the other owns the prompt by now
        health = await fleet.get("/health")
        assert health.json["replicas"][owner.name]["reason"].startswith("left out by this router, asked again in ")


@pytest.mark.parametrize("status", [500, 503, 507, 999, 302, 204, 200])
async def test_a_replica_that_fails_or_answers_nothing_is_replaced_and_left_out_when_it_goes_on(
    fleet: Fleet, status: int
) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        await fleet.complete(V1, LONG)
        owner = next(replica for replica in fleet.replicas.values() if replica.seen)
        owner.fail = [status] * 3
        for number in range(100):
            answer = await fleet.complete(V1, [number] * 64)
            assert answer.status == 200
            if not owner.fail:
                break
        assert answer.headers["x-adaptersync-replica"] != owner.name
        said = (await fleet.get("/health")).json["replicas"][owner.name]
        assert (said["circuit"], f"replica answered {status}" in said["reason"]) == ("open", True)


@pytest.mark.parametrize("head", [b"content-length: 0", b"transfer-encoding: chunked"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_success_with_nothing_in_it_is_no_answer(fleet: Fleet, head: bytes, streamed: bool) -> None:
    said = b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n" + (b"0\r\n\r\n" if b"chunked" in head else b"")
    async with raw_server(answering(said)) as raw:
        await fleet.tables.write({V1: "current"}, {"replica-0": raw.url})
        async with fleet.router():
            answer = await fleet.complete(V1, stream=streamed)
            assert (answer.status, answer.json["error"]["type"]) == (502, "upstream_error")
            assert "replica answered 200 with nothing in it" in answer.message
            (row,) = await fleet.rows(1)
            assert (row["outcome"], row["status"]) == ("upstream_error", "502")


async def test_a_redirect_is_neither_followed_nor_passed_on(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    for replica in fleet.replicas.values():
        replica.fail = [302]
    async with fleet.router():
        answer = await fleet.complete(V1)
        assert (answer.status, "Location" in answer.headers) == (502, False)
        assert "replica answered 302, which answers nothing" in answer.message
        assert answer.message.endswith("; see what listens at the replica's address")
        (row,) = await fleet.rows(1)
        assert (row["outcome"], row["status"], row["attempts"]) == ("upstream_error", "502", "2")


async def test_when_all_fail_the_last_ones_status_and_words_are_passed_on_in_our_form(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    for replica in fleet.replicas.values():
        replica.fail = [500] * 10
    async with fleet.router():
        answer = await fleet.complete(V1)
        assert answer.status == 500
        (row,) = await fleet.rows(1)
        assert (row["outcome"], row["attempts"]) == ("upstream_error", "2")
        assert answer.json["error"] == {
            "message": "no replica could answer: replica answered 500: EngineCore encountered an issue "
            f"(request={row['request_id']} replica={row['replica']} version={V1}); see the replica's log",
            "type": "api_error",
            "code": "unroutable",
            "param": None,
        }
        assert answer.headers["x-adaptersync-request-id"] == row["request_id"]
        assert sum(len(replica.seen) for replica in fleet.replicas.values()) == 2


async def test_words_that_do_not_end_leave_the_status(fleet: Fleet) -> None:
    async with raw_server(answering(b"HTTP/1.1 500 Oh\r\ncontent-length: 900\r\n\r\nhalf of")) as raw:
        await fleet.tables.write({V1: "current"}, {"replica-0": raw.url})
        async with fleet.router():
            for _ in range(2):
                answer = await fleet.complete(V1)
                assert (answer.status, "replica answered 500 (" in answer.message) == (500, True)
            # each has failed once, and not in two ways
            assert (await fleet.get("/health")).json["replicas"]["replica-0"]["circuit"] == "closed"


@pytest.mark.parametrize("status", [400, 404, 429])
@pytest.mark.parametrize("chunked", [False, True])
async def test_what_is_wrong_with_a_request_is_passed_on_at_any_length(
    fleet: Fleet, status: int, chunked: bool
) -> None:
    """vLLM repeats what it cannot take: twenty thousand token ids come back twice."""
    said = b'{"error":{"message":"%b"}}' % (b"40000, " * 100_000)
    coded = b"%x\r\n%b\r\n0\r\n\r\n" % (len(said), said)
    head = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % len(said)
    answers = [b"HTTP/1.1 %d Oh\r\n%b\r\n\r\n%b" % (status, head, coded if chunked else said)] * 9
    async with raw_server(answering(*answers)) as one, raw_server(answering(*answers)) as other:
        await fleet.tables.write({V1: "current"}, {"replica-0": one.url, "replica-1": other.url})
        async with fleet.router():
            for number in range(3):
                answer = await fleet.complete(V1, [number] * 64)
                assert (answer.status, answer.body == said) == (status, True)
                assert answer.headers["x-adaptersync-version"] == V1
            assert len(one.requests) + len(other.requests) == 3 * (2 if status == 429 else 1)
            assert {(row["status"], row["outcome"]) for row in await fleet.rows(3)} == {(str(status), "refused")}
            health = (await fleet.get("/health")).json
            assert {each["circuit"] for each in health["replicas"].values()} == {"closed"}


def half_said(status: int) -> Script:
    """A replica whose error stops in the middle."""

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.say(b"HTTP/1.1 %d Oh\r\ncontent-length: 900\r\n\r\nhalf of" % status)
        await talk.reader.read()

    return script


async def test_an_error_that_stops_in_the_middle_is_not_waited_for(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "SAID_S", 0.2)
    async with raw_server(half_said(404)) as raw:
        await fleet.tables.write({V1: "current"}, fleet.urls | {"replica-0": raw.url})
        async with fleet.router():
            asking = asyncio.gather(*(fleet.complete(V1, [number] * 64) for number in range(8)))
            answers = await asyncio.wait_for(asking, 10)
            assert {(each.status, each.headers["x-adaptersync-replica"]) for each in answers} == {(200, "replica-1")}
            assert raw.requests


async def test_nor_are_the_words_of_the_last_that_fails(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "SAID_S", 0.2)
    async with raw_server(half_said(500)) as raw:
        await fleet.tables.write({V1: "current"}, {"replica-0": raw.url})
        async with fleet.router():
            answer = await asyncio.wait_for(fleet.complete(V1), 10)
            assert (answer.status, "replica answered 500 (" in answer.message) == (500, True)


async def test_when_nobody_can_be_reached_it_says_so(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    for replica in fleet.replicas.values():
        await replica.stop()
    async with fleet.router():
        answer = await fleet.complete(V1)
        assert answer.status == 503
        assert "Retry-After" in answer.headers
        (row,) = await fleet.rows(1)
        tried = "replica-0 unreachable, replica-1 unreachable"  # in any order, and three times more in case one is back
        assert (row["outcome"], row["attempts"]) == ("upstream_error", "5")
        assert sorted(row["tried"].split(", ")[:2]) == tried.split(", ")
        assert (await fleet.get("/health")).status == 503
        await wait_until(lambda: _idle(fleet))


async def test_whoever_died_together_costs_no_request_its_attempts(fleet: Fleet) -> None:
    dead = {f"dead-{place}": f"http://127.0.0.1:{free_port()}" for place in range(5)}
    await fleet.tables.write({V1: "current"}, dead | {"replica-0": fleet.urls["replica-0"]})
    async with fleet.router():
        answers = await asyncio.gather(*(fleet.complete(V1, [number] * 64) for number in range(20)))
        assert {answer.status for answer in answers} == {200}


async def test_a_client_that_reads_too_slowly_is_not_the_replicas_fault(fleet: Fleet) -> None:
    for replica in fleet.replicas.values():
        replica.chunks = [b"data: " + b"x" * 65536 + b"\n\n"] * 400  # more than there is room for on the way
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router(request_timeout_s=1.0) as url, contextlib.AsyncExitStack() as stack:
        body = {"model": V1, "prompt": [1], "stream": True}
        posts = [fleet.session.post(url + "/v1/completions", json=body) for _ in range(6)]
        answers = [await stack.enter_async_context(post) for post in posts]  # their heads: nothing is read on
        await wait_until(lambda: not any(replica.in_flight for replica in fleet.replicas.values()))
        for answer in answers:
            with pytest.raises(aiohttp.ClientPayloadError):  # so it is not taken for the whole
                await answer.read()
        for row in await fleet.rows(6):
            assert (row["outcome"], row["status"]) == ("client_gone", "499")
            assert row["reason"] == "client took the answer too slowly for the time that it had"
        health = (await fleet.get("/health")).json
        assert {replica["circuit"] for replica in health["replicas"].values()} == {"closed"}


async def test_a_replica_without_the_version_is_left_out_and_the_client_hears_nothing(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "retained", V2: "current"}, fleet.urls)
    async with fleet.router():
        await fleet.complete(V1, LONG)
        owner = next(replica for replica in fleet.replicas.values() if replica.seen)
        owner.seen.clear()
        owner.holds = {V2, "base"}
        answers = await asyncio.gather(*(fleet.complete(V1, LONG) for _ in range(3)))
        answers += [await fleet.complete(V1, LONG) for _ in range(3)]
        assert {answer.status for answer in answers} == {200}
        assert len([seen for seen in owner.seen if seen.json["model"] == V1]) <= 3  # none after the first 404
        owner.seen.clear()
        await fleet.complete(V1, LONG)
        assert not owner.seen
        text = (await fleet.get("/metrics")).body.decode()
        assert f'missing_version_total{{replica="{owner.name}"}}' in text
        # it still serves what it has
        for replica in fleet.replicas.values():
            if replica is not owner:
                replica.fail = [503]
        assert (await fleet.complete(V2, LONG)).headers["x-adaptersync-replica"] == owner.name


async def test_when_no_replica_has_the_version_it_is_503_not_404(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    for replica in fleet.replicas.values():
        replica.holds = {"base"}
    async with fleet.router(hold_s=0.3):
        for _ in range(2):
            answer = await fleet.complete(V1)
            assert answer.status == 503
            assert "Retry-After" in answer.headers
        assert sum(len(replica.seen) for replica in fleet.replicas.values()) == 2


async def test_an_answer_cut_in_the_middle_is_not_passed_as_whole(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    for replica in fleet.replicas.values():
        replica.cut_after = 1
    async with fleet.router() as url:
        body = {"model": V1, "prompt": [1], "stream": True}
        async with fleet.session.post(url + "/v1/completions", json=body) as answer:
            assert await answer.content.readany() == b"data: one\n\n"
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.content.read()
        (row,) = await fleet.rows(1)
        assert (row["outcome"], row["attempts"]) == ("upstream_error", "1")


async def test_a_replica_that_never_answers_is_given_up(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    for replica in fleet.replicas.values():
        replica.gate.clear()
    async with fleet.router(request_timeout_s=0.3):
        answer = await fleet.complete(V1)
        assert answer.status == 504
        await wait_until(lambda: sum(replica.aborted for replica in fleet.replicas.values()) == 1)


async def test_a_request_has_one_deadline_however_long_it_is_held_and_whoever_is_asked(fleet: Fleet) -> None:
    """Held for a part of it, at one replica for another: the last one has what is left, and is not blamed."""
    await fleet.tables.write({V1: "staging"}, fleet.urls)
    for replica in fleet.replicas.values():
        replica.gate.clear()
    async with fleet.router(request_timeout_s=3.0):
        asking = [asyncio.create_task(fleet.complete("run-a", LONG)) for _ in range(3)]
        await asyncio.sleep(1.0)
        await fleet.table({V1: "current"})
        await wait_until(lambda: sum(replica.in_flight for replica in fleet.replicas.values()) == 3)
        first, last = sorted(fleet.replicas.values(), key=lambda replica: -replica.in_flight)
        assert first.in_flight == 3
        await asyncio.sleep(1.0)
        silent = {"state": "ejected", "reason": "silent: no heartbeat for 3.1 s", "silent": True}
        await fleet.table({V1: "current"}, members={first.name: silent})
        answers = await asyncio.gather(*asking)
        assert [answer.status for answer in answers] == [504] * 3
        rows = await fleet.rows(3)
        assert [(row["attempts"], row["replica"]) for row in rows] == [("2", last.name)] * 3
        assert all(3.0 <= float(row["total_s"]) < 3.9 for row in rows)  # each anew, it would be 4 s and 5 s
        assert (await fleet.get("/health")).json["replicas"][last.name]["circuit"] == "closed"


async def test_a_request_is_held_no_longer_than_it_may_last(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "staging"}, fleet.urls)
    async with fleet.router(request_timeout_s=0.3, hold_s=50.0):
        answer = await asyncio.wait_for(fleet.complete("run-a"), 10)
        assert (answer.status, "did not become so in time" in answer.message) == (503, True)


@pytest.mark.parametrize(
    "said", [b"who is there?\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}", b"HTTP/1.1 200 OK\r\n"]
)
async def test_a_replica_that_answers_nonsense_or_half_is_replaced(fleet: Fleet, said: bytes) -> None:
    async with raw_server(answering(said)) as raw:
        await fleet.tables.write({V1: "current"}, fleet.urls | {"replica-0": raw.url})
        async with fleet.router():
            answers = await asyncio.gather(*(fleet.complete(V1, [number] * 64) for number in range(8)))
            assert {(each.status, each.headers["x-adaptersync-replica"]) for each in answers} == {(200, "replica-1")}
            assert raw.requests
            assert {row["outcome"] for row in await fleet.rows(8)} == {"ok"}


async def test_a_replica_that_closed_an_idle_connection_is_asked_anew_and_not_left_out(fleet: Fleet) -> None:
    """Under a request that is already on its way there, too."""

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.say(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await talk.reader.readexactly(1)

    async with raw_server(script) as raw:
        await fleet.tables.write({V1: "current"}, {"replica-0": raw.url})
        async with fleet.router():
            for _ in range(4):
                assert (await fleet.complete(V1)).status == 200
            assert raw.accepted == 4
            assert {row["attempts"] for row in await fleet.rows(4)} == {"1"}
            health = await fleet.get("/health")
            assert health.json["replicas"]["replica-0"]["reason"] == ""


@pytest.mark.parametrize(
    ("query", "passes"),
    [
        (b"a=b%20c&d=%0d%0a", True),
        (b"a='\"<>{}|\\^`", True),
        (b"a=\xc3\xa9", False),
        (b"a=b\tc", False),
        (b"a=b\x7fc", False),
        (b"a=b\x00", False),
    ],
)
async def test_a_query_passes_as_it_is_or_not_at_all(fleet: Fleet, query: bytes, passes: bool) -> None:
    async with raw_server(answering(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")) as raw:
        await fleet.tables.write({V1: "current"}, {"replica-0": raw.url})
        async with fleet.router() as url:
            body = b'{"model": "%s", "prompt": [1]}' % V1.encode()
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(b"POST /v1/completions?%s HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" % query)
            writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)
            status = int((await reader.read()).split()[1])
            writer.close()
            assert status == (200 if passes else 400)
            sent = [each.split(b"\r\n")[0] for each in raw.requests]
            assert sent == ([b"POST /v1/completions?%s HTTP/1.1" % query] if passes else [])


async def test_without_ready_replicas_it_says_so(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, {})
    async with fleet.router():
        assert (await fleet.complete(V1)).status == 503
        assert (await fleet.get("/v1/models")).status == 503


async def test_without_the_control_server_it_serves_until_it_cannot_vouch(own_fleet: Fleet, servers: Servers) -> None:
    fleet = own_fleet
    await fleet.tables.write({V1: "current", V3: "retiring"}, fleet.urls)
    async with fleet.router(table_max_age_s=3.0):
        assert (await fleet.complete(V1)).status == 200
        await asyncio.to_thread(servers.control.kill)
        for _ in range(10):
            assert (await fleet.complete("run-a", LONG)).status == 200
        assert (await fleet.complete(V3)).status == 410  # the table itself says that it is given up
        answer = await fleet.complete(V2)  # not in the table, and nobody to ask
        assert answer.status == 503
        assert "Retry-After" in answer.headers
        await wait_until(lambda: _control_away(fleet))
        health = await fleet.get("/health")
        assert health.status == 200
        assert health.json["ledger"]["waiting"] > 0
        await wait_until(lambda: _refused(fleet), timeout_s=5.0)
        assert (await fleet.get("/health")).status == 503
        assert "too old" in (await fleet.complete(V1)).message
        await asyncio.to_thread(servers.control.start)
        await wait_until(lambda: _served(fleet), timeout_s=10.0)
        # every row that waited is written now
        await wait_until(lambda: _all_written(fleet), timeout_s=10.0)
        assert (await fleet.get("/health")).json["ledger"]["lost"] == 0


async def test_without_the_cache_server_it_decides_alone(own_fleet: Fleet, servers: Servers) -> None:
    fleet = own_fleet
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        assert (await fleet.complete(V1, LONG)).status == 200
        await asyncio.to_thread(servers.cache.kill)
        answers = await asyncio.gather(*(fleet.complete(V1, LONG) for _ in range(5)))
        assert {answer.status for answer in answers} == {200}
        assert len({answer.headers["x-adaptersync-replica"] for answer in answers}) == 1
        assert (await fleet.get("/health")).json["redis"]["cache"].startswith("away")
        rows = await fleet.rows(6)
        assert {row["routing"] for row in rows[1:]} == {"local"}
        await asyncio.to_thread(servers.cache.start)
        await wait_until(lambda: _routed_by_redis(fleet), timeout_s=10.0)


async def test_a_cache_server_that_takes_no_writes_is_said_to_be_of_no_use(
    own_fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = own_fleet
    caplog.set_level("INFO", "adaptersync.router.ownership")
    await fleet.tables.write({V1: "current", V2: "retained"}, fleet.urls)
    async with fleet.router():
        assert await _routed_by_redis(fleet)
        await wait_until(lambda: _idle(fleet))  # no end of a request finds it out
        await fleet.cache.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
        await fleet.cache.command("CONFIG", "SET", "maxmemory", "1000")
        await wait_until(lambda: _cache_refuses(fleet), timeout_s=10.0)
        assert "adaptersync_router_cache_reachable 0.0" in (await fleet.get("/metrics")).body.decode()
        for version in (V1, V2):  # one that the server knows something of, and one that it does not
            assert (await fleet.complete(version, LONG)).status == 200
        assert [row["routing"] for row in await fleet.rows(3)][1:] == ["local", "local"]
        await fleet.cache.command("CONFIG", "SET", "maxmemory", "0")
        await wait_until(lambda: _routed_by_redis(fleet), timeout_s=10.0)
    said = [record.message for record in caplog.records if record.name == "adaptersync.router.ownership"]
    assert len(said) == 2, said
    assert said[0].startswith("cache server does not do what it is asked: deciding alone; Redis refused: OOM")


async def _cache_refuses(fleet: Fleet) -> bool:
    said = (await fleet.get("/health")).json["redis"]["cache"]
    return str(said).startswith("refuses, deciding alone: Redis refused: OOM")


async def _routed_by_redis(fleet: Fleet) -> bool:
    await fleet.complete(V1, LONG)
    return (await fleet.get("/health")).json["redis"]["cache"] == "reachable"  # type: ignore[no-any-return]


async def _idle(fleet: Fleet) -> bool:
    return not await fleet.counts()


async def _control_away(fleet: Fleet) -> bool:
    return (await fleet.get("/health")).json["redis"]["control"].startswith("away")  # type: ignore[no-any-return]


async def _refused(fleet: Fleet) -> bool:
    return (await fleet.complete(V1)).status == 503


async def _served(fleet: Fleet) -> bool:
    return (await fleet.complete(V1)).status == 200


async def _all_written(fleet: Fleet) -> bool:
    ledger = (await fleet.get("/health")).json["ledger"]
    return bool(ledger["waiting"] == 0 and ledger["written"] > 10)
