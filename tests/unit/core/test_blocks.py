"""Chained block hashes: equal hashes mean equal prefixes of one version, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from adaptersync_core.blocks import block_hashes

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=64)


@given(tokens=TOKENS, size=st.integers(1, 20), limit=st.integers(0, 10))
def test_one_hash_for_each_complete_block(tokens: list[int], size: int, limit: int) -> None:
    hashes = block_hashes("run-v1-0123456789ab", tokens, size, limit)
    assert len(hashes) == min(len(tokens) // size, limit)
    assert all(len(bytes.fromhex(text)) == 8 for text in hashes)


@given(first=TOKENS, second=TOKENS, size=st.integers(1, 8))
def test_hashes_agree_exactly_as_far_as_the_blocks_do(first: list[int], second: list[int], size: int) -> None:
    one, two = (block_hashes("a-v1-0123456789ab", tokens, size, 99) for tokens in (first, second))
    for index, (left, right) in enumerate(zip(one, two, strict=False)):
        assert (left == right) == (first[: (index + 1) * size] == second[: (index + 1) * size])


@given(tokens=TOKENS.filter(bool), size=st.integers(1, 4))
def test_two_versions_share_nothing(tokens: list[int], size: int) -> None:
    assume(len(tokens) >= size)
    one = block_hashes("run-v1-0123456789ab", tokens, size, 99)
    two = block_hashes("run-v2-0123456789ab", tokens, size, 99)
    assert not set(one) & set(two)


def test_a_later_block_depends_on_the_ones_before() -> None:
    one = block_hashes("v", [1, 2, 3, 4], 2, 9)
    two = block_hashes("v", [9, 9, 3, 4], 2, 9)
    assert one[1] != two[1]


def test_the_hash_is_the_same_in_every_process_and_release() -> None:
    assert block_hashes("run-v1-0123456789ab", range(8), 4, 9) == ["8d9eec666905e633", "136234f38931f441"]


@pytest.mark.parametrize("size", [0, -1])
def test_an_engine_that_does_not_say_its_block_size_has_no_blocks(size: int) -> None:
    assert block_hashes("v", [1, 2, 3], size, 9) == []


@pytest.mark.parametrize("token", [-1, 2**32])
def test_what_is_no_token_id_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        block_hashes("v", [token], 1, 1)
