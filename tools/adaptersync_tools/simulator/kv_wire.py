"""KV-cache events on the wire, byte for byte as vLLM 0.32 encodes them.

A batch is an array `[ts, events, data_parallel_rank]`; each event is a map whose `type` is the class name.
Field order matters: msgspec writes fields in the order they are declared and leaves out defaults at the end
of the declaration, which is what makes the bytes comparable.
"""

import msgspec


class BlockStored(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Consecutive new blocks of one request. `parent_block_hash` is None iff they start at block 0."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    pass


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(KVEventBatch).decode
