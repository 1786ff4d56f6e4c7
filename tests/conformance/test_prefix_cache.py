"""What the prefix cache hits, and what it publishes about itself."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.engines import BLOCK_SIZE, MODEL, NUM_BLOCKS, Engine
from support.kv import Batch, Listener, chain

Prompt = Callable[[int], list[int]]
Load = Callable[..., str]


def _cached(engine: Engine, model: str, tokens: list[int], **fields: Any) -> int:
    usage = engine.complete(model, tokens, **fields)["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def _of(batches: list[Batch], kind: str) -> list[dict[str, Any]]:
    return [event for batch in batches for event in batch.events if event["type"] == kind]


def _stored(count: int) -> Callable[[list[dict[str, Any]]], bool]:
    return lambda events: sum(event["type"] == "BlockStored" for event in events) >= count


def test_full_blocks_hit_within_one_name_and_nowhere_else(engine: Engine, loaded: Load, prompt: Prompt) -> None:
    one, other, tokens = loaded(seed=1), loaded(seed=2), prompt(70)
    assert [_cached(engine, one, tokens), _cached(engine, one, tokens)] == [0, 64]
    assert [_cached(engine, other, tokens), _cached(engine, MODEL, tokens)] == [0, 0]
    assert [_cached(engine, other, tokens), _cached(engine, MODEL, tokens)] == [64, 64]
    assert _cached(engine, one, tokens[:40] + prompt(30)) == 32


@pytest.mark.parametrize(("length", "hit"), [(31, 0), (32, 0), (33, 32), (64, 32), (65, 64)])
def test_the_last_token_is_always_computed(engine: Engine, prompt: Prompt, length: int, hit: int) -> None:
    tokens = prompt(length)
    assert [_cached(engine, MODEL, tokens), _cached(engine, MODEL, tokens)] == [0, hit]


def test_a_salt_separates(engine: Engine, prompt: Prompt) -> None:
    tokens = prompt(70)
    assert [_cached(engine, MODEL, tokens, cache_salt=salt) for salt in ("a", "a", "b")] == [0, 64, 0]
    assert _cached(engine, MODEL, tokens) == 0


def test_answers_are_cached_but_for_their_last_token(engine: Engine, prompt: Prompt) -> None:
    tokens = prompt(60)
    answer = engine.complete(MODEL, tokens, max_tokens=36, return_token_ids=True, ignore_eos=True)
    said = answer["choices"][0]["token_ids"]
    assert _cached(engine, MODEL, [*tokens, *said, 65]) == 64  # 60 + 36 - 1 computed: not yet a third block


def test_prompt_logprobs_do_not_look_up(engine: Engine, prompt: Prompt) -> None:
    tokens = prompt(70)
    _cached(engine, MODEL, tokens)
    assert _cached(engine, MODEL, tokens, prompt_logprobs=0) == 0


def test_reload_under_the_same_name_and_path_hits_stale_blocks(
    engine: Engine, adapter: Callable[..., Path], prompt: Prompt, tmp_path: Path
) -> None:
    name, path, tokens = engine.fresh("stale"), adapter(seed=1), prompt(70)
    engine.load(name, path)
    assert _cached(engine, name, tokens) == 0
    engine.unload(name)
    adapter_bytes = adapter(seed=2) / "adapter_model.safetensors"
    shutil.copy(adapter_bytes, path / "adapter_model.safetensors")
    engine.load(name, path)
    assert _cached(engine, name, tokens) == 64
    engine.unload(name)
    engine.load(name, shutil.copytree(path, tmp_path / "elsewhere"))
    assert _cached(engine, name, tokens) == 0
    engine.unload(name)


def test_hashes_can_be_recomputed(engine: Engine, loaded: Load, prompt: Prompt, events: Listener) -> None:
    name = loaded()
    lora = (name, engine.listed()[name])
    tokens = prompt(100)
    engine.complete(MODEL, tokens)
    engine.complete(name, tokens)
    engine.complete(name, tokens, cache_salt="s1")
    base, plain, salted = _of(events.until(_stored(3)), "BlockStored")
    assert base["block_hashes"] == chain(tokens, BLOCK_SIZE)
    assert plain["block_hashes"] == chain(tokens, BLOCK_SIZE, lora=lora)
    assert salted["block_hashes"] == chain(tokens, BLOCK_SIZE, lora=lora, salt="s1")
    assert (base["lora_name"], base["lora_id"]) == (None, None)
    assert plain["lora_name"] == name
    assert plain["lora_id"] in engine.resident()
    assert base["extra_keys"] == [None] * 3
    assert plain["extra_keys"] == [[name]] * 3
    assert salted["extra_keys"] == [[name, "s1"], [name], [name]]


def test_the_whole_of_a_stored_event(engine: Engine, prompt: Prompt, events: Listener) -> None:
    tokens = prompt(70)
    engine.complete(MODEL, tokens)
    (batch,) = events.until(_stored(1))
    timestamp, batch_events, rank = batch.decoded
    assert isinstance(timestamp, float)
    assert rank == 0
    expected = {
        "type": "BlockStored",
        "block_hashes": chain(tokens, BLOCK_SIZE),
        "parent_block_hash": None,
        "token_ids": tokens[:64],
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None, None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    assert [event for event in batch_events if event["type"] == "BlockStored"] == [expected]
    assert list(batch_events[-1]) == list(expected), "the order of fields on the wire"


def test_the_encoder_writes_the_same_bytes(engine: Engine, prompt: Prompt, events: Listener) -> None:
    """What the engine sent, read by the simulator's types and written again, is what the engine sent."""
    from adaptersync_tools.simulator import kv_wire

    engine.complete(MODEL, prompt(70), cache_salt="bytes")
    for batch in events.until(_stored(1)):
        assert kv_wire.encode(kv_wire.decode(batch.payload)) == batch.payload


