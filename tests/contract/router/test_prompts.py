"""Prompts of every form find their owner, and requests count as the sequences they are."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adaptersync.router.asked import Asked
from adaptersync.router.tokenizer import load
from adaptersync_core.errors import ConfigError
from support.router_fleet import V1, Fleet
from support.tiny_tokenizer import build_tokenizer
from support.wait import wait_until

# A router that reads prompts imports transformers, which a busy machine takes its time for.
pytestmark = pytest.mark.timeout(180)

NO_SERVER_MATTERS = pytest.mark.parametrize("redis_kind", ["redis7"])

TEXT = "what is said in the text, and then what is asked of it: 12 + 30 "


@pytest.fixture(scope="module")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for name in ("jinja2", "tokenizers", "transformers"):
        pytest.importorskip(name)
    directory = build_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    (directory / "config.json").write_text('{"model_type": "llama"}')
    return directory


async def test_text_chat_and_ids_of_one_prompt_meet(fleet: Fleet, tokenizer_directory: Path) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    own = await load(str(tokenizer_directory))
    chat = [{"role": "user", "content": TEXT * 3}]
    rendered = own.chat(Asked(messages=msgspec.Raw(json.dumps(chat).encode())))
    assert rendered.endswith("<assistant>")
    async with fleet.router(tokenizer=str(tokenizer_directory)):
        bodies: list[tuple[str, dict[str, object]]] = [
            ("/v1/completions", {"prompt": TEXT * 3}),
            ("/v1/completions", {"prompt": list(own.text(TEXT * 3, 10_000, special=True))}),
            ("/v1/chat/completions", {"messages": chat}),
            ("/v1/completions", {"prompt": rendered, "add_special_tokens": False}),
            ("/v1/chat/completions", {"messages": chat, "chat_template": "{{ messages }}"}),  # as yet another prompt
        ]
        for path, body in bodies:
            assert (await fleet.post(path, {"model": V1} | body)).status == 200
        rows = await fleet.rows(len(bodies))
        assert [row["routing"] for row in rows] == ["cold", "affinity", "cold", "affinity", "cold"]
        assert rows[0]["replica"] == rows[1]["replica"]
        assert int(rows[1]["owned_blocks"]) == len(own.text(TEXT * 3, 10_000, special=True)) // 16
        metrics = (await fleet.get("/metrics")).body.decode()
        for read, reason, count in (("tokenizer", "", 3), ("ids", "", 1), ("bytes", "template", 1)):
            series = f'adaptersync_router_prompts_total{{read="{read}",reason="{reason}"}} {float(count)}'
            assert series in metrics


@NO_SERVER_MATTERS
async def test_a_tokenizer_that_cannot_be_loaded_is_no_router(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="tokenizer cannot be loaded"):
        async with fleet.router(tokenizer=str(tmp_path)):
            pytest.fail("it serves")


async def test_a_request_is_as_much_load_as_its_sequences(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    for replica in fleet.replicas.values():
        replica.gate.clear()
    async with fleet.router(spill=4):
        many = asyncio.create_task(fleet.complete(V1, [list(range(32)), list(range(100, 132))], n=8))
        await wait_until(lambda: _totals(fleet, [16]))
        # other prompts go elsewhere until there is as much to do
        few = [asyncio.create_task(fleet.complete(V1, [number] * 32, n=2)) for number in range(1000, 1004)]
        await wait_until(lambda: _totals(fleet, [8, 16]))
        for replica in fleet.replicas.values():
            replica.gate.set()
        assert {answer.status for answer in await asyncio.gather(many, *few)} == {200}
        await wait_until(lambda: _totals(fleet, []))
        status = (await fleet.get("/health")).json
        assert {replica["in_flight"] for replica in status["replicas"].values()} == {0}


async def _totals(fleet: Fleet, expected: list[int]) -> bool:
    counts = await fleet.counts()
    return sorted(count for name, count in counts.items() if "|" not in name) == expected


async def test_every_prompt_of_a_batch_is_owned_where_it_went(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    prompts = [[number] * 48 for number in range(1000, 1008)]
    async with fleet.router():
        batch = await fleet.complete(V1, prompts)
        alone = [await fleet.complete(V1, prompt) for prompt in prompts]
        rows = await fleet.rows(1 + len(prompts))
    assert [row["routing"] for row in rows] == ["cold", *["affinity"] * len(prompts)]
    replicas = {answer.headers["x-adaptersync-replica"] for answer in (batch, *alone)}
    assert len(replicas) == 1


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/completions", {"prompt": [TEXT, "b"], "echo": True, "suffix": " end", "n": 2, "best_of": 3}),
        ("/v1/completions", {"prompt": TEXT, "stream": True, "stream_options": {"include_usage": True}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}], "stream": True, "n": 2}),
    ],
)
@pytest.mark.parametrize("exactly", [True, False])
@NO_SERVER_MATTERS
async def test_what_is_read_is_passed_on_untouched(
    fleet: Fleet, tokenizer_directory: Path, path: str, more: dict[str, Any], exactly: bool
) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    sent = json.dumps({"model": V1} | more, indent=1).encode()
    async with fleet.router(tokenizer=str(tokenizer_directory) if exactly else ""):
        answer = await fleet.post(path, sent)
    assert answer.status == 200
    (seen,) = [seen for replica in fleet.replicas.values() for seen in replica.seen]
    assert seen.body == sent
    if more.get("stream"):
        assert answer.body == b"".join(fleet.replicas["replica-0"].chunks)
