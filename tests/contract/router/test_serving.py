"""What a client sees: names, passing through, refusals."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import orjson
import pytest

from adaptersync.router.asked import PARTS
from adaptersync_core.records import Traffic
from adaptersync_core.registry import Registry
from support.raw_server import answering, raw_server
from support.router_fleet import V1, V2, V3, Fleet
from support.upstreams import MAX_MODEL_LEN
from support.wait import wait_until


async def test_names_reach_the_version_they_stand_for(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "retained", V2: "current"}, fleet.urls)
    async with fleet.router():
        for asked, meant in {V1: V1, V2: V2, "run-a": V2, "run-a@current": V2, "run-a@v1": V1, "base": "base"}.items():
            answer = await fleet.complete(asked)
            assert answer.status == 200, answer.body
            assert answer.json["model"] == meant
            assert answer.headers["x-adaptersync-version"] == meant
            assert answer.headers["x-adaptersync-replica"] in fleet.replicas
            assert answer.headers["x-adaptersync-request-id"]


async def test_a_body_is_passed_untouched(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    body = b'{ "seed": 9007199254740993,\n "temperature": 1.0e0, "model":"%s", "prompt" : [1, 2,3], "x":"\\u00e9" }'
    async with fleet.router():
        for path in ("/v1/completions", "/v1/chat/completions"):
            assert (await fleet.post(path, body % V1.encode())).status == 200
        seen = [request for replica in fleet.replicas.values() for request in replica.seen]
        assert [request.body for request in seen] == [body % V1.encode()] * 2
        assert {request.path for request in seen} == {"/v1/completions", "/v1/chat/completions"}


async def test_a_large_body_passes_and_is_sent_again_when_a_replica_fails(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, {name: url + "/" for name, url in fleet.urls.items()})
    body = orjson.dumps({"model": V1, "prompt": "x" * (3 << 20)})
    for replica in fleet.replicas.values():
        replica.fail = [503]
    next(iter(fleet.replicas.values())).fail = []
    async with fleet.router():
        for _ in range(2):
            assert (await fleet.post("/v1/completions", body)).status == 200
        assert {request.body for replica in fleet.replicas.values() for request in replica.seen} == {body}


async def test_an_alias_changes_the_model_and_nothing_else(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    body = (
        b'{"seed": 9007199254740993, "temperature": 1.0e0, "model": "run-a", "x": {"model" : "run-a"}, "prompt": [1]}'
    )
    async with fleet.router():
        assert (await fleet.post("/v1/completions", body)).status == 200
        (sent,) = [request.body for replica in fleet.replicas.values() for request in replica.seen]
        assert orjson.loads(sent) == orjson.loads(body) | {"model": V1}
        assert b"9007199254740993" in sent
        assert b"1.0e0" in sent
        assert b'{"model" : "run-a"}' in sent


async def test_headers_pass_but_those_of_a_connection(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        headers = {"Authorization": "Bearer key", "X-Request-Id": "mine", "TE": "trailers", "X-Own": "yes"}
        answer = await fleet.post("/v1/completions", {"model": V1, "prompt": [1]}, headers=headers)
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("application/json")
        (seen,) = [request for replica in fleet.replicas.values() for request in replica.seen]
        assert seen.headers["authorization"] == "Bearer key"
        assert seen.headers["x-request-id"] == "mine"
        assert seen.headers["x-own"] == "yes"
        assert "te" not in seen.headers


async def test_headers_that_connection_names_are_passed_on_in_neither_direction(fleet: Fleet) -> None:
    said = b"Connection: keep-alive, X-Hop\r\nx-hop: 1\r\nX-Other: 2\r\nconnection: X-SECOND\r\nx-second: 3\r\n"
    async with raw_server(answering(*[b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n" + said + b"\r\n{}"] * 2)) as raw:
        await fleet.tables.write({V1: "current"}, {"replica-0": raw.url})
        async with fleet.router() as url:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            body = b'{"model":"%b"}' % V1.encode()
            for offer in (b"", b"connection: Upgrade\r\nupgrade: h2c\r\n"):  # which is read twice
                head = b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n" % len(body)
                writer.write(head + offer + said + b"\r\n" + body)
                answer = (await reader.readuntil(b"\r\n\r\n")).lower()
                assert await reader.readexactly(2) == b"{}"
                for passed in (answer, raw.requests[-1].lower()):
                    assert b"\r\nx-other: 2\r\n" in passed
                    assert b"x-hop" not in passed
                    assert b"x-second" not in passed
            writer.close()
            await writer.wait_closed()


async def test_a_stream_is_passed_on_chunk_by_chunk(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    chunks = [b"data: {}\n\n", "data: é\n\n".encode(), b"\x00\xff", b"data: [DONE]\n\n"]
    for replica in fleet.replicas.values():
        replica.chunks = chunks
        replica.chunk_gate = asyncio.Semaphore(0)
    async with fleet.router() as url:
        body = {"model": "run-a", "prompt": [1], "stream": True}
        for replica in fleet.replicas.values():
            replica.chunk_gate.release()
        async with fleet.session.post(url + "/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
            assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            received = []
            for _ in chunks:  # the next one is sent only after this one has arrived
                received.append(await asyncio.wait_for(answer.content.readany(), timeout=5.0))
                for replica in fleet.replicas.values():
                    replica.chunk_gate.release()
            assert received == chunks
            assert await answer.content.read() == b""
        (row,) = await fleet.rows(1)
        assert row["outcome"] == "ok"


async def test_a_large_answer_is_passed_whole(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    large = orjson.dumps({"text": "x" * (3 << 20), "usage": {"prompt_tokens": 5, "completion_tokens": 7}})
    for replica in fleet.replicas.values():
        replica.answer = lambda _: large
    async with fleet.router():
        answer = await fleet.complete(V1)
        assert answer.body == large
        assert int(answer.headers["Content-Length"]) == len(large)
        (row,) = await fleet.rows(1)
        assert (row["prompt_tokens"], row["completion_tokens"]) == ("5", "7")


async def test_a_client_that_leaves_ends_the_work(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    for replica in fleet.replicas.values():
        replica.gate.clear()
    async with fleet.router():
        with pytest.raises(TimeoutError):
            await fleet.post("/v1/completions", {"model": V1, "prompt": [1]}, timeout=aiohttp.ClientTimeout(total=0.3))
        await wait_until(lambda: sum(replica.aborted for replica in fleet.replicas.values()) == 1)
        (row,) = await fleet.rows(1)
        assert (row["outcome"], row["status"]) == ("client_gone", "499")
        await wait_until(lambda: _idle(fleet))


async def test_a_client_that_leaves_a_stream_ends_the_work(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    for replica in fleet.replicas.values():
        replica.chunk_gate = asyncio.Semaphore(1)
    async with fleet.router() as url:
        body = {"model": V1, "prompt": [1], "stream": True}
        async with fleet.session.post(url + "/v1/completions", json=body) as answer:
            await answer.content.readany()
            answer.close()
        await wait_until(lambda: sum(replica.aborted for replica in fleet.replicas.values()) == 1)
        (row,) = await fleet.rows(1)
        assert row["outcome"] == "client_gone"


async def test_a_body_over_the_limit_is_refused(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router(body_bytes=1000):
        for body in ({"model": V1, "prompt": "x" * 2000}, _chunks(2000)):
            async with aiohttp.ClientSession() as session:
                sent = {"json": body} if isinstance(body, dict) else {"data": body}
                async with session.post(fleet.url + "/v1/completions", **sent) as answer:
                    assert answer.status == 413
                    assert "larger than 1000 bytes" in (await answer.json())["error"]["message"]
        assert not any(replica.seen for replica in fleet.replicas.values())
        assert [row["status"] for row in await fleet.rows(2)] == ["413", "413"]


DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize(
    "body",
    [
        b"not json",
        b"[1]",
        b"{}",
        b'{"model": 7}',
        b'{"model": ""}',
        b'{"prompt": [1]}',
        b'{"model": "base", ',
        pytest.param(b'{"model": "base", "prompt": ' + DEEP + b"}", id="deep"),
    ],
)
async def test_a_body_that_cannot_be_routed_is_refused(fleet: Fleet, body: bytes) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        answer = await fleet.post("/v1/completions", body)
        assert answer.status == 400
        assert set(answer.json["error"]) == {"message", "type", "code", "param"}
        assert answer.json["error"]["type"] == "invalid_request_error"
        (row,) = await fleet.rows(1)
        assert (row["outcome"], row["status"]) == ("refused", "400")


@pytest.mark.parametrize("prompt", [[1, -2], [2**40], ["a", 3], [[1, "x"]], {"a": 1}, 7, None, [], [[]], "", "\ud800"])
async def test_a_prompt_we_cannot_read_is_for_the_replica_to_judge(fleet: Fleet, prompt: object) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        import json

        answer = await fleet.post("/v1/completions", json.dumps({"model": V1, "prompt": prompt}).encode())
        assert answer.status in (200, 400)
        assert (answer.status == 400) == (prompt == "\ud800")


async def test_a_replicas_refusal_is_passed_on(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    for replica in fleet.replicas.values():
        replica.fail = [400]
    async with fleet.router():
        answer = await fleet.complete(V1)
        assert answer.status == 400
        assert answer.json == {"error": {"message": "EngineCore encountered an issue"}}
        (row,) = await fleet.rows(1)
        assert (row["outcome"], row["status"]) == ("refused", "400")


async def test_models_lists_the_base_first_then_what_is_served(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "retained", V2: "current", V3: "staging"}, fleet.urls)
    async with fleet.router():
        cards = (await fleet.get("/v1/models")).json["data"]
        assert [card["id"] for card in cards] == ["base", V1, V2, "run-a"]
        assert cards[0]["max_model_len"] == MAX_MODEL_LEN
        assert cards[3]["root"] == V2


async def test_tokenize_goes_to_a_replica_and_leaves_no_row(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        assert (await fleet.post("/tokenize", {"model": "run-a", "prompt": "hello"})).json["model"] == V1
        assert (await fleet.post("/tokenize", {"prompt": "hello"})).status == 200
        await fleet.complete(V1)
        (row,) = await fleet.rows(1)
        assert row["path"] == "/v1/completions"
        assert not await fleet.cache.command("KEYS", "*owned*")  # tokenizing leaves nothing in a replica's cache


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"),
        ("POST", "/pause"),
        ("POST", "/resume"),
        ("GET", "/adapters"),
        ("DELETE", "/adapters/some-name"),
    ],
)
async def test_calls_that_change_engines_name_the_relay(fleet: Fleet, method: str, path: str) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router() as url, fleet.session.request(method, url + path, json={}) as answer:
        assert answer.status == 501
        assert "adaptersync relay" in (await answer.json())["error"]["message"]
    assert not any(replica.seen for replica in fleet.replicas.values())


async def test_other_paths_do_not_exist(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        assert (await fleet.get("/v1/completions")).status == 405
        assert (await fleet.get("/nothing")).json["error"]["type"] == "not_found_error"


async def test_one_request_too_many_is_told_to_come_back(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    for replica in fleet.replicas.values():
        replica.gate.clear()
    async with fleet.router(max_inflight=1):
        first = asyncio.create_task(fleet.complete(V1))
        await wait_until(lambda: sum(replica.in_flight for replica in fleet.replicas.values()) == 1)
        answer = await fleet.complete(V1)
        assert answer.status == 503
        assert int(answer.headers["Retry-After"]) >= 1
        for replica in fleet.replicas.values():
            replica.gate.set()
        assert (await first).status == 200
        assert (await fleet.complete(V1)).status == 200


async def test_health_and_metrics_tell_the_state(fleet: Fleet) -> None:
    async with fleet.router():
        health = await fleet.get("/health")
        assert (health.status, health.json["status"]) == (503, "degraded")
        assert "no table" in health.json["reason"]
        await fleet.table({V1: "current"})
        health = await fleet.get("/health")
        assert health.status == 200
        assert health.json["runs"] == {"run-a": V1}
        assert {name: each["state"] for name, each in health.json["replicas"].items()} == {
            "replica-0": "ready",
            "replica-1": "ready",
        }
        assert health.json["redis"] == {"control": "reachable", "cache": "reachable"}
        await fleet.complete(V1)
        text = (await fleet.get("/metrics")).body.decode()
        assert 'adaptersync_router_requests_total{outcome="ok",status="200"} 1.0' in text
        assert "adaptersync_router_table_generation 1.0" in text
        await fleet.table({V1: "current"}, min_ready=3)
        health = await fleet.get("/health")
        assert health.status == 503
        assert "2 of at least 3" in health.json["reason"]
        # a replica that left leaves no series behind
        await fleet.table({V1: "current"}, urls={"replica-9": fleet.replicas["replica-0"].url})
        assert "replica-0" not in (await fleet.get("/metrics")).body.decode()


async def _idle(fleet: Fleet) -> bool:
    return not await fleet.counts()


async def _chunks(size: int):  # type: ignore[no-untyped-def]
    for _ in range(0, size, 100):
        yield b"x" * 100


# what is not passed on


async def test_a_body_with_very_many_fields_is_not_taken_apart_to_write_a_version_into_it(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    many = b",".join(b'"%x":0' % number for number in range(PARTS))
    async with fleet.router():
        for model, status in ((b"run-a", 400), (V1.encode(), 200)):
            answer = await fleet.post("/v1/completions", b'{"model":"%b","prompt":[1],%b}' % (model, many))
            assert answer.status == status
            if status == 400:
                assert "ask for the version by its own name" in answer.message
        long = b'{"model":"run-a","messages":[{"content":"%b"}]}' % (b"key: value, " * PARTS)
        answer = await fleet.post("/v1/chat/completions", long)
        assert (answer.status, answer.headers["x-adaptersync-version"]) == (200, V1)
        await fleet.rows(3)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "x", "prompt_logprobs": 0}),
        ("/v1/completions", {"prompt": "x", "echo": True, "logprobs": 1}),
        ("/v1/chat/completions", {"messages": [], "prompt_logprobs": 0}),
        ("/v1/chat/completions", {"messages": [], "echo": True}),
    ],
)
@pytest.mark.parametrize("model", ["run-a", "base"])
async def test_what_can_end_a_server_is_refused_with_a_reason(
    fleet: Fleet, path: str, fields: dict[str, Any], model: str
) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        answer = await fleet.post(path, {"model": model} | fields)
        assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")
        assert answer.json["error"]["param"] in fields
        assert "LoRA on its head" in answer.message
        assert "leave it out" in answer.message
        assert not any(replica.seen for replica in fleet.replicas.values())
        (row,) = await fleet.rows(1)
        assert (row["outcome"], row["status"], row["asked"]) == ("refused", "400", model)
        assert "LoRA on its head" in row["reason"]
    async with fleet.router(prompt_logprobs=True):
        assert (await fleet.post(path, {"model": model} | fields)).status == 200


async def test_a_wrong_path_or_method_is_told_what_there_is(fleet: Fleet) -> None:
    async with fleet.router():
        answer = await fleet.get("/v1/completions")
        assert (answer.status, answer.headers["Allow"]) == (405, "POST")
        assert "use POST" in answer.message
        answer = await fleet.post("/v1/models", {})
        assert (answer.status, answer.headers["Allow"]) == (405, "GET")
        answer = await fleet.get("/v1/embeddings")
        assert answer.status == 404
        assert "no such path here" in answer.message
        assert "use one of /health /metrics /tokenize /v1/chat/completions /v1/completions /v1/models" in answer.message


async def test_what_is_no_http_is_answered_and_counted(fleet: Fleet) -> None:
    async with fleet.router() as url:
        for _ in range(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(b"GET / HTTP/1.1\r\nbad header\x00: \r\n\r\n")
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert "request is not HTTP" in orjson.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
            writer.close()
            await writer.wait_closed()
        counted = (await fleet.get("/metrics")).body.decode()
    assert 'adaptersync_router_requests_total{outcome="refused",status="400"} 5.0' in counted


async def test_reports_say_what_was_served(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    registry = Registry(fleet.control, fleet.keys)
    async with fleet.router():
        for _ in range(2):
            assert (await fleet.complete(V1, list(range(64)))).status == 200
        assert (await fleet.complete("nobody")).status == 404

        async def told() -> Traffic:
            (seen,) = (await registry.fleet()).routers.values()
            return seen.report.traffic

        async def all_is_told() -> bool:
            return (await told()).ended == {"ok": 2, "refused": 1}

        await wait_until(all_is_told)
        traffic = await told()
        assert sum(traffic.routed.values()) == 2
        assert traffic.tokens["completion"] > 0
        assert traffic.at == {}
