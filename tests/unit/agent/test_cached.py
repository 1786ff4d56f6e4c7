"""Whatever becomes of its messages on the way, an engine is never believed to hold what it does not."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptersync.agent.cached import Cache, Stream
from adaptersync.agent.kv_events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, read_batch
from adaptersync_core.blocks import block_hashes, chained, root
from adaptersync_tools.simulator import kv_wire
from adaptersync_tools.simulator.prefix_cache import PrefixCache, Scope, Table, external
from adaptersync_tools.simulator.prefix_cache import block_hashes as engine_hashes

SIZE = 2
BLOCKS = 9
SCOPES = (
    Scope(),
    Scope(lora_name="one", lora_path="/one", lora_id=1),
    Scope(lora_name="two", lora_path="/two", lora_id=2),
    Scope(lora_name="one", lora_path="/one", lora_id=1, salt="s"),
)


class Engine:
    """vLLM's prefix cache as the simulator has it, and its publisher: numbers from 0, a buffer of the last batches."""

    def __init__(self, *, began_at: float, buffer: int) -> None:
        self.cache = PrefixCache(block_size=SIZE, blocks=BLOCKS)
        self.running: list[Table] = []
        self.sent: list[tuple[int, bytes]] = []
        self.buffer = buffer
        self.now = began_at
        self.known: dict[int, tuple[str, bytes]] = {}

    def run(self, tokens: Sequence[int], scope: Scope, *, keep: bool) -> None:
        full = len(tokens) // SIZE
        while self.running and self.cache.free < full + 1:
            self.end()
        table = self.cache.open(tokens, scope)
        half = max(len(table.blocks) * SIZE, len(tokens) // 2)
        self.cache.extend(table, tokens, half)  # two steps: the later blocks name their parent
        self.publish()
        self.cache.extend(table, tokens, max(half, len(tokens)))
        self.running.append(table)
        if not keep:
            self.cache.close(self.running.pop())
        if scope.salt is None:
            ours = chained(root(scope.lora_name or "base"), tokens, SIZE)
            for theirs, digest in zip(engine_hashes(tokens, SIZE, scope), ours, strict=True):
                self.known[external(theirs)] = (scope.lora_name or "base", digest)
        self.publish()

    def end(self) -> None:
        if self.running:
            self.cache.close(self.running.pop(0))

    def publish(self) -> None:
        if events := self.cache.take_events():
            self.now += 1.0
            batch = kv_wire.KVEventBatch(ts=self.now, events=list(events), data_parallel_rank=0)
            self.sent.append((len(self.sent), kv_wire.encode(batch)))

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        return [one for one in self.sent[-self.buffer :] if one[0] >= start]

    def truth(self) -> set[tuple[str, bytes]]:
        return {self.known[external(digest)] for digest in self.cache._by_hash if external(digest) in self.known}


def shown(cache: Cache) -> set[tuple[str, bytes]]:
    return {(version, digest) for version, held in cache.held.items() for digest in held}


class Reader:
    """What the agent does with messages, without sockets."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.cache = Cache(base_model="base", depth=100)
        self.stream = Stream(self.cache, 0)
        self.told: set[tuple[str, bytes]] = set()

    def receive(self, engine: Engine, message: tuple[int, bytes]) -> None:
        sequence, batch = message[0], read_batch(message[1])
        if not self.stream.offer(sequence, batch):
            self.catch_up(engine)
            self.stream.accept(sequence, batch)
        if self.stream.doubtful:
            self.stream.begin_again()
            self.catch_up(engine)

    def catch_up(self, engine: Engine) -> None:
        for sequence, payload in engine.replay(self.stream.expected):
            self.stream.accept(sequence, read_batch(payload))

    def look(self, engine: Engine) -> None:
        """At the engine's process: numbers alone do not show another one that has said as much as the one before."""
        if engine is not self.engine:
            self.engine = engine
            self.cache.clear_all()
            self.stream = Stream(self.cache, 0)
            self.catch_up(engine)

    def write(self) -> None:
        """As the table is written: only what changed."""
        for version, digests in self.cache.changed.items():
            for digest in digests:
                held = self.cache.holds(version, digest)
                (self.told.add if held else self.told.discard)((version, digest))
        self.cache.changed = {}


steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("run"),
            st.lists(st.integers(0, 1), min_size=1, max_size=9),
            st.sampled_from(SCOPES),
            st.booleans(),
        ),
        st.tuples(st.sampled_from(("end", "reset", "restart", "look", "write"))),
    ),
    max_size=40,
)
fates = st.lists(st.sampled_from(("comes", "lost", "lost", "twice")), max_size=80)


@given(steps, fates, st.sampled_from((1, 1000)))
@settings(max_examples=400, deadline=None)
def test_after_any_losses_repeats_and_restarts_it_knows_what_the_engine_has(
    steps: list[tuple[str, ...]], fates: list[str], buffer: int
) -> None:
    engine, place = Engine(began_at=0, buffer=buffer), 0
    reader = Reader(engine)
    for step in steps:
        if step[0] == "run":
            engine.run(step[1], step[2], keep=step[3])  # type: ignore[arg-type]
        elif step[0] == "end":
            engine.end()
        elif step[0] == "reset":
            engine.cache.reset()
            engine.publish()
        elif step[0] == "restart":
            engine, place = Engine(began_at=engine.now + 10, buffer=buffer), 0
        elif step[0] == "look":
            reader.look(engine)
        else:
            reader.write()
        for message in engine.sent[place:]:
            fate = fates.pop() if fates else "comes"
            for _ in range({"lost": 0, "comes": 1, "twice": 2}[fate]):
                reader.receive(engine, message)
        place = len(engine.sent)
    reader.look(engine)
    reader.catch_up(engine)
    assert shown(reader.cache) <= engine.truth()
    if reader.stream.whole:
        assert shown(reader.cache) == engine.truth()
    assert reader.stream.whole or buffer == 1
    reader.write()
    assert reader.told == shown(reader.cache)


def stored(*hashes: int, parent: int | None = None, tokens: Sequence[int] = (), **fields: object) -> BlockStored:
    made = tokens or [token for name in hashes for token in (name, name)]
    return BlockStored(
        block_hashes=list(hashes),
        parent_block_hash=parent,
        token_ids=list(made),
        block_size=SIZE,
        **fields,  # type: ignore[arg-type]
    )


def digests(*names: int, version: str = "base") -> set[tuple[str, bytes]]:
    """The last block of a prompt whose blocks are filled with these numbers."""
    tokens = [token for name in names for token in (name, name)]
    return {(version, digest) for digest in chained(root(version), tokens, SIZE)}


@pytest.fixture
def cache() -> Cache:
    return Cache(base_model="base", depth=100)


def test_blocks_are_found_by_the_hashes_that_routers_make_of_prompts(cache: Cache) -> None:
    cache.apply(
        0, [stored(1, 2), stored(3, parent=2), stored(7, lora_name="run-v1", lora_id=4, extra_keys=[["run-v1"]])]
    )
    assert {digest.hex() for digest in cache.held["base"]} == set(block_hashes("base", [1, 1, 2, 2, 3, 3], SIZE, 9))
    assert {digest.hex() for digest in cache.held["run-v1"]} == set(block_hashes("run-v1", [7, 7], SIZE, 9))


def test_a_block_is_held_until_its_last_copy_is_gone(cache: Cache) -> None:
    gone, gone_of_other_group = BlockRemoved(block_hashes=[1]), BlockRemoved(block_hashes=[1], group_idx=1)
    for event in (stored(1), stored(1), gone, stored(1, group_idx=1), gone):
        cache.apply(0, [event])
        assert shown(cache) == digests(1)
    cache.apply(0, [gone_of_other_group])
    assert shown(cache) == set()


def test_ranks_clear_for_themselves(cache: Cache) -> None:
    cache.apply(0, [stored(1), stored(2)])
    cache.apply(1, [stored(2)])
    cache.apply(0, [AllBlocksCleared()])
    assert shown(cache) == digests(2)


@pytest.mark.parametrize(
    "hidden",
    [
        stored(1, lora_name="a", lora_id=1, extra_keys=[["a", "salt"]]),
        stored(1, extra_keys=[["salt"]]),
        stored(1, extra_keys=[[["image", 3]]]),
        stored(1, lora_id=3),
        stored(1, tokens=[1, 1, 1]),
    ],
)
def test_what_no_router_can_ask_for_is_not_shown_nor_is_what_follows_it(cache: Cache, hidden: BlockStored) -> None:
    follows = stored(
        2, parent=1, lora_name=hidden.lora_name, extra_keys=[[hidden.lora_name]] if hidden.lora_name else None
    )
    assert cache.apply(0, [hidden, follows]) == 0
    assert shown(cache) == set()


def test_blocks_before_an_image_are_shown(cache: Cache) -> None:
    cache.apply(0, [stored(1, 2, 3, extra_keys=[None, [["image", 3]], None])])
    assert shown(cache) == digests(1)


