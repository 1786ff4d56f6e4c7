"""What a vLLM says of its KV cache, as it stands on the wire. Pure.

A message is a topic, a sequence number and a batch in MessagePack: an array of time, events and rank, each event a map
that names its kind (vLLM 0.32). Fields that are not used here are skipped, so newer ones may be there. What cannot be
read is refused whole: a removal that was overlooked would be a lie later.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
BlockHash = int | bytes  # vLLM's own, of which only equality matters


class BlockStored(Struct, frozen=True, tag=True, gc=False):
    """Blocks of one request that follow each other. No parent: they are its first ones.

    `extra_keys` has for each block what separates it beside its tokens, the adapter's name among them.
    """

    block_hashes: list[BlockHash]
    token_ids: list[TokenId]
    block_size: int
    parent_block_hash: BlockHash | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    medium: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(Struct, frozen=True, tag=True, gc=False):
    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(Struct, frozen=True, tag=True, gc=False):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(Struct, frozen=True, array_like=True, gc=False):
    """What one step of the engine changed; `ts` is its wall clock in seconds."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


_decoder = msgspec.msgpack.Decoder(Batch)


def read_batch(payload: bytes) -> Batch:
    """msgspec.MsgspecError for what is no batch of these kinds."""
    return _decoder.decode(payload)
