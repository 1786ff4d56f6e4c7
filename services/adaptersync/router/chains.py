"""What of a request's prompts routing looks up: chains of block hashes, remembered for the rest of a group.

Trainers ask for several completions of each prompt, with the same bytes. To read a prompt and hash its blocks is a
fifth of what the router does for a request (20 µs for 135 token ids), so the last ones are kept as they came out.
"""

from __future__ import annotations

from collections import OrderedDict

from msgspec import Struct

from adaptersync.router.asked import Asked
from adaptersync.router.prompts import Reader
from adaptersync_core.blocks import block_hashes

KEPT = 256  # requests
LONGEST = 32 << 10  # bytes of what is read of a request, as JSON; with its hashes about as much again is kept


class Chains(Struct, frozen=True, kw_only=True):
    """Hashes of the first prompt, and of the `others` that come with it.

    The request is of `weight` sequences, `alike` of them of the first prompt, which has so many `tokens`, where that is
    known. `read` and `reason` as in `prompts.Looked`.
    """

    first: tuple[str, ...] = ()
    others: tuple[tuple[str, ...], ...] = ()
    weight: int = 1
    alike: int = 1
    tokens: int = 0
    read: str = "nothing"
    reason: str = ""


NONE = Chains()


class RememberedChains:
    """`blocks` are looked up of one request."""

    def __init__(self, reader: Reader, *, blocks: int) -> None:
        self._reader = reader
        self._blocks = blocks
        self._kept: OrderedDict[tuple[str | int | bytes, ...], Chains] = OrderedDict()

    async def chains(self, version: str, asked: Asked, *, chat: bool, block_size: int) -> Chains:
        key: tuple[str | int | bytes, ...] | None = None
        # all that the reader goes by in a completion
        said = (
            asked.prompt,
            asked.n,
            asked.best_of,
            asked.suffix,
            asked.truncate_prompt_tokens,
            asked.add_special_tokens,
        )
        if not chat and sum(map(len, said)) <= LONGEST:
            key = (version, block_size, *map(bytes, said))
            if (known := self._kept.get(key)) is not None:
                return known
        prompts = await self._reader.read(asked, chat=chat, limit=self._blocks * block_size)
        first, *others = (
            tuple(block_hashes(version, looked.tokens, block_size, self._blocks, by_bytes=looked.read == "bytes"))
            for looked in prompts.looked or (prompts.first,)
        )
        chains = Chains(
            first=first,
            others=tuple(others),
            weight=prompts.weight,
            alike=prompts.alike,
            tokens=len(prompts.first.tokens) if first and prompts.first.read != "bytes" else 0,
            read=prompts.first.read,
            reason=prompts.first.reason,
        )
        if key is not None:
            self._kept[key] = chains
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return chains
