"""A tokenizer as models have them, for the vocabulary of the tiny model: merges, a first token, tokens added later.

Knows tokenizers and transformers only inside `build_tokenizer`.
"""

from pathlib import Path

from support.tiny_model import VOCAB

PLAIN = (
    "{%- for m in messages %}\n  <{{ m.role }}>{{ m['content'] | trim }}</{{ m.role }}>\n{%- endfor %}\n"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def build_tokenizer(directory: Path) -> Path:
    """Write it into `directory` and return that. Loads transformers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 2,
        special_tokens=["<|begin|>", "<|end|>", "<|x|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(["the word and what is said in it, user and assistant " * 9], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|begin|>", eos_token="<|end|>", add_bos_token=True
    )
    tokenizer.chat_template = PLAIN
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|late|>"]})
    tokenizer.save_pretrained(directory)
    return directory
