"""The router in front of replicas that behave as vLLM does: prefix cache, adapters, streams, errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from support.adapters import make_adapter
from support.engines import BLOCK_SIZE, MAX_MODEL_LEN, Engine, simulator
from support.router_fleet import V1, V2, Fleet
from support.tiny_model import write_sizes

PROMPT = list(range(64, 64 + 3 * BLOCK_SIZE + 5))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    directory = tmp_path_factory.mktemp("fleet")
    model = write_sizes(directory / "model")
    for name in ("left", "right"):
        (directory / name).mkdir()
    with simulator(directory / "left", model) as left, simulator(directory / "right", model) as right:
        yield {"replica-0": left, "replica-1": right}


@pytest.fixture
def urls(engines: dict[str, Engine], tmp_path: Path) -> Iterator[dict[str, str]]:
    for seed, version in enumerate((V1, V2)):
        directory = make_adapter(tmp_path / version, seed=seed)
        for engine in engines.values():
            assert engine.load(version, directory).status == 200
    yield {name: engine.url for name, engine in engines.items()}
    for engine in engines.values():
        engine.post("/reset_prefix_cache")
        for version in (V1, V2):
            engine.unload(version)


async def test_a_prompt_is_warm_the_second_time_and_only_under_its_version(fleet: Fleet, urls: dict[str, str]) -> None:
    await fleet.tables.write({V1: "retained", V2: "current"}, urls, block_size=BLOCK_SIZE)
    async with fleet.router():
        for version in (V1, V1, V2, V1):
            answer = await fleet.complete(version, PROMPT, max_tokens=2)
            assert (answer.status, answer.json["model"]) == (200, version)
        rows = await fleet.rows(4)
        assert [row["cached_tokens"] for row in rows] == ["0", str(3 * BLOCK_SIZE), "0", str(3 * BLOCK_SIZE)]
        assert [row["owned_blocks"] for row in rows] == ["0", "3", "0", "3"]
        assert [row["predicted_tokens"] for row in rows] == [row["cached_tokens"] for row in rows]
        assert {row["prompt_tokens"] for row in rows} == {str(len(PROMPT))}
        assert {row["completion_tokens"] for row in rows} == {"2"}


async def test_what_was_expected_to_be_cached_is_what_engines_say_was(fleet: Fleet, urls: dict[str, str]) -> None:
    """Templates, prompts of whole blocks and turns that go on; and nothing is expected of prompts known by bytes."""
    await fleet.tables.write({V1: "current"}, {"replica-0": urls["replica-0"]}, block_size=BLOCK_SIZE)
    template = PROMPT[: 2 * BLOCK_SIZE]
    asked: list[Any] = [template + [number] * BLOCK_SIZE for number in range(70, 73)]
    asked += [asked[0], asked[1] + asked[0], "some text that is long enough for several blocks of bytes " * 2]
    async with fleet.router():
        for prompt in asked:
            assert (await fleet.complete(V1, prompt, max_tokens=1)).status == 200
        rows = await fleet.rows(len(asked))
        metrics = (await fleet.get("/metrics")).body.decode()
    assert [row.get("predicted_tokens") for row in rows[:-1]] == [row["cached_tokens"] for row in rows[:-1]]
    # the second of three prompts with one beginning is the first to know that it is one; the last block is never cached
    blocks = [int(row["cached_tokens"]) // BLOCK_SIZE for row in rows[:-1]]
    assert blocks == [0, 2, 2, 2, 3]
    assert "predicted_tokens" not in rows[-1]
    for name in ("predicted", "cached"):
        labels = f'{{replica="replica-0",version="{V1}"}}'
        assert f"adaptersync_router_{name}_tokens_total{labels} {sum(blocks) * BLOCK_SIZE}.0" in metrics
    assert 'adaptersync_router_first_byte_seconds_count{replica="replica-0"} 6.0' in metrics
    assert "adaptersync_router_imbalance 1.0" in metrics


async def test_what_comes_through_is_what_the_replica_says(
    fleet: Fleet, urls: dict[str, str], engines: dict[str, Engine]
) -> None:
    await fleet.tables.write({V1: "current"}, urls, block_size=BLOCK_SIZE)
    fields: dict[str, Any] = {
        "max_tokens": 8,
        "temperature": 0,
        "seed": 2**62 + 1,
        "logprobs": 0,
        "return_token_ids": True,
    }
    async with fleet.router():
        through = await fleet.complete("run-a", PROMPT, **fields)
        direct = await asyncio.to_thread(engines["replica-0"].complete, V1, PROMPT, **fields)
        assert through.json["choices"] == direct["choices"]
        assert through.json["model"] == V1


async def test_a_batch_comes_back_whole_and_with_what_was_asked_of_it(
    fleet: Fleet, urls: dict[str, str], engines: dict[str, Engine]
) -> None:
    await fleet.tables.write({V1: "current"}, urls, block_size=BLOCK_SIZE)
    fields: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "seed": 7, "n": 2, "echo": True}
    batch = ["one text", "and another"]
    async with fleet.router():
        through = await fleet.complete("run-a", batch, **fields)
        direct = await asyncio.to_thread(engines["replica-0"].complete, V1, batch, **fields)
        assert through.json["choices"] == direct["choices"]
        assert [choice["index"] for choice in direct["choices"]] == [0, 1, 2, 3]
        stream = await fleet.complete("run-a", batch, **fields, stream=True, stream_options={"include_usage": True})
        events = [orjson.loads(line[6:]) for line in stream.body.split(b"\n\n") if line[6:] not in (b"", b"[DONE]")]
        assert {choice["index"] for event in events for choice in event["choices"]} == {0, 1, 2, 3}
        assert events[-1]["usage"]["completion_tokens"] == 4 * 4
        rows = await fleet.rows(2)
        assert {row["completion_tokens"] for row in rows} == {"16"}


async def test_a_chat_streams_to_its_end(fleet: Fleet, urls: dict[str, str]) -> None:
    await fleet.tables.write({V1: "current"}, urls, block_size=BLOCK_SIZE)
    body = {"model": "run-a", "messages": [{"role": "user", "content": "12 + 30"}], "max_tokens": 6, "stream": True}
    async with fleet.router():
        answer = await fleet.post("/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        events = [line.removeprefix(b"data: ") for line in answer.body.split(b"\n\n") if line]
        assert events[-1] == b"[DONE]"
        assert {orjson.loads(event)["model"] for event in events[:-1]} == {V1}
        (row,) = await fleet.rows(1)
        assert (row["outcome"], row["completion_tokens"]) == ("ok", "6")


async def test_a_replica_that_lost_the_version_is_not_heard_of(
    fleet: Fleet, urls: dict[str, str], engines: dict[str, Engine]
) -> None:
    await fleet.tables.write({V1: "current"}, urls, block_size=BLOCK_SIZE)
    async with fleet.router():
        first = await fleet.complete(V1, PROMPT, max_tokens=1)
        owner = first.headers["x-adaptersync-replica"]
        await asyncio.to_thread(engines[owner].unload, V1)
        for _ in range(3):
            answer = await fleet.complete(V1, PROMPT, max_tokens=1)
            assert answer.status == 200
            assert answer.headers["x-adaptersync-replica"] != owner


async def test_other_answers_of_a_replica_are_passed_on(fleet: Fleet, urls: dict[str, str]) -> None:
    await fleet.tables.write({V1: "current"}, urls, block_size=BLOCK_SIZE)
    async with fleet.router():
        assert (await fleet.complete(V1, [1] * (MAX_MODEL_LEN + 1))).status == 400
        assert (await fleet.complete(V1, {"not": "a prompt"})).status == 400
        tokens = await fleet.post("/tokenize", {"model": "run-a", "prompt": "hello"})
        assert tokens.json["count"] == 5
        assert (await fleet.get("/v1/models")).json["data"][0]["max_model_len"] == MAX_MODEL_LEN
