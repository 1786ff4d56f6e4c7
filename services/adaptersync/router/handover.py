"""What transformers makes of a tokenizer's directory, written to standard output: run as a process of its own.

What a directory means is decided by transformers, which vLLM asks, too: the class of a model may replace much of what
its tokenizer.json says, and other files add tokens to it. It takes seconds to load, and with torch beside it half a
gigabyte; so it is asked once, here, and the router keeps only what came of it.
"""

from __future__ import annotations

import sys

import msgspec
from msgspec import Struct


class Handover(Struct, frozen=True, kw_only=True):
    """`core` as the tokenizers library writes itself; chat templates by name, `default` where there is but one."""

    core: str
    templates: dict[str, str]
    special: dict[str, str]


def hand_over(source: str) -> Handover:
    """`source` is a directory, or a name on a hub. Whatever transformers raises."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    if not tokenizer.is_fast:
        raise ValueError("its tokenizer is not one of the tokenizers library")
    given = tokenizer.chat_template
    templates = given if isinstance(given, dict) else {"default": given} if given else {}
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return Handover(core=tokenizer.backend_tokenizer.to_str(), templates=templates, special=special)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(hand_over(sys.argv[1])))