def test_what_is_not_in_the_memory_it_computes_from_is_not_cached(cache: Cache) -> None:
    cache.apply(0, [stored(1, medium="GPU"), stored(2, medium="CPU"), BlockRemoved(block_hashes=[1], medium="CPU")])
    assert shown(cache) == digests(1)


def test_nothing_deeper_than_routers_look_is_shown() -> None:
    cache = Cache(base_model="base", depth=3)
    assert cache.apply(0, [stored(1, 2), stored(3, 4, parent=2), stored(5, parent=4), stored(6, parent=5)]) == 0
    assert shown(cache) == digests(1, 2, 3)


def test_a_block_whose_beginning_is_not_known_is_shown_once_it_is(cache: Cache) -> None:
    assert cache.apply(0, [stored(2, parent=1)]) == 1
    assert shown(cache) == set()
    assert cache.apply(0, [stored(1), stored(2, parent=1), BlockRemoved(block_hashes=[2])]) == 0
    assert shown(cache) == digests(1, 2), "of the two copies one is left"


def batch(*events: BlockStored | BlockRemoved, ts: float = 1.0) -> Batch:
    return Batch(ts=ts, events=list(events))


def test_an_unknown_parent_has_all_built_anew_once(cache: Cache) -> None:
    stream = Stream(cache, 0)
    assert stream.offer(0, batch(stored(2, parent=1)))
    assert stream.doubtful
    stream.begin_again()
    stream.accept(0, batch(stored(2, parent=1)))
    assert not stream.doubtful, "the engine said it again"


def test_a_hole_that_cannot_be_filled_costs_all(cache: Cache) -> None:
    stream = Stream(cache, 0)
    assert stream.offer(0, batch(stored(1), ts=1))
    assert not stream.offer(2, batch(stored(2), ts=3))
    stream.accept(2, batch(stored(2), ts=3))
    assert shown(cache) == digests(2)
    assert (stream.gaps, stream.losses, stream.whole) == (1, 1, False)


def test_a_lower_number_of_a_later_time_is_another_life(cache: Cache) -> None:
    stream = Stream(cache, 0)
    for sequence in range(3):
        stream.offer(sequence, batch(stored(sequence), ts=sequence))
    assert stream.offer(1, batch(stored(9), ts=1.0)), "seen before"
    assert shown(cache) == digests(0) | digests(1) | digests(2)
    assert stream.offer(0, batch(stored(5), ts=100.0))
    assert shown(cache) == digests(5)


def test_events_of_a_busy_engine_are_taken_fast() -> None:
    """Within an order of magnitude: a busy engine stores some thousands of blocks a second."""
    source, cache = random.Random(1), Cache(base_model="base", depth=512)
    stream = Stream(cache, 0)
    payloads = []
    for sequence in range(200):
        tokens = [source.randrange(150_000) for _ in range(100 * 16)]
        made = kv_wire.BlockStored(
            block_hashes=[source.getrandbits(64) for _ in range(100)],
            parent_block_hash=None,
            token_ids=tokens,
            block_size=16,
            lora_id=1,
            medium="GPU",
            lora_name="run-v1",
            extra_keys=[("run-v1",)] * 100,
        )
        payloads.append(kv_wire.encode(kv_wire.KVEventBatch(ts=float(sequence), events=[made])))
    began = time.process_time()
    for sequence, payload in enumerate(payloads):
        assert stream.offer(sequence, read_batch(payload))
    spent = time.process_time() - began
    assert cache.blocks == 20_000
    assert spent < 4.0, f"{20_000 / spent:.0f} blocks a second"


@pytest.mark.parametrize(
    "wire",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1.0, [["BlockRemoved", [1], "GPU"]]]),  # the form of older releases
        msgspec.msgpack.encode([1.0, [{"type": "BlockMoved", "block_hashes": [1]}]]),
        msgspec.msgpack.encode(
            [1.0, [{"type": "BlockStored", "block_hashes": [1], "token_ids": [-1], "block_size": 1}]]
        ),
        msgspec.msgpack.encode({"ts": 1.0}),
    ],
)
def test_what_is_not_understood_is_refused(wire: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        read_batch(wire)


def test_newer_fields_and_raw_hashes_are_fine(cache: Cache) -> None:
    event = {
        "type": "BlockStored",
        "block_hashes": [b"\x01" * 32],
        "token_ids": [1, 1],
        "block_size": 2,
        "session_id": "new",
        "locality": {"x": 1},
    }
    taken = read_batch(msgspec.msgpack.encode([1.0, [event, {"type": "AllBlocksCleared", "new": 1}], 0, "newer"]))
    cache.apply(0, taken.events[:1])
    assert shown(cache) == digests(1)
