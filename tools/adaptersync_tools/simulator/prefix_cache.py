"""vLLM's prefix cache: a pool of blocks, found by chained hashes, evicted least recently used, tail first.

Block hashes are vLLM's own (`sha256` over pickles, no PYTHONHASHSEED), so that a consumer of KV events can be
held to them. Knows no requests and no time.
"""

import pickle
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256

import msgspec

from adaptersync_tools.simulator.kv_wire import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

MEDIUM = "GPU"  # what vLLM says on every backend
_LOW_64 = (1 << 64) - 1


def _digest(value: object) -> bytes:
    # The highest protocol has been 5 since Python 3.8; vLLM hashes whatever the highest one is.
    return sha256(pickle.dumps(value, protocol=5)).digest()


_ROOT = _digest("vllm-none-hash")


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """What separates equal tokens: the adapter's name and path, and the request's salt."""

    lora_name: str | None = None
    lora_path: str | None = None
    lora_id: int | None = None
    salt: str | None = None


def block_hashes(tokens: Sequence[int], block_size: int, scope: Scope) -> list[bytes]:
    """The chained hashes of all full blocks of `tokens`."""
    hashes: list[bytes] = []
    parent = _ROOT
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = _digest((parent, tuple(tokens[start : start + block_size]), _extra_keys(scope, start)))
        hashes.append(parent)
    return hashes


def _extra_keys(scope: Scope, start: int) -> tuple[tuple[str, ...], ...] | None:
    keys: list[tuple[str, ...]] = []
    if scope.lora_name is not None and scope.lora_path is not None:
        keys.append(("lora", scope.lora_name, scope.lora_path))
    if scope.salt is not None and start == 0:
        keys.append(("cache_salt", scope.salt))
    return tuple(keys) or None


def external(digest: bytes) -> int:
    """The form in which KV events carry a block hash: its low 64 bits."""
    return int.from_bytes(digest, "big") & _LOW_64


class Table:
    """The blocks of one request, in order; the first `cached` of them have a hash."""

    def __init__(self, scope: Scope, hit: Sequence[int], hashes: list[bytes], block_size: int) -> None:
        self.scope = scope
        self.block_size = block_size
        self.prompt_blocks = len(hashes)
        self.blocks = list(hit)
        self.hashes = hashes
        self.cached = len(hit)
        self.hit_blocks = len(hit)


class PrefixCache:
    """A bounded pool. A request opens a table, extends it as tokens are computed, and closes it."""

    def __init__(self, *, block_size: int, blocks: int) -> None:
        self.block_size = block_size
        self.capacity = blocks - 1  # block 0 is vLLM's null block
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks))
        self._users = [0] * blocks
        self._hash: list[bytes | None] = [None] * blocks
        self._by_hash: dict[bytes, OrderedDict[int, None]] = {}
        self._events: list[KVEvent] = []

    @property
    def free(self) -> int:
        return len(self._free)

    def open(self, tokens: Sequence[int], scope: Scope, *, look_up: bool = True) -> Table:
        """Find the longest cached prefix, at most all tokens but the last, and hold its blocks."""
        hashes = block_hashes(tokens, self.block_size, scope)
        hit: list[int] = []
        if look_up:
            for digest in hashes[: (len(tokens) - 1) // self.block_size]:
                copies = self._by_hash.get(digest)
                if copies is None:
                    break
                hit.append(next(iter(copies)))
        for block in hit:
            self._users[block] += 1
            self._free.pop(block, None)
        return Table(scope, hit, hashes, self.block_size)

    def extend(self, table: Table, tokens: Sequence[int], computed: int) -> None:
        """Give `table` room for `computed` tokens, and cache the blocks they fill.

        The caller has made sure that enough blocks are free. Equal blocks are not merged, as in vLLM.
        """
        for _ in range(len(table.blocks), -(-computed // self.block_size)):
            block, _none = self._free.popitem(last=False)
            self._forget(block)
            self._users[block] = 1
            table.blocks.append(block)
        full = computed // self.block_size
        if full <= table.cached:
            return
        while len(table.hashes) < full:
            start = len(table.hashes) * self.block_size
            parent = table.hashes[-1] if table.hashes else _ROOT
            block_tokens = tuple(tokens[start : start + self.block_size])
            table.hashes.append(_digest((parent, block_tokens, _extra_keys(table.scope, start))))
        first = table.cached
        for index in range(first, full):
            digest = table.hashes[index]
            self._hash[table.blocks[index]] = digest
            self._by_hash.setdefault(digest, OrderedDict())[table.blocks[index]] = None
        scope = table.scope
        keys = [_extra_keys(scope, index * self.block_size) for index in range(first, full)]
        self._events.append(
            BlockStored(
                block_hashes=[external(digest) for digest in table.hashes[first:full]],
                parent_block_hash=external(table.hashes[first - 1]) if first else None,
                token_ids=list(tokens[first * self.block_size : full * self.block_size]),
                block_size=self.block_size,
                lora_id=scope.lora_id,
                medium=MEDIUM,
                lora_name=scope.lora_name,
                # Events carry each key without its tag, and the adapter's name without its path.
                extra_keys=[tuple(key[1] for key in entry) if entry else None for entry in keys],
                group_idx=0,
                kv_cache_spec_kind="full_attention",
            )
        )
        table.cached = full

    def close(self, table: Table) -> None:
        """Let go of the blocks: those never filled are reused first, the cached ones last, tail first."""
        for block in reversed(table.blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                self._free[block] = None
                if self._hash[block] is None:
                    self._free.move_to_end(block, last=False)

    def reset(self) -> bool:
        """Forget every block; refused (False) while a request holds one."""
        if len(self._free) != self.capacity:
            return False
        self._by_hash.clear()
        self._hash = [None] * len(self._hash)
        self._events.append(AllBlocksCleared())
        return True

    def take_events(self) -> list[KVEvent]:
        events, self._events = self._events, []
        return events

    def _forget(self, block: int) -> None:
        digest = self._hash[block]
        if digest is None:
            return
        self._hash[block] = None
        copies = self._by_hash[digest]
        del copies[block]
        if not copies:
            del self._by_hash[digest]
        self._events.append(BlockRemoved(block_hashes=[external(digest)], medium=MEDIUM, group_idx=0))