def test_later_blocks_name_their_parent(engine: Engine, prompt: Prompt, events: Listener) -> None:
    tokens = prompt(62)
    answer = engine.complete(MODEL, tokens, max_tokens=36, return_token_ids=True, ignore_eos=True)
    said = answer["choices"][0]["token_ids"]
    hashes = chain([*tokens, *said], BLOCK_SIZE)
    first, second, third = _of(events.until(_stored(3)), "BlockStored")
    assert [event["block_hashes"] for event in (first, second, third)] == [[digest] for digest in hashes]
    assert [event["parent_block_hash"] for event in (first, second, third)] == [None, *hashes[:2]]
    assert second["token_ids"] == [*tokens, *said][32:64]


def test_a_block_computed_twice_is_stored_twice(engine: Engine, prompt: Prompt, events: Listener) -> None:
    tokens = prompt(64)
    engine.complete(MODEL, tokens)
    engine.complete(MODEL, tokens)
    first, second = _of(events.until(_stored(2)), "BlockStored")
    assert second["block_hashes"] == first["block_hashes"][1:]
    assert second["parent_block_hash"] == first["block_hashes"][0]


def test_sequence_numbers_start_at_zero_and_have_no_gap(engine: Engine, prompt: Prompt, events: Listener) -> None:
    engine.complete(MODEL, prompt(40))
    live = events.until(_stored(1))
    replayed = events.replay(0)
    assert [batch.sequence for batch in replayed] == list(range(len(replayed)))
    assert replayed[-1] == live[-1]


def test_replay_gives_what_was_missed(engine: Engine, prompt: Prompt, events: Listener) -> None:
    for _ in range(3):
        engine.complete(MODEL, prompt(40))
    live = events.until(_stored(3))
    assert events.replay(live[1].sequence) == live[1:]
    assert events.replay(live[-1].sequence + 1) == []


def test_a_reset_is_told_with_the_next_batch(engine: Engine, prompt: Prompt, events: Listener) -> None:
    tokens = prompt(40)
    engine.complete(MODEL, tokens)
    events.until(_stored(1))
    assert engine.post("/reset_prefix_cache").json == {"success": True}
    assert not events.pending(0.5)
    assert _cached(engine, MODEL, tokens) == 0
    (batch,) = events.until(_stored(1))
    assert [event["type"] for event in batch.events] == ["AllBlocksCleared", "BlockStored"]


def test_eviction_takes_the_least_recently_used_tail_first(engine: Engine, prompt: Prompt, events: Listener) -> None:
    engine.post("/reset_prefix_cache")
    old, young = prompt(3 * BLOCK_SIZE + 1), prompt(3 * BLOCK_SIZE + 1)
    engine.complete(MODEL, old)
    engine.complete(MODEL, young)
    engine.complete(MODEL, old)  # used again: now the younger one is the older
    # Each filler of 15 blocks and a bit leaves 15 cached blocks behind; the pool has one null block.
    fillers = -(-(NUM_BLOCKS - 1) // 15)
    for _ in range(fillers):
        engine.complete(MODEL, prompt(15 * BLOCK_SIZE + 1))
    removed = _of(events.until(_stored(2 + fillers)), "BlockRemoved")
    assert all(event.keys() == {"type", "block_hashes", "medium", "group_idx"} for event in removed)
    order = [digest for event in removed for digest in event["block_hashes"]]
    expected = [*reversed(chain(young, BLOCK_SIZE)), *reversed(chain(old, BLOCK_SIZE))]
    assert order[: len(expected)] == expected
