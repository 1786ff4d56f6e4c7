"""A tiny Qwen2 on disk: real enough for vLLM to serve on a CPU, small enough to build in a second.

Its tokenizer is a byte-level BPE without merges, numbered so that a token's id is the byte it stands for:
text tokenises exactly as in the simulator without a tokenizer.

Knows torch and transformers only inside `build_tiny_model`; the sizes are constants that others may import.
"""

import json
from math import prod
from pathlib import Path
from typing import Any

from support.adapters import write_safetensors

HIDDEN = 128
HEADS = 4  # vLLM's CPU attention wants heads of at least 32
LAYERS = 2
INTERMEDIATE = 256
VOCAB = 320
PAD, EOS = 256, 257

_CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_sizes(directory: Path) -> Path:
    """What the simulator and an agent read of the model: config.json, and weights of the right shapes; no torch."""
    directory.mkdir(parents=True, exist_ok=True)
    sizes = {
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCAB,
    }
    (directory / "config.json").write_text(json.dumps(sizes))
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        shapes |= {f"{attention}.{name}.weight": (HIDDEN, HIDDEN) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
        shapes |= {f"{mlp}.{name}.weight": (INTERMEDIATE, HIDDEN) for name in ("gate_proj", "up_proj")}
        shapes[f"{mlp}.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
    tensors = {name: (shape, bytes(4 * prod(shape))) for name, shape in shapes.items()}
    write_safetensors(directory / "model.safetensors", tensors)
    return directory


def build_tiny_model(directory: Path, *, seed: int = 0, architecture: str = "qwen2") -> Path:
    """Write model, config and tokenizer into `directory` (created) and return it.

    `architecture` is qwen2, or llama, whose embedding and head vLLM makes ready for LoRA, too.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Tokenizer

    symbols = _byte_symbols()
    tokenizer = Qwen2Tokenizer(
        vocab={symbol: byte for byte, symbol in enumerate(symbols)} | {"<pad>": PAD, "<eos>": EOS},
        merges=[],
        unk_token="<eos>",
        eos_token="<eos>",
        pad_token="<pad>",
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        architecture,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=2048,
        initializer_range=0.1,
        tie_word_embeddings=False,
        eos_token_id=EOS,
        pad_token_id=PAD,
        bos_token_id=None,
    )
    directory.mkdir(parents=True, exist_ok=True)
    model: Any = AutoModelForCausalLM.from_config(config)
    model.to(torch.float32).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _byte_symbols() -> list[str]:
    """The printable character byte-level BPE writes for each byte: itself, or the next one from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
