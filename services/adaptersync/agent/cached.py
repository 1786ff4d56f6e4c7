"""What one engine has cached, in our hashes, from its events in their order. Pure.

`Cache` knows the blocks, `Stream` the order in which one rank's batches belong. Neither knows sockets, Redis or time.

vLLM names blocks by hashes of its own; ours are made from the tokens that it tells, so its recipe may change. What a
router could not ask for is followed and never shown: blocks behind a salt or an image (*foreign*), blocks deeper than
routers look, and blocks whose beginning was stored before we listened.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from adaptersync.agent.kv_events import AllBlocksCleared, Batch, BlockHash, BlockRemoved, BlockStored, Event
from adaptersync_core.blocks import chained, root

DEVICE = ("GPU", None)  # what vLLM calls the memory that it computes from, on every backend

Key = tuple[BlockHash, int | None]  # vLLM's hash and the group of layers: each group stores and removes by itself


class _Block:
    """`copies` counts: two requests that computed the same block at once have one each. Foreign without a version."""

    __slots__ = ("copies", "depth", "digest", "version")

    def __init__(self, version: str, digest: bytes, depth: int) -> None:
        self.version = version
        self.digest = digest
        self.depth = depth
        self.copies = 1


class Cache:
    """Blocks of one rank, or of several together.

    `held` are those to be shown, by version, with how many of the engine's lead to each; `changed` is what became held,
    or ceased to be, since somebody took it, and `changed_at` the engine's time of the first of these changes.
    """

    def __init__(self, *, base_model: str = "", depth: int) -> None:
        self.base_model = base_model
        self._depth = depth
        self._ranks: dict[int, dict[Key, _Block]] = {}
        self.held: dict[str, Counter[bytes]] = {}
        self.changed: dict[str, set[bytes]] = {}
        self.changed_at = math.inf

    @property
    def blocks(self) -> int:
        return sum(len(held) for held in self.held.values())

    def holds(self, version: str, digest: bytes) -> bool:
        return digest in self.held.get(version, ())

    def apply(self, rank: int, events: Sequence[Event]) -> int:
        """Returns how many of the events follow a block that is not known."""
        orphans = 0
        for event in events:
            if isinstance(event, BlockStored):
                if event.medium in DEVICE:
                    orphans += self._store(self._ranks.setdefault(rank, {}), event)
            elif isinstance(event, BlockRemoved):
                if event.medium in DEVICE:
                    self._remove(self._ranks.setdefault(rank, {}), event)
            elif isinstance(event, AllBlocksCleared):
                self.clear(rank)
        return orphans

    def clear(self, rank: int) -> None:
        for block in self._ranks.pop(rank, {}).values():
            self._leave(block)

    def clear_all(self) -> None:
        for rank in list(self._ranks):
            self.clear(rank)

    def _store(self, blocks: dict[Key, _Block], event: BlockStored) -> bool:
        group, parent = event.group_idx, event.parent_block_hash
        before = None if parent is None else blocks.get((parent, group))
        version = event.lora_name or self.base_model
        if parent is None:
            digest, depth = root(version), 0
        elif before is not None:
            version, digest, depth = before.version, before.digest, before.depth
        else:
            version, digest, depth = "", b"", 0
        plain = min(_plain(event), self._depth - depth) if version else 0
        digests = chained(digest, event.token_ids[: plain * event.block_size], event.block_size) if plain > 0 else []
        for place, name in enumerate(event.block_hashes):
            key = (name, group)
            block = blocks.get(key)
            shown = place < len(digests)
            if block is None:
                block = blocks[key] = _Block("", b"", 0)
            else:
                block.copies += 1
            if shown and not block.version:  # new, or its beginning is known only now
                block.version, block.digest, block.depth = version, digests[place], depth + place + 1
                self._enter(block)
        return parent is not None and before is None

    def _remove(self, blocks: dict[Key, _Block], event: BlockRemoved) -> None:
        for name in event.block_hashes:
            block = blocks.get((name, event.group_idx))
            if block is None:
                continue  # stored before we listened
            block.copies -= 1
            if not block.copies:
                del blocks[name, event.group_idx]
                self._leave(block)

    def _enter(self, block: _Block) -> None:
        held = self.held.setdefault(block.version, Counter())
        held[block.digest] += 1
        if held[block.digest] == 1:
            self._change(block)

    def _leave(self, block: _Block) -> None:
        if not block.version:
            return
        held = self.held[block.version]
        held[block.digest] -= 1
        if not held[block.digest]:
            del held[block.digest]
            if not held:
                del self.held[block.version]
            self._change(block)

    def _change(self, block: _Block) -> None:
        self.changed.setdefault(block.version, set()).add(block.digest)


def _plain(event: BlockStored) -> int:
    """How many of the event's blocks, from its first, are separated by tokens and adapter alone."""
    count = len(event.block_hashes)
    if event.block_size < 1 or len(event.token_ids) != count * event.block_size:
        return 0  # layers that keep less than all tokens
    if event.lora_id is not None and event.lora_name is None:
        return 0
    usual = [event.lora_name] if event.lora_name else []
    for place, keys in enumerate(event.extra_keys or ()):
        if (keys or []) != usual:
            return min(place, count)
    return count


class Stream:
    """One rank's batches, each applied to the cache once and in order.

    A batch that came too early is not taken by `offer`: the engine's replay fills the hole with `accept`, and what it
    cannot fill costs all that was known of this rank. `whole` says that nothing of this life is missing. That another
    process speaks shows in its numbers as a rule only: whoever learns of one makes a new stream.
    """

    def __init__(self, cache: Cache, rank: int) -> None:
        self._cache = cache
        self._rank = rank
        self._ts = -math.inf
        self._began_again = False
        self.expected = 0
        self.whole = True
        self.orphans = 0
        self.gaps = 0
        self.losses = 0

    def offer(self, sequence: int, batch: Batch) -> bool:
        """False: batches from `expected` on are missing before this one."""
        if self._seen(sequence, batch):
            return True
        if sequence > self.expected:
            self.gaps += 1
            return False
        self._take(sequence, batch)
        return True

    def accept(self, sequence: int, batch: Batch) -> None:
        """Take it whatever is missing before it."""
        if self._seen(sequence, batch):
            return
        if sequence > self.expected:
            self._cache.clear(self._rank)  # a removal may be among what is missing
            self.whole = False
            self.losses += 1
        self._take(sequence, batch)

    @property
    def doubtful(self) -> bool:
        """Something follows a block that should be known: what we know is to be built anew, once in a life."""
        return self.whole and self.orphans > 0 and not self._began_again

    def begin_again(self) -> None:
        self._restart()
        self._began_again = True

    def _seen(self, sequence: int, batch: Batch) -> bool:
        """Live messages and a replay overlap. A lower number of a later time is the first word of another process."""
        if sequence >= self.expected:
            return False
        if batch.ts <= self._ts:
            return True
        self._restart()
        return False

    def _restart(self) -> None:
        self._cache.clear(self._rank)
        self.expected, self._ts, self.orphans, self.whole, self._began_again = 0, -math.inf, 0, True, False

    def _take(self, sequence: int, batch: Batch) -> None:
        self.expected, self._ts = sequence + 1, batch.ts
        self.orphans += self._cache.apply(self._rank, batch.events)
        if self._cache.changed:
            self._cache.changed_at = min(self._cache.changed_at, batch.ts)
