"""What is remembered of a request's prompts, for the rest of its group."""

from __future__ import annotations

import msgspec
import pytest

from adaptersync.router import chains
from adaptersync.router.asked import Asked
from adaptersync.router.chains import KEPT, LONGEST, Chains, RememberedChains
from adaptersync.router.prompts import Prompts, Reader
from adaptersync_core.blocks import block_hashes

IDS = list(range(40))


class CountingReader(Reader):
    def __init__(self) -> None:
        super().__init__(None)
        self.read_count = 0

    async def read(self, asked: Asked, *, chat: bool, limit: int) -> Prompts:
        self.read_count += 1
        return await super().read(asked, chat=chat, limit=limit)


@pytest.fixture
def reader() -> CountingReader:
    return CountingReader()


@pytest.fixture
def memory(reader: CountingReader) -> RememberedChains:
    return RememberedChains(reader, blocks=4)


async def of(
    memory: RememberedChains, version: str = "v", size: int = 8, *, chat: bool = False, **fields: object
) -> Chains:
    return await memory.chains(
        version, msgspec.json.decode(msgspec.json.encode(fields), type=Asked), chat=chat, block_size=size
    )


async def test_a_group_is_read_once(memory: RememberedChains, reader: CountingReader) -> None:
    first = await of(memory, prompt=IDS)
    assert first.first == tuple(block_hashes("v", IDS, 8, 4))
    assert (first.tokens, first.read, first.weight, first.others) == (32, "ids", 1, ())
    assert await of(memory, prompt=IDS, logprobs=1) is first
    assert reader.read_count == 1


@pytest.mark.parametrize(
    "change",
    [
        {"version": "w"},
        {"size": 4},
        {"prompt": [*IDS[:-1], 7]},
        {"n": 2},
        {"best_of": 3},
        {"suffix": "x"},
        {"truncate_prompt_tokens": 8},
        {"add_special_tokens": False},
    ],
)
async def test_what_changes_the_chains_is_told_apart(memory: RememberedChains, change: dict[str, object]) -> None:
    """Also where a reader without a tokenizer would not look at it."""
    known = await of(memory, prompt=IDS)
    asked = {"prompt": IDS, **change}
    found = await of(memory, **asked)  # type: ignore[arg-type]
    assert found is not known
    fresh = await of(RememberedChains(Reader(None), blocks=4), **asked)  # type: ignore[arg-type]
    assert found == fresh


async def test_a_batch_keeps_its_other_prompts(memory: RememberedChains) -> None:
    found = await of(memory, prompt=[IDS[:16], IDS[16:32]], n=2)
    assert found.first == tuple(block_hashes("v", IDS[:16], 8, 4))
    assert found.others == (tuple(block_hashes("v", IDS[16:32], 8, 4)),)
    assert (found.weight, found.alike) == (4, 2)


async def test_what_is_kept_is_bounded(
    memory: RememberedChains, reader: CountingReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chains, "KEPT", 2)
    for number in (1, 2, 3):
        await of(memory, prompt=[number] * 16)
    await of(memory, prompt=[3] * 16)
    assert reader.read_count == 3
    await of(memory, prompt=[1] * 16)
    assert reader.read_count == 4
    for _ in range(2):
        await of(memory, prompt="x" * LONGEST)
        await of(memory, chat=True, messages=[{"role": "user", "content": "x" * 64}])
        await of(memory, prompt="x", suffix="y" * LONGEST)
    assert reader.read_count == 10
    assert KEPT * LONGEST <= 8 << 20
