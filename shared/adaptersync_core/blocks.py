"""Chained hashes over complete blocks of a prompt.

The n-th hash stands for the first n blocks, so equal hashes mean equal prefixes. The chain is seeded with the adapter
id: the same prompt under two versions shares nothing, as in the engine's own cache. These are our hashes, not vLLM's:
a router makes them of prompts, an agent of the tokens that its engine says it cached.

Where a router has no token ids it hashes the prompt's bytes. Such hashes end in `BY_BYTES`: no engine ever speaks of
them, so no agent can tell whether they are still true, and leaves them alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 8  # 64 bits: a false match needs about four billion blocks of one version, and costs one cold prefill
BY_BYTES = "~"


def block_hashes(
    adapter_id: str, tokens: Sequence[int], block_size: int, limit: int, *, by_bytes: bool = False
) -> list[str]:
    """Hashes in hex of the first `limit` complete blocks of `block_size` token ids (each 0 to 2**32 - 1).

    `by_bytes`: the numbers stand for text, not for tokens.
    """
    if block_size < 1:
        return []  # an engine that does not say how large its blocks are
    hashes = chained(root(adapter_id), tokens[: limit * block_size], block_size)
    mark = BY_BYTES if by_bytes else ""
    return [digest.hex() + mark for digest in hashes]


def root(adapter_id: str) -> bytes:
    """What the first block of every prompt of a version follows."""
    return blake2b(adapter_id.encode(), digest_size=HASH_BYTES).digest()


def chained(parent: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Hashes of the complete blocks of `tokens`, which follow the block with the hash `parent`."""
    width = block_size * 4
    raw = array("I", tokens).tobytes()
    hashes = []
    for start in range(0, len(raw) - width + 1, width):
        parent = blake2b(parent + raw[start : start + width], digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes
