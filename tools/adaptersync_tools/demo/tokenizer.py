"""A tokenizer with one token per character, and the chat template the demo talks in.

Nothing is downloaded: the vocabulary is the printable ASCII characters, the role names and three markers.
"""

from __future__ import annotations

import string
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, TURN, END = "<pad>", "<|im_start|>", "<|im_end|>"
ROLES = ("system", "user", "assistant")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# How to read an answer back out of tokens; transformers knows it for published templates, not for ours.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {"content": {"close_pattern": r"<\|im_end\|>\s*|$", "content": "text"}},
}


def build() -> PreTrainedTokenizerFast:
    """The tokenizer, always the same: token ids follow from the order of the vocabulary."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = [PAD, TURN, END, *string.printable, *ROLES]
    model = models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="?")  # noqa: S106
    core = Tokenizer(model)
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=END, additional_special_tokens=[TURN]
    )
    tokenizer.add_tokens(list(ROLES))
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.padding_side = "left"
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer
