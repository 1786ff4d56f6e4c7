"""Chained hashes over complete blocks of a prompt.

The n-th hash stands for the first n blocks, so equal hashes mean equal prefixes. The chain is seeded with the adapter
id: the same prompt under two versions shares nothing, as in the engine's own cache. These are the router's hashes, not
vLLM's; what an engine evicts is mapped by its agent.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 8  # 64 bits: a false match needs about four billion blocks of one version, and costs one cold prefill


def block_hashes(adapter_id: str, tokens: Sequence[int], block_size: int, limit: int) -> list[str]:
    """Hashes in hex of the first `limit` complete blocks of `block_size` token ids (each 0 to 2**32 - 1)."""
    if block_size < 1:
        return []  # an engine that does not say how large its blocks are
    width = block_size * 4
    count = min(len(tokens) // block_size, limit)
    raw = array("I", tokens[: count * block_size]).tobytes()
    parent = blake2b(adapter_id.encode(), digest_size=HASH_BYTES).digest()
    hashes = []
    for start in range(0, count * width, width):
        parent = blake2b(parent + raw[start : start + width], digest_size=HASH_BYTES).digest()
        hashes.append(parent.hex())
    return hashes
