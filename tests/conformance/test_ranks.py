"""One server with two engines behind it: which one answers, what each caches and says, and that adapters reach both.

A real vLLM can do this on the CPU, too: `--data-parallel-size 2`, one API server, KV events over TCP.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from adaptersync_core.vllm import VllmClient
from conformance.conftest import TARGETS
from support import engines
from support.engines import BLOCK_SIZE, MODEL, Answer, Engine
from support.kv import Batch, Listener, listening
from support.tiny_model import write_sizes
from support.wait import wait_until_sync

RANKS = 2
ANY_PORT = "tcp://*:0"
OUT_OF_RANGE = "data_parallel_rank {} is out of range [0, 2)."


@pytest.fixture(scope="module", params=TARGETS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    size = ("--data-parallel-size", str(RANKS))
    with TemporaryDirectory(prefix="engine-") as directory:
        if request.param == "simulator":
            model = write_sizes(tmp_path_factory.mktemp("sizes") / "model")
            kv = ("--kv-events-endpoint", ANY_PORT, "--kv-replay-endpoint", ANY_PORT)
            with engines.simulator(Path(directory), model, *size, *kv) as engine:
                yield engine
        else:
            engines.require_vllm()
            events = {"enable_kv_cache_events": True, "endpoint": ANY_PORT, "replay_endpoint": ANY_PORT}
            more = (*size, "--kv-events-config", json.dumps(events))
            with engines.vllm_cpu(Path(directory), request.getfixturevalue("real_model"), *more) as engine:
                yield engine


def ask(engine: Engine, prompt: list[int], rank: object = None, **fields: Any) -> Answer:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0} | fields
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    return engine.call("POST", "/v1/completions", body, headers=headers)


def cached(engine: Engine, prompt: list[int], rank: object = None, **fields: Any) -> int:
    answer = ask(engine, prompt, rank, **fields)
    assert answer.status == 200, answer.text
    details = answer.json["usage"]["prompt_tokens_details"]
    return int(details["cached_tokens"]) if details else 0


def test_each_rank_has_a_cache_of_its_own(engine: Engine, prompt: Callable[[int], list[int]]) -> None:
    tokens = prompt(2 * BLOCK_SIZE + 5)
    assert [cached(engine, tokens, rank) for rank in (0, 0, 1, 1, 0)] == [
        0,
        2 * BLOCK_SIZE,
        0,
        2 * BLOCK_SIZE,
        2 * BLOCK_SIZE,
    ]


@pytest.mark.parametrize("rank", [RANKS, -1])
def test_a_rank_that_it_has_not_is_refused(engine: Engine, prompt: Callable[[int], list[int]], rank: int) -> None:
    answer = ask(engine, prompt(8), rank)
    assert answer.status == 400
    assert answer.error == {
        "message": OUT_OF_RANGE.format(rank),
        "type": "BadRequestError",
        "param": None,
        "code": 400,
    }
    (event,) = ask(engine, prompt(8), rank, stream=True).events  # which has said 200 before it looked
    assert event["error"] == answer.error


def test_what_is_no_number_asks_for_none(engine: Engine, prompt: Callable[[int], list[int]]) -> None:
    assert ask(engine, prompt(8), "x").status == 200


def test_who_names_no_rank_is_sent_to_each_in_turn(engine: Engine, prompt: Callable[[int], list[int]]) -> None:
    tokens = prompt(BLOCK_SIZE + 5)
    for _ in range(RANKS):
        ask(engine, tokens)
    assert [cached(engine, tokens, rank) for rank in range(RANKS)] == [BLOCK_SIZE] * RANKS


def test_an_adapter_is_loaded_into_all(
    engine: Engine, loaded: Callable[..., str], prompt: Callable[[int], list[int]]
) -> None:
    name, tokens = loaded(), prompt(2 * BLOCK_SIZE + 5)
    for rank in range(RANKS):
        assert [cached(engine, tokens, rank, model=name) for _ in range(2)] == [0, 2 * BLOCK_SIZE]
    answers = [ask(engine, tokens, rank, model=name, max_tokens=8).json["choices"] for rank in range(RANKS)]
    assert answers[0] == answers[1]


async def test_our_client_counts_engines_and_finds_each_ones_events(
    engine: Engine, prompt: Callable[[int], list[int]]
) -> None:
    async with VllmClient(engine.url, timeout_s=30) as client:
        assert (await client.facts()).engines == RANKS
        sources = await client.kv_event_sources()
        prefills = await client.prefills()
    assert sorted(sources) == list(range(RANKS))
    assert prefills is not None
    assert prefills.ranks == RANKS
    for rank, source in sources.items():
        tokens = prompt(BLOCK_SIZE + 5)
        with listening(source.endpoint, source.replay_endpoint or "") as listener:
            ask(engine, tokens, rank)
            wait_until_sync(partial(_storing, listener, tokens), timeout_s=30)
            (last,) = _storing(listener, tokens)
            assert last.decoded[2] == rank


def _storing(listener: Listener, tokens: list[int]) -> list[Batch]:
    """What the engine has told of this prompt, so far."""
    return [
        batch
        for batch in listener.replay(0)
        if any(event.get("token_ids") == tokens[:BLOCK_SIZE] for event in batch.events)
    ]
