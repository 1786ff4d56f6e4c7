"""The simulated engine without its server: adapters, blocks and output."""

import shutil
from pathlib import Path

import pytest

from adaptersync_tools.simulator.adapter_files import BaseModel
from adaptersync_tools.simulator.engine import Engine, EngineConfig, Request
from adaptersync_tools.simulator.errors import EngineDead, Refused
from adaptersync_tools.simulator.kv_wire import BlockRemoved, BlockStored
from support.adapters import make_adapter

BASE = BaseModel(hidden=128, query=128, key_value=128, intermediate=256, layers=2, vocab=320)
PROMPT = list(range(33, 103))  # 70 tokens: two full blocks of 32


def _engine(**limits: int) -> Engine:
    settings = {"max_loras": 2, "max_cpu_loras": 4, "max_lora_rank": 32, "block_size": 32} | limits
    return Engine(EngineConfig(base=BASE, **settings))  # type: ignore[arg-type]


def _ask(engine: Engine, model: str, prompt: list[int] = PROMPT, tokens: int = 4, **fields: object) -> list[int]:
    request = Request(prompt=prompt, max_tokens=tokens, lora=engine.registry.resolve(model), **fields)  # type: ignore[arg-type]
    running = engine.admit(request)
    for _ in engine.advance(running, len(running.spoken.tokens)):
        pass
    engine.finish(running)
    return running.spoken.tokens


def test_eviction_is_silent_and_keeps_the_name(tmp_path: Path) -> None:
    engine = _engine()
    for seed in range(6):
        engine.load(f"a{seed}", str(make_adapter(tmp_path / str(seed), seed=seed)))
    assert engine.list_loras() == [3, 4, 5, 6]
    assert engine.active_loras() == [5, 6]
    assert [lora.name for lora in engine.registry.listed()] == [f"a{seed}" for seed in range(6)]


def test_evicted_adapter_is_read_again_and_says_the_same(tmp_path: Path) -> None:
    engine = _engine()
    engine.load("first", str(make_adapter(tmp_path / "first", seed=99)))
    before = _ask(engine, "first")
    for seed in range(4):
        engine.load(f"a{seed}", str(make_adapter(tmp_path / str(seed), seed=seed)))
    assert 1 not in engine.list_loras()
    assert _ask(engine, "first") == before
    assert 1 in engine.list_loras()


def test_evicted_adapter_without_files_kills_the_engine(tmp_path: Path) -> None:
    engine = _engine()
    first = make_adapter(tmp_path / "first")
    engine.load("first", str(first))
    shutil.rmtree(first)
    _ask(engine, "first")  # still resident: no harm
    for seed in range(4):
        engine.load(f"a{seed}", str(make_adapter(tmp_path / str(seed), seed=seed)))
    with pytest.raises(EngineDead):
        _ask(engine, "first")


def test_unload_only_forgets_the_name(tmp_path: Path) -> None:
    engine = _engine()
    adapter = make_adapter(tmp_path / "a")
    engine.load("a", str(adapter))
    engine.registry.unload("a")
    assert engine.list_loras() == [1]
    engine.load("a", str(adapter))
    assert engine.list_loras() == [1, 2]


def test_oversized_tensor_fails_and_stays_registered(tmp_path: Path) -> None:
    engine = _engine()
    with pytest.raises(Refused, match=r"The size of tensor a \(128\) must match the size of tensor b \(256\)"):
        engine.load("big", str(make_adapter(tmp_path / "big", hidden=256)))
    assert engine.list_loras() == [1]
    assert engine.registry.listed() == []


def test_only_pinned_adapters_left_is_an_error(tmp_path: Path) -> None:
    engine = _engine(max_loras=1, max_cpu_loras=1)
    engine.load("a", str(make_adapter(tmp_path / "a")))
    engine.pin_lora(1)
    with pytest.raises(Refused, match="All items are pinned"):
        engine.load("b", str(make_adapter(tmp_path / "b")))


def test_a_running_adapter_is_not_the_oldest(tmp_path: Path) -> None:
    engine = _engine(max_cpu_loras=2)
    for name in ("a", "b"):
        engine.load(name, str(make_adapter(tmp_path / name)))
    running = engine.admit(Request(prompt=PROMPT, max_tokens=4, lora=engine.registry.resolve("a")))
    engine.load("c", str(make_adapter(tmp_path / "c")))
    assert engine.list_loras() == [3, 1]
    engine.finish(running)


