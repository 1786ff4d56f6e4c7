"""What transformers makes of a tokenizer's directory, written to standard output: run as a process of its own.

What a directory means is decided by transformers, which vLLM asks, too: the class of a model may replace much of what
its tokenizer.json says, and other files add tokens to it. It takes seconds to load, and with torch beside it half a
gigabyte; so it is asked once, here, and the router keeps only what came of it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from msgspec import Struct

# What vLLM 0.32 reads or renders in a way of its own, by the model's type and the beginning of its architecture
OWN_TYPES = {"gpt_oss", "internlm2", "step3_vl", "step3p7", "unlimited-ocr", "unlimited_ocr"}
OWN_ARCHITECTURES = ("DeepseekV32", "DeepseekV4", "Inkling", "KimiK3", "MoonshotKimia")
OWN_FILES = ("tekken.json", "tokenizer.model.v*")  # of Mistral
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


class Handover(Struct, frozen=True, kw_only=True):
    """`core` as the tokenizers library writes itself; chat templates by name, `default` where there is but one."""

    core: str
    templates: dict[str, str]
    special: dict[str, str]


def hand_over(source: str) -> Handover:
    """`source` is a directory, or a name on a hub. ValueError where vLLM does otherwise; whatever transformers raises.

    Where images are taken the template is the processor's, which is not looked at: there is none.
    """
    from transformers import AutoTokenizer, PretrainedConfig

    config, _ = PretrainedConfig.get_config_dict(source)
    own = config.get("model_type") in OWN_TYPES or any(
        name.startswith(OWN_ARCHITECTURES) for name in config.get("architectures") or ()
    )
    if own or _has(source, OWN_FILES):
        raise ValueError("vLLM has a way of its own with prompts of this model: leave the setting empty")
    tokenizer = AutoTokenizer.from_pretrained(source)
    if not tokenizer.is_fast:
        raise ValueError("it is not one of the tokenizers library")
    given = None if _has(source, PROCESSOR_FILES) else tokenizer.chat_template
    templates = given if isinstance(given, dict) else {"default": given} if given else {}
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return Handover(core=tokenizer.backend_tokenizer.to_str(), templates=templates, special=special)


def _has(source: str, patterns: tuple[str, ...]) -> bool:
    return any(any(Path(source).glob(pattern)) for pattern in patterns)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(hand_over(sys.argv[1])))