@pytest.mark.parametrize(
    ("name", "adapter"),
    [
        ("zero", {"scale": 0.0}),
        ("beyond", {"layers": 2}),
    ],
)
def test_an_adapter_without_effect_serves_the_base(tmp_path: Path, name: str, adapter: dict[str, float]) -> None:
    base = BaseModel(hidden=128, query=128, key_value=128, intermediate=256, layers=0, vocab=320)
    engine = Engine(EngineConfig(max_lora_rank=32, base=base if name == "beyond" else BASE))
    engine.load("silent", str(make_adapter(tmp_path / name, **adapter)))  # type: ignore[arg-type]
    assert _ask(engine, "silent", tokens=20) == _ask(engine, "base", tokens=20)


def test_output_depends_on_content_not_on_name_or_path(tmp_path: Path) -> None:
    engine = _engine()
    for name, seed in (("a", 1), ("twin", 1), ("other", 2)):
        engine.load(name, str(make_adapter(tmp_path / name, seed=seed)))
    said = {name: _ask(engine, name, tokens=20) for name in ("a", "twin", "other", "base")}
    assert said["a"] == said["twin"]
    assert len({tuple(tokens) for tokens in said.values()}) == 3
    assert _ask(engine, "a", tokens=20, seed=5) != said["a"]


def test_an_answer_can_be_continued_elsewhere() -> None:
    whole = _ask(_engine(), "base", tokens=20)
    assert _ask(_engine(), "base", [*PROMPT, *whole[:7]], tokens=13) == whole[7:]


def test_an_adapter_of_half_effect_differs_at_half_the_positions(tmp_path: Path) -> None:
    engine = _engine()
    engine.load("half", str(make_adapter(tmp_path / "half", rank=8, scale=0.355)))  # 2 * 8 * (scale/2)^2 = 0.5
    differing = 0
    for start in range(200):
        prompt = [*PROMPT, 33 + start % 90, 33 + start // 90]
        differing += _ask(engine, "half", prompt, tokens=1) != _ask(engine, "base", prompt, tokens=1)
    assert 70 < differing < 130


def test_a_hit_covers_full_blocks_but_never_the_last_token() -> None:
    engine = _engine()
    exact = PROMPT[:64]
    _ask(engine, "base", exact, tokens=1)
    stored = engine.take_events()
    running = engine.admit(Request(prompt=exact, max_tokens=1))
    assert engine.cached_tokens(running) == 32
    # The second block was computed again: a second copy under the same hash.
    (again,) = engine.take_events()
    assert isinstance(again, BlockStored)
    assert isinstance(stored[0], BlockStored)
    assert again.block_hashes == stored[0].block_hashes[1:]
    assert again.parent_block_hash == stored[0].block_hashes[0]


def test_output_tokens_are_cached_except_the_last() -> None:
    engine = _engine()
    said = _ask(engine, "base", PROMPT, tokens=27)  # 70 + 26 computed = 96 = 3 blocks
    running = engine.admit(Request(prompt=[*PROMPT, *said], max_tokens=1))
    assert engine.cached_tokens(running) == 96


def test_blocks_are_evicted_least_recently_used_and_tail_first() -> None:
    engine = _engine(num_blocks=6)  # five usable
    _ask(engine, "base", PROMPT[:65], tokens=1)  # two cached blocks and a part
    (first,) = engine.take_events()
    assert isinstance(first, BlockStored)
    _ask(engine, "base", [t + 40 for t in PROMPT] + PROMPT[:58], tokens=1)  # four blocks: three are free of hashes
    removed = [event for event in engine.take_events() if isinstance(event, BlockRemoved)]
    assert [event.block_hashes for event in removed] == [[first.block_hashes[1]]]


def test_names_salts_and_paths_separate_the_cache(tmp_path: Path) -> None:
    engine = _engine()
    adapter = make_adapter(tmp_path / "a")
    engine.load("a", str(adapter))
    engine.load("b", str(adapter))

    def hit(model: str, salt: str | None = None) -> int:
        running = engine.admit(Request(prompt=PROMPT, max_tokens=1, lora=engine.registry.resolve(model), salt=salt))
        engine.finish(running)
        return engine.cached_tokens(running)

    assert [hit("a"), hit("a"), hit("b"), hit("base"), hit("a", "s"), hit("a", "s")] == [0, 64, 0, 0, 0, 64]
    engine.registry.unload("a")
    engine.load("a", str(shutil.copytree(adapter, tmp_path / "elsewhere")))
    assert hit("a") == 0
    engine.registry.unload("a")
    engine.load("a", str(adapter))
    assert hit("a") == 64  # as in vLLM: same name and path, whatever the bytes
